"""Calls to a corrector's API, and what they cost."""

from __future__ import annotations

import json
from typing import Any

from ..correctors.arguments import CorrectorArguments
from ..correctors.openai.budget import picture_tokens, price_of, words
from ..correctors.openai.conversation import Conversation
from ..correctors.openai.corrector import data_url
from ..correctors.questions import answer_schema
from ..types import all_pictures
from .estimate import Estimate
from .observations import Observations
from .work import Work

TOOL_ROUNDS = 3
"""`OpenAICorrector`'s default: how many calls per correction may use the task's tools."""


def corrector_section(work: Work, seen: Observations, arguments: CorrectorArguments) -> list[Estimate]:
    name = arguments.corrector if work.clones else "none"
    if name not in ("openai", "azure"):
        free = {
            "expert": "the task's own expert answers: free",
            "none": "no corrector",
            "recorded": "answers come from a cache: free",
            "local": "a local model answers: no API calls, but its memory and time are not in this plan",
        }
        return [Estimate("corrector", name, "", free[name]), Estimate("dollars", 0.0, "USD", free[name])]
    requests = work.args.num_updates * work.steps
    first = seen.requests[0]
    tools = bool(first.task.tools)
    prompt = sum(_prompt_tokens(each, arguments) for each in seen.requests) / len(seen.requests)
    answer = sum(_answer_tokens(each) for each in seen.requests) / len(seen.requests)
    bytes_rule = "3 bytes per token"
    found = [
        Estimate("corrector", f"{name} {arguments.corrector_model}", "", "from the settings"),
        Estimate("corrections", requests, "", "one per step, assuming every response is valid"),
        Estimate("prompt tokens", prompt, "", f"question and image of one call; {bytes_rule}"),
        Estimate("answer tokens", answer, "", f"as long as the expert's thought for each question; {bytes_rule}"),
    ]
    prices = arguments.corrector_prices or price_of(arguments.corrector_model)
    if prices is None:
        how = f"the price of {arguments.corrector_model} is unknown: set --corrector_prices"
        return [*found, Estimate("dollars", "unknown", "", how)]
    one = (prompt * prices[0] + answer * prices[1]) / 1e6
    how = f"one call each; {prices[0]:g} and {prices[1]:g} USD per million prompt and answer tokens"
    found.append(Estimate("dollars", requests * one, "USD", how))
    if tools:
        most = requests * one * (1 + TOOL_ROUNDS)
        found.append(
            Estimate("dollars with tools", most, "USD", f"at most: {TOOL_ROUNDS} tool calls before each answer")
        )
    if arguments.corrector_max_usd is not None:
        found.append(
            Estimate("budget", arguments.corrector_max_usd, "USD", "--corrector_max_usd: the run never spends more")
        )
    return found


def _prompt_tokens(request: Any, arguments: CorrectorArguments) -> int:
    """Prompt tokens of a correction's first call, by the same rule as the budget's reservations."""
    size, pictures = arguments.corrector_image_size, all_pictures(request.prompt, request.image)
    parts = [{"type": "image_url", "image_url": {"url": data_url(each, size)}} for each in pictures]
    talk = Conversation(request, parts)
    body = {"messages": talk.messages, "tools": talk.tools, "schema": answer_schema(request.task)}
    return words(body) + len(pictures) * picture_tokens(arguments.corrector_model)


def _answer_tokens(request: Any) -> int:
    """Tokens of an answer that corrects everything: the expert's thought and a short reply to every question."""
    thought = request.response
    answers = {key: " ".join(map(str, thought.fields.values())) for key in request.task.rubric.questions}
    return words(
        json.dumps({**answers, "evaluation": "NO", "correction": dict(thought.fields), "right_action": thought.action})
    )

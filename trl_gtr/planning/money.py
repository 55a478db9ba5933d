"""What a corrector behind a server will be asked, and what that costs."""

from __future__ import annotations

import json
from typing import Any

from ..correctors.arguments import CorrectorArguments
from ..correctors.openai.budget import picture_tokens, price_of, words
from ..correctors.openai.conversation import Conversation
from ..correctors.openai.corrector import data_url
from ..correctors.questions import answer_schema
from .estimate import Estimate
from .observations import Observations
from .work import Work

TOOL_ROUNDS = 3
"""`OpenAICorrector`'s default: so many calls of a correction may ask for the task's tools."""


def corrector_section(work: Work, seen: Observations, arguments: CorrectorArguments) -> list[Estimate]:
    name = arguments.corrector if work.clones else "none"
    if name not in ("openai", "azure"):
        free = {
            "expert": "the task's own expert answers: free",
            "none": "nobody is asked",
            "recorded": "answers come from a cache: free",
            "local": "a model on this machine answers: no calls, but memory and time that this plan leaves out",
        }
        return [Estimate("corrector", name, "", free[name]), Estimate("dollars", 0.0, "USD", free[name])]
    requests = work.args.num_updates * work.steps
    first = seen.requests[0]
    tools = bool(first.task.tools)
    prompt = sum(_prompt_tokens(each, arguments) for each in seen.requests) / len(seen.requests)
    answer = sum(_answer_tokens(each) for each in seen.requests) / len(seen.requests)
    bytes_rule = "3 bytes a token"
    found = [
        Estimate("corrector", f"{name} {arguments.corrector_model}", "", "from the settings"),
        Estimate("corrections", requests, "", "one a step: as if every response were valid"),
        Estimate("prompt tokens", prompt, "", f"a call's question and picture; {bytes_rule}"),
        Estimate("answer tokens", answer, "", f"as long as the expert's thought for each question; {bytes_rule}"),
    ]
    prices = arguments.corrector_prices or price_of(arguments.corrector_model)
    if prices is None:
        how = f"the price of {arguments.corrector_model} isn't known: set --corrector_prices"
        return [*found, Estimate("dollars", "unknown", "", how)]
    one = (prompt * prices[0] + answer * prices[1]) / 1e6
    how = f"a call each, {prices[0]:g} and {prices[1]:g} USD a million prompt and answer tokens"
    found.append(Estimate("dollars", requests * one, "USD", how))
    if tools:
        most = requests * one * (1 + TOOL_ROUNDS)
        found.append(
            Estimate("dollars with tools", most, "USD", f"at most: {TOOL_ROUNDS} calls for tools before each answer")
        )
    if arguments.corrector_max_usd is not None:
        found.append(
            Estimate("budget", arguments.corrector_max_usd, "USD", "--corrector_max_usd: the run never spends more")
        )
    return found


def _prompt_tokens(request: Any, arguments: CorrectorArguments) -> int:
    """Of a correction's first call, by the rule with which the budget reserves."""
    picture = {"type": "image_url", "image_url": {"url": data_url(request.image, arguments.corrector_image_size)}}
    talk = Conversation(request, picture)
    body = {"messages": talk.messages, "tools": talk.tools, "schema": answer_schema(request.task)}
    return words(body) + picture_tokens(arguments.corrector_model)


def _answer_tokens(request: Any) -> int:
    """An answer that corrects everything: the expert's thought, and a short sentence to every question."""
    thought = request.response
    answers = {key: " ".join(map(str, thought.fields.values())) for key in request.task.rubric.questions}
    return words(
        json.dumps({**answers, "evaluation": "NO", "correction": dict(thought.fields), "right_action": thought.action})
    )

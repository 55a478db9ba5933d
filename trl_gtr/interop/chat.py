"""Model and processor for TRL's tool calls: the agent writes plain JSON; each response is a call of `act`."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

from transformers import PreTrainedModel, ProcessorMixin

from ..policy.loading import eos_token_ids, suppressed_tokens

EPISODE_OVER = "The episode is over."
"""The last result of `act`. What the model writes after it is no call, so TRL ends the rollout."""

# Turns a conversation with tool calls into user and assistant turns, which every chat template renders. Calls of
# other tools, of which there are none, are spelled out: TRL checks that a template can render a call by its name.
PRELUDE = """\
{%- set tools = none -%}
{%- set plain = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{%- set plain.messages = plain.messages + [{'role': 'user', 'content': message['content']}] -%}
{%- elif message['tool_calls'] -%}
{%- set call = message['tool_calls'][0]['function'] -%}
{%- if call['name'] == 'act' and 'response' in call['arguments'] -%}
{%- set text = call['arguments']['response'] -%}
{%- else -%}
{%- set text = call['name'] + '(' + (call['arguments'] | tojson) + ')' -%}
{%- endif -%}
{%- set content = [{'type': 'text', 'text': text}] -%}
{%- set plain.messages = plain.messages + [{'role': 'assistant', 'content': content}] -%}
{%- else -%}
{%- set plain.messages = plain.messages + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = plain.messages -%}
"""


def prepare_model(model: PreTrainedModel, processor: ProcessorMixin) -> tuple[PreTrainedModel, ProcessorMixin]:
    """The model, and a copy of its processor, ready for TRL's `GRPOTrainer` with [`environment_factory`].

    - The chat template shows the model an ordinary conversation: each observation is a user turn, each response an
      assistant turn. A response is parsed as a call of the tool `act`.
    - The model never samples special tokens such as `<image>`, which would break the next forward pass, and never an
      empty response.
    - The model ignores `token_type_ids`, which TRL passes along with pictures although LLaVA has no use for them.

    Raises a `ValueError` if the chat template can't render such conversations.
    """
    processor = copy.deepcopy(processor)
    template = processor.chat_template
    if not isinstance(template, str):
        raise ValueError(
            f"{type(processor).__name__} has {'several chat templates' if template else 'no chat template'}: "
            "set processor.chat_template to the one to use."
        )
    if not template.startswith(PRELUDE):
        processor.chat_template = PRELUDE + template
    _check_turns(processor)
    tokenizer = processor.tokenizer
    ends = eos_token_ids(model, tokenizer)
    tokenizer.response_template = _response_template(processor, [tokenizer.decode([token]) for token in ends])
    _ignore_token_types(model)
    model.generation_config.suppress_tokens = suppressed_tokens(model, processor, ends).nonzero().flatten().tolist()
    # An empty response would be no call, so it would end the episode.
    model.generation_config.begin_suppress_tokens = list(ends)
    return model, processor


def _check_turns(processor: Any) -> None:
    """Every turn must be rendered with its picture, and the same whatever follows it."""

    def user(text: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}

    call = {"type": "function", "function": {"name": "act", "arguments": {"response": "FIRST RESPONSE"}}}
    turns = [user("FIRST PROMPT"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    shown = {**user("SECOND PROMPT"), "role": "tool"}
    start = processor.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    first = processor.apply_chat_template(turns, tokenize=False)
    whole = processor.apply_chat_template([*turns, shown], tokenize=False, add_generation_prompt=True)
    remedy = "Training over several turns needs a chat template that does: set processor.chat_template to one."
    name = type(processor).__name__
    if not (first.startswith(start) and whole.startswith(first.rstrip())):
        raise ValueError(f"The chat template of {name} doesn't render a turn the same whatever follows it. {remedy}")
    if "FIRST RESPONSE" not in first or "SECOND PROMPT" not in whole:
        raise ValueError(f"The chat template of {name} leaves out turns. {remedy}")
    if whole.count(processor.image_token) != 2 * start.count(processor.image_token):
        raise ValueError(f"The chat template of {name} doesn't render the picture of every turn. {remedy}")


def _response_template(processor: Any, ends: list[str]) -> dict[str, Any]:
    """How TRL parses a response: all of its text is one call of `act`, unless the episode is over.

    Args:
        ends: The texts that end a response.
    """
    over = {"role": "tool", "content": [{"type": "text", "text": EPISODE_OVER}]}
    rendered = processor.apply_chat_template([over], tokenize=False, add_generation_prompt=True)
    # With what the template puts after it, and at the end, so that no response can pass for it.
    mark = EPISODE_OVER + rendered.rpartition(EPISODE_OVER)[2]
    call = {"type": "function", "function": {"name": "act", "arguments": {"response": "{content}"}}}
    return {
        "defaults": {"role": "assistant"},
        # Of the prompt, the parser sees only the last result, and only if that ends the episode.
        "start_anchor_pattern": rf"\A.*?(?={re.escape(mark)}\Z|\Z)",
        "fields": {
            "tool_calls": {"close": ends, "repeats": True, "content_args": {"strip": False}, "transform": call},
            "content": {"open": mark},
        },
    }


def _ignore_token_types(model: PreTrainedModel) -> None:
    """Let `forward` take `token_type_ids`, and say so in its signature, by which `generate` checks its arguments."""
    own = type(model)
    parameters = list(inspect.signature(own.forward).parameters.values())
    if any(parameter.name == "token_type_ids" for parameter in parameters):
        return

    def forward(self: Any, *args: Any, token_type_ids: Any = None, **kwargs: Any) -> Any:
        return own.forward(self, *args, **kwargs)

    ignored = inspect.Parameter("token_type_ids", inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters.insert(-1 if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD else len(parameters), ignored)
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    # A class of the same name, by which saved checkpoints are loaded again.
    model.__class__ = type(own.__name__, (own,), {"forward": forward, "__module__": own.__module__})

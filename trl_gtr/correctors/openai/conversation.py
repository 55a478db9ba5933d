"""A conversation with a language model about one step: question, tool rounds, answer, one repair. Does no I/O.

`messages` is what to send next; `hear` takes the reply and returns the correction, or `None` to continue.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ...types import Correction, CorrectionRequest
from ..answers import AnswerProblem, no_constant, parse_answer, read_object
from ..base import failed
from ..questions import answer_schema, instructions, question
from .chat import Reply, ToolCall

logger = logging.getLogger(__name__)

MAX_CALLS_AT_ONCE = 8
MAX_ARGUMENTS = 1000
MAX_TOOL_ANSWER = 4000


class Conversation:
    """The conversation about one step.

    Args:
        pictures: What the agent saw, in order (`all_pictures`), as parts of a message's content, e.g.
            `{"type": "image_url", ...}`.
        tools_in_words: Describe the tools in the instructions, for models and servers without native tool calls.
        max_tool_rounds: Maximum replies that may call tools.
        repairs: How many unusable answers are sent back with an error message.
    """

    def __init__(
        self,
        request: CorrectionRequest,
        pictures: Sequence[Mapping[str, Any]],
        *,
        tools_in_words: bool = False,
        max_tool_rounds: int = 3,
        repairs: int = 1,
    ):
        self.request = request
        self.task_tools = {tool.name: tool for tool in request.task.tools}
        self.tools_in_words = tools_in_words and bool(self.task_tools)
        self.tool_rounds_left = max_tool_rounds if self.task_tools else 0
        self.repairs_left = repairs
        rules = instructions(request.task, tools_in_words=self.tools_in_words)
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": rules},
            {"role": "user", "content": question(request, pictures)},
        ]

    @property
    def schema(self) -> dict[str, Any] | None:
        """JSON schema of the next reply; `None` while it may also be a tool call."""
        return None if self.tool_rounds_left else answer_schema(self.request.task)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Function descriptions of the tools. They may be called while `schema` is `None`; after that they only
        explain the calls in `messages`."""
        if self.tools_in_words:
            return []
        return [
            {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
            for tool in self.task_tools.values()
        ]

    def hear(self, reply: Reply) -> Correction | None:
        if reply.refusal:
            return failed("refused", reply.refusal)
        calls: Sequence[ToolCall] = reply.tool_calls or self._call_in_words(reply)
        if calls:
            return self._use_tools(reply, calls)
        try:
            if reply.problem:
                raise AnswerProblem(reply.problem)
            return parse_answer(reply.content, self.request)
        except AnswerProblem as problem:
            if self.repairs_left == 0:
                return failed("unusable", str(problem)[:300])
            self.repairs_left -= 1
            self.tool_rounds_left = 0  # the repair must follow the schema
            self._say("assistant", reply.content[:MAX_TOOL_ANSWER] or "(nothing)")
            self._say("user", f"That answer can't be used: {problem}. Answer again, with the JSON object only.")
            return None

    def _say(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def _call_in_words(self, reply: Reply) -> tuple[ToolCall, ...]:
        """A tool call written as `{"tool": ..., "arguments": {...}}`."""
        if not self.tools_in_words or reply.problem:
            return ()
        try:
            call = read_object(reply.content)
        except AnswerProblem:
            return ()
        if set(call) != {"tool", "arguments"}:
            return ()
        return (ToolCall("", str(call["tool"]), json.dumps(call["arguments"])),)

    def _use_tools(self, reply: Reply, calls: Sequence[ToolCall]) -> Correction | None:
        if self.tool_rounds_left == 0:
            return failed("unusable", "tool calls without end")
        if len(calls) > MAX_CALLS_AT_ONCE:
            return failed("unusable", f"{len(calls)} tool calls at once")
        self.tool_rounds_left -= 1
        answers = [self._run(call) for call in calls]
        if not reply.tool_calls:
            self._say("assistant", reply.content[:MAX_TOOL_ANSWER])
            self._say("user", f"The tool found: {answers[0]}")
            return None
        self.messages.append(
            {
                "role": "assistant",
                "content": reply.content[:MAX_TOOL_ANSWER] or None,
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": _repeatable(call.arguments)},
                    }
                    for call in calls
                ],
            }
        )
        for call, answer in zip(calls, answers, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
        return None

    def _run(self, call: ToolCall) -> str:
        """Run a tool and return its answer, or an error message for the model that wrote the arguments."""
        tool = self.task_tools.get(call.name)
        if tool is None:
            return f"error: there is no such tool; the tools are {', '.join(self.task_tools)}"
        if len(call.arguments) > MAX_ARGUMENTS:
            return f"error: arguments longer than {MAX_ARGUMENTS} characters"
        try:
            arguments = read_object(call.arguments)
            unknown = set(arguments) - set(tool.parameters.get("properties", {}))
            missing = set(tool.parameters.get("required", ())) - set(arguments)
            if unknown or missing:
                raise ValueError(f"unknown arguments {sorted(unknown)}, missing arguments {sorted(missing)}")
            return str(tool.run(arguments))[:MAX_TOOL_ANSWER]
        except (ValueError, TypeError, ArithmeticError, LookupError) as error:
            logger.debug("tool %s was called with invalid arguments", tool.name)
            return f"error: {str(error)[:200]}"


def _repeatable(arguments: str) -> str:
    """A call's arguments for the message history, or `{}`: servers parse them again and reject invalid JSON."""
    if len(arguments) > MAX_ARGUMENTS:
        return "{}"
    try:
        return arguments if isinstance(json.loads(arguments, parse_constant=no_constant), dict) else "{}"
    except (ValueError, RecursionError):
        return "{}"

"""Parses a language model's answer about one step and checks that it is consistent.

All checks use public information: the schema, the task's format, the legal actions, the public state, and the
answer's own reading of the image. The hidden truth is never consulted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..responses.action_text import plain_signs
from ..storage.files import LONE_SURROGATE
from ..tasks.base import contradicts
from ..types import Correction, CorrectionRequest, Response
from .questions import CORRECTION, EVALUATION, NO, RIGHT_ACTION, YES

MAX_THOUGHT = 4000
"""Maximum characters in a corrected thought; labels longer than any response would only be truncated."""


class AnswerProblem(ValueError):
    """Why an answer can't be used. The model is sent this message so that it can try again."""


def read_object(text: str) -> dict[str, Any]:
    """Parse the only JSON object in a text. Code fences, prose and thinking around it are allowed; duplicate keys and
    a second object (one may be a draft) aren't."""
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        raise AnswerProblem("it ends in the middle of its thinking")
    start = text.find("{")
    if start < 0:
        raise AnswerProblem("there is no JSON object in it" if text.strip() else "it is empty")
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=no_constant)
    try:
        value, end = decoder.raw_decode(text, start)
        again = json.dumps(value, ensure_ascii=False)
    except AnswerProblem:
        raise
    except ValueError as error:
        raise AnswerProblem(f"it is no valid JSON: {error}") from None
    except RecursionError:
        raise AnswerProblem("it is nested too deeply") from None
    if "{" in text[end:]:
        raise AnswerProblem("there is more than one JSON object in it; write the final one only")
    if LONE_SURROGATE.search(again):
        raise AnswerProblem("it contains lone surrogates")
    return value


def parse_answer(text: str, request: CorrectionRequest) -> Correction:
    """Turn an answer into a correction; raises `AnswerProblem` if it is unusable."""
    task, rubric = request.task, request.task.rubric
    answer = read_object(text)
    _check_shape(answer, rubric)
    target = answer.get(rubric.target_key) if rubric.target_key else None
    solvable = answer.get(rubric.solution_key, YES) if rubric.solution_key else YES
    if answer[EVALUATION] == YES:
        if solvable == NO:
            raise AnswerProblem(f'"{EVALUATION}" is "{YES}" although "{rubric.solution_key}" is "{NO}"')
        return _accept(answer, request)
    if solvable == NO:
        if answer[CORRECTION] is not None:
            raise AnswerProblem(f'"{CORRECTION}" must be null where "{rubric.solution_key}" is "{NO}"')
        return Correction("unsolvable", reason="the corrector sees no solution")
    if not isinstance(answer[CORRECTION], dict):
        raise AnswerProblem(f'"{CORRECTION}" must be an object where "{EVALUATION}" is "{NO}"')
    thought = check_thought(answer[CORRECTION], task)
    action = _legal_spelling(answer[RIGHT_ACTION], request)
    if thought == dict(request.response.fields) and action in (None, request.response.action):
        raise AnswerProblem(f'"{EVALUATION}" is "{NO}" but the correction changes nothing')
    corrected = _respond(thought, action, request)
    aim = _check_consistency(corrected, action, request)
    if target is not None and aim is not None and _normalize(target) != _normalize(aim):
        raise AnswerProblem(f'"{rubric.target_key}" is not what the corrected thought aims at')
    return Correction("corrected", thought=thought, action=action, target=aim or target)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise AnswerProblem("a key is given twice")
    return dict(pairs)


def no_constant(name: str) -> Any:
    raise AnswerProblem(f"{name} is not a JSON value")


def _check_shape(answer: Mapping[str, Any], rubric: Any) -> None:
    expected = [*rubric.questions, EVALUATION, CORRECTION, RIGHT_ACTION]
    for key in (rubric.solution_key, rubric.target_key):
        if key and key not in expected:
            expected.append(key)
    missing = [key for key in expected if key not in answer]
    if missing:
        raise AnswerProblem(f"missing keys: {', '.join(missing)}")
    if len(answer) > len(expected):
        raise AnswerProblem(f"only these keys are allowed: {', '.join(expected)}")
    for key in expected:
        value = answer[key]
        if key in (EVALUATION, rubric.solution_key):
            if value not in (YES, NO):
                raise AnswerProblem(f'"{key}" must be "{YES}" or "{NO}"')
        elif key == CORRECTION:
            if value is not None and not isinstance(value, dict):
                raise AnswerProblem(f'"{CORRECTION}" must be an object or null')
        elif key in (RIGHT_ACTION, rubric.target_key):
            if value is not None and not isinstance(value, str):
                raise AnswerProblem(f'"{key}" must be a text or null')
        elif not isinstance(value, str):
            raise AnswerProblem(f'"{key}" must be a text')


def _accept(answer: Mapping[str, Any], request: CorrectionRequest) -> Correction:
    """Accept a YES only if nothing in the answer or in public information contradicts it."""
    response = request.response
    if answer[CORRECTION] is not None and answer[CORRECTION] != dict(response.fields):
        raise AnswerProblem(f'"{EVALUATION}" is "{YES}" but there is a correction')
    if answer[RIGHT_ACTION] not in (None, response.action):
        raise AnswerProblem(f'"{EVALUATION}" is "{YES}" but another action is called for')
    if request.task.to_env_action(response, request.info) is None:
        raise AnswerProblem(f'"{EVALUATION}" is "{YES}" but the agent\'s action is not legal')
    aim = _check_consistency(response, response.action, request)
    return Correction("right", action=response.action, target=aim)


def check_thought(correction: Mapping[str, Any], task: Any) -> dict[str, Any]:
    """Check a corrected thought; raises `AnswerProblem` if it breaks the task's format, is empty or too long."""
    try:
        thought = task.format.check_thought(correction)
        length = len(task.format.render_thought(thought))
    except ValueError as error:
        raise AnswerProblem(f'"{CORRECTION}": {error}') from None
    texts = [thought[field.key] for field in task.format.fields if field.kind == "text"]
    if texts and not any(text.strip() for text in texts):
        raise AnswerProblem(f'"{CORRECTION}" says nothing')
    if length > MAX_THOUGHT:
        raise AnswerProblem(f'"{CORRECTION}" is longer than {MAX_THOUGHT} characters')
    return thought


def _legal_spelling(action: str | None, request: CorrectionRequest) -> str | None:
    """The legal action that a text names (" Hit" is "hit"), or the text itself if it names none."""
    task, legal = request.task, request.task.legal_actions(request.info)
    if action is None or action in legal:
        return action
    named = task.to_env_action(replace(request.response, action=action, error=None), request.info)
    if named is None:
        return action
    spellings = (replace(request.response, action=text, error=None) for text in legal)
    return next((r.action for r in spellings if task.to_env_action(r, request.info) == named), action)


def _respond(thought: Mapping[str, Any], action: str | None, request: CorrectionRequest) -> Response:
    """Render the corrected thought as the agent would have written it and parse it with the task's own format."""
    task = request.task
    legal = task.legal_actions(request.info)  # public: the agent was told them
    written = task.format.parse(task.format.render(thought, legal[0] if action is None else action))
    if not written.valid or dict(written.fields) != thought:
        raise AnswerProblem(f'"{CORRECTION}" can\'t be read back: {written.error or "its parts change"}')
    if action is not None and task.to_env_action(written, request.info) is None:
        raise AnswerProblem(f'"{RIGHT_ACTION}" is no legal action')
    return written


def _check_consistency(response: Response, action: str | None, request: CorrectionRequest) -> str | None:
    """Check that the thought leads to its action, and that it is right if its own reading of the image is.

    Returns its target, if the task defines one.
    """
    task = request.task
    if contradicts(task, response.fields, action, request.info):
        concluded = task.format.conclusion(response.fields)
        raise AnswerProblem(f"the thought concludes {concluded!r}, but the action is {action!r}")
    try:
        believed = task.believed_info(response.fields, request.public_state)
    except ValueError as error:
        raise AnswerProblem(f"the thought's own reading can't be: {error}") from None
    if believed is None:
        return None
    parts = judge_parts(response, action, believed, request)
    wrong = [part for part, true in parts.items() if not true]
    if wrong:
        raise AnswerProblem(f"by its own reading of the picture the thought is wrong in: {', '.join(wrong)}")
    return task.target(response, believed)


def _normalize(formula: str) -> str:
    """Normalize a formula: no spaces, plain operators, nothing from the equals sign on."""
    return "".join(plain_signs(formula).partition("=")[0].split())


def judge_parts(
    response: Response, action: str | None, info: Mapping[str, Any], request: CorrectionRequest
) -> dict[str, bool]:
    """Run `task.judge` on a thought. If no action is given, use the legal action that scores best."""
    task = request.task
    if action is not None:
        return dict(task.judge(response, info))
    tries = []
    for legal in task.legal_actions(request.info):
        written = task.format.parse(task.format.render(response.fields, legal))
        tries.append(dict(task.judge(written, info)))
    return max(tries, key=lambda parts: sum(parts.values()))

"""Records passed between the subpackages: small, frozen, without torch.

Observation → prompt → [`Response`] → environment step → [`Transition`]; in parallel
[`CorrectionRequest`] → corrector → [`Correction`]. A [`Rollout`] holds everything collected for one update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

Verdict = Literal["right", "corrected", "unsolvable", "failed"]
FailureKind = Literal[
    "timeout",  # the server didn't answer in time
    "late",  # not back when the rollout stopped waiting
    "connection",  # could not connect, or the connection dropped
    "server",  # HTTP 429 or 5xx after all retries
    "rejected",  # any other HTTP 4xx
    "unavailable",  # not asked: too many failures in a row, so the server gets a pause
    "refused",  # the model refused
    "unusable",  # the answer failed the checks, even after a repair attempt
    "untrue",  # rejected by `verify_with_truth`
    "budget",  # the budget is spent
    "cancelled",  # the run ended
    "other",  # reported by a custom corrector
]
"""Why there is no label."""
FAILURE_KINDS: tuple[str, ...] = get_args(FailureKind)


@dataclass(frozen=True)
class Response:
    """What `ThoughtFormat.parse` found in the agent's text.

    Spans are half-open character ranges of `text`. The thought segment is everything before the `"action"` key; the
    action runs from that key to the end of the text.
    """

    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The thought's fields in schema order, without the action."""
    action: str | None = None
    """The action as the agent wrote it, stripped; `None` if missing."""
    thought_span: tuple[int, int] = (0, 0)
    action_span: tuple[int, int] | None = None
    """`None` when the text has no action key: then every token counts as thought."""
    error: str | None = None
    """Why the text is not a valid response; `None` if it is. The task decides whether the action is legal."""

    @property
    def valid(self) -> bool:
        return self.error is None

    @property
    def thought(self) -> str:
        """The thought segment as text."""
        start, end = self.thought_span
        return self.text[start:end]


@dataclass(frozen=True)
class Generation:
    """One sampled answer, as ids and as text."""

    ids: np.ndarray
    """int64, (tokens,): the ids as sampled, EOS included, padding excluded."""
    text: str
    """The decoded ids, without special tokens."""
    hit_length_limit: bool = False
    """Whether generation reached `max_completion_length` without an EOS."""
    logprobs: np.ndarray | None = None
    """float32, (tokens,): the sampler's own token log-probs, if the engine provides them."""


@dataclass(frozen=True)
class Turn:
    """An earlier step of an episode, as the agent sees it again: what it was told, and what it wrote."""

    prompt: str
    response: str
    image: np.ndarray | None = None
    """uint8, (height, width, 3): the observation then; `None` if the turn is shown without it."""


class Prompt(str):
    """A prompt that goes on with a chat: the words of this step, and the turns before it.

    To everything that only wants the words it is an ordinary string; equality and hash are those of the words.
    """

    history: tuple[Turn, ...]

    def __new__(cls, words: str, history: Sequence[Turn]) -> Prompt:
        prompt = super().__new__(cls, words)
        prompt.history = tuple(history)
        return prompt

    def __getnewargs__(self) -> tuple[str, tuple[Turn, ...]]:  # type: ignore[override]
        return str(self), self.history


Pictures = np.ndarray | tuple[np.ndarray, ...]
"""The picture of a step, uint8 (height, width, 3), or several."""


def turns_before(prompt: str) -> tuple[Turn, ...]:
    """The earlier turns of the chat, the oldest first; none for a plain string."""
    return prompt.history if isinstance(prompt, Prompt) else ()


def all_pictures(prompt: str, image: Pictures) -> tuple[np.ndarray, ...]:
    """Every picture of the chat, in order: those of the turns before, then the step's own."""
    earlier = (turn.image for turn in turns_before(prompt) if turn.image is not None)
    return (*earlier, *(image if isinstance(image, tuple) else (image,)))


def chat_messages(prompt: str, pictures: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The chat as messages of roles and content parts.

    Args:
        pictures: A content part for each of [`all_pictures`], in that order.
    """
    parts, messages = iter(pictures), []
    for turn in turns_before(prompt):
        shown = [] if turn.image is None else [dict(next(parts))]
        messages.append({"role": "user", "content": [*shown, {"type": "text", "text": turn.prompt}]})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": turn.response}]})
    own = [*map(dict, parts), {"type": "text", "text": str(prompt)}]
    return [*messages, {"role": "user", "content": own}]


class Cancellation:
    """Lets the caller cancel work that others are doing for it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[object, Callable[[], None]] = {}
        self._cancelled = False
        self.heeded = False
        """Whether anyone checks for cancellation. If so, it is worth waiting for partial results after `cancel`."""

    def __repr__(self) -> str:
        return f"Cancellation({'cancelled' if self._cancelled else 'not cancelled'})"

    @property
    def cancelled(self) -> bool:
        self.heeded = True
        return self._cancelled

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            callbacks, self._callbacks = self._callbacks, {}
            for callback in callbacks.values():  # under the lock: no callback runs after its `calling` block
                callback()

    @contextmanager
    def calling(self, callback: Callable[[], None]) -> Iterator[None]:
        """While the block runs, `cancel` calls `callback` in the cancelling thread; at once if already cancelled.

        The callback must be short and must not use this object.
        """
        key = object()
        self.heeded = True
        with self._lock:
            if self._cancelled:
                callback()
            else:
                self._callbacks[key] = callback
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.pop(key, None)


@dataclass(frozen=True)
class CorrectionRequest:
    """One step for a corrector to judge: what the agent saw and what it wrote."""

    image: np.ndarray
    """uint8, (height, width, 3): the observation."""
    prompt: str
    """A [`Prompt`] if the agent also saw earlier turns."""
    response: Response
    public_state: Mapping[str, Any]
    """What a player is allowed to know, in words; safe to send to a server."""
    info: Mapping[str, Any]
    """The environment's full info, including hidden state. For the exact expert and for audits; never leaves the
    process."""
    task: Any
    """The step's `trl_gtr.tasks.Task`."""
    cancellation: Cancellation = field(default_factory=Cancellation, compare=False, repr=False)
    """Tells the corrector that the answer is no longer needed. Ignoring it only wastes work."""


class Share(float):
    """A ratio that keeps numerator and denominator, so it can be aggregated exactly over processes."""

    def __new__(cls, part: float, whole: float) -> Share:
        share = super().__new__(cls, part / whole)
        share.part, share.whole = part, whole
        return share

    part: float
    whole: float

    def __getnewargs__(self) -> tuple[float, float]:  # type: ignore[override]
        return self.part, self.whole


@dataclass(frozen=True)
class Usage:
    """The cost of one correction."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.usd + other.usd,
        )


@dataclass(frozen=True)
class Correction:
    """A corrector's answer to one request. Only `verdict == "corrected"` carries a new thought. Only
    `verdict == "failed"` has a `failure`, which defaults to `"other"`."""

    verdict: Verdict
    thought: Mapping[str, Any] | None = None
    """The right thought's fields (`ThoughtFormat.render_thought` turns them into text)."""
    action: str | None = None
    """The action that the right thought calls for, if the corrector knows it."""
    target: str | None = None
    """What the right thought aims at (Points24: the whole formula)."""
    reason: str | None = None
    """Details of a failure, or the corrector's remark."""
    usage: Usage = Usage()
    latency: float = 0.0
    """Seconds the corrector spent on it, excluding time in its queue."""
    source: str = ""
    """Which corrector answered."""
    failure: FailureKind | None = None
    """Why a correction failed; `None` if it didn't."""
    fallback: bool = False
    """Whether a fallback corrector answered because the first one's budget was spent."""

    def __post_init__(self) -> None:
        if self.verdict == "failed" and self.failure is None:
            object.__setattr__(self, "failure", "other")
        if (self.verdict == "failed") != (self.failure is not None):
            raise ValueError(f"a correction with verdict {self.verdict!r} can't have a failure, got {self.failure!r}")
        if self.failure is not None and self.failure not in FAILURE_KINDS:
            raise ValueError(f"failure must be one of {', '.join(FAILURE_KINDS)}, not {self.failure!r:.50}")

    @property
    def explanation(self) -> str:
        """The failure kind and its details, or the corrector's remark; empty if there is neither."""
        return ": ".join(words for words in (self.failure, self.reason) if words)


@dataclass(frozen=True)
class Transition:
    """One environment step of one environment."""

    env_index: int
    step: int
    """Position in the rollout."""
    image: np.ndarray
    prompt: str
    """A [`Prompt`] if the agent also saw earlier turns; so is `final_prompt`."""
    response: Response
    response_ids: np.ndarray
    """int64, (tokens,): the ids as sampled, EOS included, padding excluded."""
    reward: float
    terminated: bool
    truncated: bool
    bootstrap: bool
    """Whether this step's target includes the value of the final observation (see `advantages.gae`)."""
    legal: bool
    """Whether the response was valid and named a legal action; if not, `invalid_action` decided what happened."""
    info: Mapping[str, Any]
    """The environment's info for `image`, i.e. from before the step."""
    final_info: Mapping[str, Any] | None = None
    """The info after the step that ended the episode; `None` while it goes on."""
    final_image: np.ndarray | None = None
    """The true last observation, if `bootstrap` is set."""
    final_prompt: str | None = None
    hit_length_limit: bool = False
    episode: int = 0
    """Number of episodes this environment had finished before."""
    episode_step: int = 0
    """Position in the episode."""
    substitute: str | None = None
    """The random legal action played instead; `None` if the agent's own was played or the step was skipped."""
    sampler_logprobs: np.ndarray | None = None
    """See `Generation.logprobs`."""


@dataclass
class Rollout:
    """`num_envs × rollout_steps` transitions, ordered by step, then by environment; fewer steps if collection ran out
    of time."""

    transitions: list[Transition]
    corrections: list[Correction | None]
    """One per transition; `None` where nothing was asked (unparsable text, or no corrector)."""
    last_images: list[np.ndarray]
    """The observations after the last step, one per environment, for bootstrapping."""
    last_prompts: list[str]
    episodes: list[Sequence[Transition]] = field(default_factory=list)
    """Complete episodes that ended in this rollout, including steps from earlier rollouts (without images)."""
    in_workers: bool = False
    """Whether environments ran in workers. An episode lost with its worker has `worker_lost` in its final info."""
    stop_reason: str | None = None
    """Why the run should end after this rollout (the corrector's budget is spent)."""
    times: dict[str, float] = field(default_factory=dict)
    """Seconds by phase."""

    def __len__(self) -> int:
        return len(self.transitions)

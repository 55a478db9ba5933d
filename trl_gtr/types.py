"""What flows between the rooms of the house: small frozen records; no torch.

Observation → prompt → [`Response`] → environment step → [`Transition`]; beside it
[`CorrectionRequest`] → corrector → [`Correction`]; all of one update together are a [`Rollout`].
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

Verdict = Literal["right", "corrected", "unsolvable", "failed"]
FailureKind = Literal[
    "timeout",  # the server didn't answer in time
    "late",  # given up when the rollout waited no longer
    "connection",  # none, or lost
    "server",  # HTTP 429 or 5xx to the end
    "rejected",  # another HTTP 4xx
    "unavailable",  # not asked: the server has failed many times in a row and is left alone for a while
    "refused",  # by the model
    "unusable",  # the answer fails the checks, and so does its repair
    "untrue",  # thrown away by `verify_with_truth`
    "budget",  # nothing left to spend
    "cancelled",  # the run ended
    "other",  # a reason of your own corrector
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
    """The thought's parts by key, in the order of the schema, without the action."""
    action: str | None = None
    """The action's text as the agent wrote it, stripped; `None` if there is none."""
    thought_span: tuple[int, int] = (0, 0)
    action_span: tuple[int, int] | None = None
    """`None` when the text has no action key: then every token counts as thought."""
    error: str | None = None
    """Why the text is no valid response; `None` if it is one. Legality of the action is the task's to decide."""

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
    """What the ids spell; special tokens spell nothing."""
    hit_length_limit: bool = False
    """No EOS came before `max_completion_length`."""
    logprobs: np.ndarray | None = None
    """float32, (tokens,): the sampler's own token log-probs, where the engine has them."""


class Cancellation:
    """Handed to everybody who works on something; whoever wants the results may call it off. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[object, Callable[[], None]] = {}
        self._cancelled = False
        self.heeded = False
        """Somebody has looked or listened: after `cancel` it is worth waiting for what they have so far."""

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
            for callback in callbacks.values():  # under the lock: nothing is called any more once `calling` has ended
                callback()

    @contextmanager
    def calling(self, callback: Callable[[], None]) -> Iterator[None]:
        """While the block runs, `cancel` calls `callback`, in its own thread; at once if it came before.

        The callback must be short and leave this object alone.
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
    """One step that a corrector judges: what the agent saw and what it wrote."""

    image: np.ndarray
    """uint8, (height, width, 3): the observation."""
    prompt: str
    response: Response
    public_state: Mapping[str, Any]
    """What a player of the game may know in words; safe to send anywhere."""
    info: Mapping[str, Any]
    """The environment's full info, hidden truth included. For the exact expert and for audits; it never leaves the
    process."""
    task: Any
    """The `trl_gtr.tasks.Task` that the step belongs to."""
    cancellation: Cancellation = field(default_factory=Cancellation, compare=False, repr=False)
    """Tells the corrector when nobody waits for the answer any more. Whoever ignores it only works in vain."""


class Share(float):
    """A quotient that remembers its parts, so that those of several processes can be added up."""

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
    """What one correction has cost."""

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
    """A corrector's answer to one request. Only `verdict == "corrected"` carries a new thought, and only
    `verdict == "failed"` a kind of failure: `"other"` if none is given."""

    verdict: Verdict
    thought: Mapping[str, Any] | None = None
    """The right thought's parts by key (`ThoughtFormat.render_thought` turns them into text)."""
    action: str | None = None
    """The action that the right thought calls for, where the corrector knows it."""
    target: str | None = None
    """What the right thought aims at (Points24: the whole formula)."""
    reason: str | None = None
    """More about a failure, or the corrector's remark."""
    usage: Usage = Usage()
    latency: float = 0.0
    """Seconds that the corrector worked on it, without the wait for its turn where only so many are under way."""
    source: str = ""
    """Which corrector answered."""
    failure: FailureKind | None = None
    """Why a correction failed; `None` if it didn't."""
    fallback: bool = False
    """Another corrector gave this answer because the first one's budget was spent."""

    def __post_init__(self) -> None:
        if self.verdict == "failed" and self.failure is None:
            object.__setattr__(self, "failure", "other")
        if (self.verdict == "failed") != (self.failure is not None):
            raise ValueError(f"a correction that is {self.verdict!r} has no failure, but {self.failure!r} was given")
        if self.failure is not None and self.failure not in FAILURE_KINDS:
            raise ValueError(f"failure must be one of {', '.join(FAILURE_KINDS)}, not {self.failure!r:.50}")

    @property
    def explanation(self) -> str:
        """The kind of a failure and more about it, or the corrector's remark; empty if there is neither."""
        return ": ".join(words for words in (self.failure, self.reason) if words)


@dataclass(frozen=True)
class Transition:
    """One environment step of one environment."""

    env_index: int
    step: int
    """Position inside the rollout."""
    image: np.ndarray
    prompt: str
    response: Response
    response_ids: np.ndarray
    """int64, (tokens,): the ids as sampled, EOS included, padding excluded."""
    reward: float
    terminated: bool
    truncated: bool
    bootstrap: bool
    """Whether the value of the final observation belongs into this step's target (see `advantages.gae`)."""
    legal: bool
    """A valid response that names a legal action; otherwise `invalid_action` decided what happened."""
    info: Mapping[str, Any]
    """The environment's info that belongs to `image`, i.e. from before the step."""
    final_info: Mapping[str, Any] | None = None
    """The info after the step that ended the episode; `None` while it goes on."""
    final_image: np.ndarray | None = None
    """The true last observation where `bootstrap` asks for its value."""
    final_prompt: str | None = None
    hit_length_limit: bool = False
    episode: int = 0
    """How many episodes its environment had ended before."""
    episode_step: int = 0
    """Position inside the episode."""
    substitute: str | None = None
    """The random legal action that was played instead; `None` if the agent's own was, or if the step was skipped."""


@dataclass
class Rollout:
    """`num_envs × rollout_steps` transitions, in the order step by step, environment by environment; fewer steps if
    the collection ran out of time."""

    transitions: list[Transition]
    corrections: list[Correction | None]
    """One per transition; `None` where nothing was asked (unparsable text, or no corrector)."""
    last_images: list[np.ndarray]
    """The observations after the last step, one per environment, whose values close the advantages."""
    last_prompts: list[str]
    episodes: list[Sequence[Transition]] = field(default_factory=list)
    """Episodes that ended in this rollout, whole: earlier rollouts' steps included (without their images)."""
    stop_reason: str | None = None
    """Why the run should end after this rollout: the corrector's budget is spent."""
    times: dict[str, float] = field(default_factory=dict)
    """Seconds by phase."""

    def __len__(self) -> int:
        return len(self.transitions)

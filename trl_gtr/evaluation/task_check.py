"""Check a task before training on it: `check_task(task)` plays a few episodes and lists everything that is wrong.

The random agent and, if there is one, the expert play through the same code as training. Each member of the task is
called in every state they meet; an error in one doesn't hide the others.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np

from ..correctors.base import request_digest
from ..rollouts.playing import DEFAULT_STEP_LIMIT, PlayingRules
from ..rollouts.replay import Replayable
from ..storage.plain_data import fingerprint
from ..tasks.base import Task, contradicts, is_true_thought
from ..types import CorrectionRequest, Response, Transition
from .episode import Episode, start_options

NO_ACTION = "no such action"
MAX_REWARD = 2.0
"""The largest scaled reward that still counts as about 1."""
_REPLAYED_STEPS = 6
_FAILED = object()


class Finding(NamedTuple):
    """One thing that is wrong with a task, doubtful, or missing from it."""

    severity: Literal["wrong", "doubtful", "missing"]
    member: str
    """The member of `Task` to look at."""
    message: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.member}: {self.message}"


class _State(NamedTuple):
    observation: Any
    info: Mapping[str, Any]


def check_task(task: Task, episodes: int = 8, seed: int = 0) -> list[Finding]:
    """Everything wrong with a task, doubtful, or missing from it; `[]` if it is ready for training.

    Args:
        task: The task to check.
        episodes: Episodes for random play, and as many for the expert.
        seed: Determines the deals.
    """
    if episodes < 1:
        raise ValueError(f"`episodes` must be at least 1, got {episodes}.")
    return _Check(Task.ensure(task), episodes, seed).run()


class _Check:
    """The findings so far, and the states met."""

    def __init__(self, task: Task, episodes: int, seed: int) -> None:
        self.task, self.episodes, self.seed = task, episodes, seed
        self.rules = PlayingRules(task)
        self.findings: dict[Finding, None] = {}
        """In the order found, each once."""
        self.states: list[_State] = []
        self.experts: dict[int, Response] = {}
        """The expert's responses, by place in `states`."""

    def run(self) -> list[Finding]:
        self._check_pickle()
        starts = self._try("starts", self.task.starts)
        if starts is not _FAILED and starts is not None and not len(starts):
            self._wrong("starts", "lists no starts: return None if starts are random")
        elif starts is not _FAILED and self._check_environment():
            won = self._play(starts, self._random_text)
            expert_won = self._play(starts, self._expert_text) if self.task.defines("expert") else None
            self._compare(won, expert_won)
            self._check_prompts()
            self._check_judge()
        for member, loss in (
            ("expert", "no offline corrector, and no data for supervised fine-tuning"),
            ("judge", "nothing can say whether thoughts are true"),
        ):
            if not self.task.defines(member):
                self._add("missing", member, f"optional, but without it {loss}")
        return list(self.findings)

    # -- noting findings -------------------------------------------------------------------------------------------

    def _add(self, severity: Literal["wrong", "doubtful", "missing"], member: str, message: str) -> None:
        self.findings[Finding(severity, member, message)] = None

    def _wrong(self, member: str, message: str) -> None:
        self._add("wrong", member, message)

    def _try(self, member: str, function: Callable[..., Any], *args: Any, when: str = "", **kwargs: Any) -> Any:
        """Call a member; an exception becomes a finding and the result `_FAILED`."""
        try:
            return function(*args, **kwargs)
        except Exception as error:  # whatever the task's own code raises is what we are looking for
            self._wrong(self._culprit(error) or member, f"raises {type(error).__name__}{when}: {error}")
            return _FAILED

    def _culprit(self, error: Exception) -> str | None:
        """The outermost member of the task that was running."""
        for frame, _ in traceback.walk_tb(error.__traceback__):
            name = frame.f_code.co_name
            if frame.f_locals.get("self") is self.task and name in vars(Task):
                return name
        return None

    # -- the environment -------------------------------------------------------------------------------------------

    def _check_pickle(self) -> None:
        try:
            cloudpickle.loads(cloudpickle.dumps(self.task))
        except Exception as error:
            self._wrong(
                "__init__", f"the task can't be pickled for worker processes: {error}. Create what it holds later"
            )

    def _check_environment(self) -> bool:
        """Whether episodes can be played at all; also whether one can be replayed from its seed and actions."""
        env = self._try("make_env", self.task.make_env)
        if env is _FAILED or not isinstance(env, gym.Env):
            if env is not _FAILED:
                self._wrong("make_env", f"returns a {type(env).__name__}, not a gymnasium environment")
            return False
        first = self._try("make_env", env.reset, seed=self.seed, when=" in `reset`")
        if first is _FAILED:
            return False
        observation, info = first
        image = isinstance(observation, np.ndarray) and observation.dtype == np.uint8 and observation.ndim == 3
        if not image or observation.shape[-1] != 3:
            found = (
                f"{observation.dtype}, {observation.shape}"
                if isinstance(observation, np.ndarray)
                else type(observation)
            )
            self._wrong("make_env", f"observations must be images, uint8 (height, width, 3), not {found}")
            return False
        if not self._check_actions(_State(observation, info), env.action_space):
            return False
        ours, again = Replayable(self.task.make_env()), Replayable(self.task.make_env())
        self._try("make_env", self._check_replay, ours, again, when=" while playing")
        for each in (env, ours, again):
            each.close()
        return True

    def _check_replay(self, env: Replayable, spare: Replayable) -> None:
        """Play random actions, and replay them in a spare environment after each."""
        rng = np.random.default_rng(self.seed)
        _, info = env.reset(seed=self.seed)
        ended = False
        for _ in range(_REPLAYED_STEPS):
            try:
                spare.set_state(env.get_state())
            except ValueError as error:
                self._wrong("make_env", f"not reproducible, so runs can't be resumed or compared: {error}")
                return
            if ended:
                return
            choice = self.rules.choose(Response("", error="empty"), info, env.action_space, rng)
            _, _, terminated, truncated, info = env.step(choice.action)
            ended = terminated or truncated

    # -- episodes --------------------------------------------------------------------------------------------------

    def _play(self, starts: Sequence[Mapping[str, Any]] | None, respond: Callable[[_State], str]) -> list[Episode]:
        """Play the episodes; those that raise are left out."""
        played = []
        for number in range(self.episodes):
            env = self._try("make_env", self.rules.make_env, evaluation=True)
            if env is _FAILED:
                return []
            episode = Episode(self.rules, env, number, self.seed, start_options(starts, self.seed, number))
            if self._try("make_env", self._play_one, episode, respond, when=" while playing") is not _FAILED:
                played.append(episode)
            env.close()
        return [episode for episode in played if episode.ended]

    def _play_one(self, episode: Episode, respond: Callable[[_State], str]) -> None:
        episode.begin()
        while not episode.ended:
            state = _State(episode.observation, episode.info)
            self.states.append(state)
            if not self._check_actions(state, episode.env.action_space):
                return
            episode.step("", respond(state))

    def _random_text(self, state: _State) -> str:
        return ""

    def _expert_text(self, state: _State) -> str:
        """The expert's response in this state, checked."""
        task, info = self.task, state.info
        response = self._try("expert", task.expert, info)
        if response is _FAILED:
            return ""
        if response is None:
            if task.solvable(info):
                self._wrong("expert", "has no answer in a state that `solvable` says can be won")
            return ""
        self.experts[len(self.states) - 1] = response
        parsed = task.format.parse(response.text)
        if (dict(parsed.fields), parsed.action, parsed.error) != (dict(response.fields), response.action, None):
            reason = parsed.error or "its parts differ"
            self._wrong("expert", f"`format.parse` doesn't read its text back ({reason}): use `format.respond`")
        elif task.to_env_action(parsed, info) is None:
            self._wrong("expert", f"its action {response.action!r} is not legal")
        elif contradicts(task, response.fields, response.action, info):
            self._wrong("expert", f"its thought concludes another action than {response.action!r}")
        return response.text

    def _check_actions(self, state: _State, space: gym.Space) -> bool:
        """Whether every legal action can be played, and nothing else."""
        task, info, before = self.task, state.info, len(self.findings)
        legal = self._try("legal_actions", task.legal_actions, info)
        if legal is _FAILED:
            return False
        if not len(legal) or not all(isinstance(text, str) and text.strip() for text in legal):
            self._wrong("legal_actions", "must return at least one action, each a non-empty string")
            return False
        for text in legal:
            action = self._try("to_env_action", task.to_env_action, Response("", {}, text), info)
            if action is None:
                self._wrong("to_env_action", f"returns None for {text!r}, which `legal_actions` lists")
            elif action is not _FAILED and isinstance(space, gym.spaces.Discrete) and not space.contains(action):
                self._wrong("to_env_action", f"returns {action!r} for {text!r}, which is not in {space}")
        for text in (NO_ACTION, None):
            action = self._try("to_env_action", task.to_env_action, Response("", {}, text, error="invalid"), info)
            if action is not None and action is not _FAILED:
                self._wrong("to_env_action", f"returns {action!r} for the action {text!r}, which is not legal")
        return len(self.findings) == before

    def _compare(self, random: list[Episode], expert: list[Episode] | None) -> None:
        """How often random play and the expert win, what they earn, and whether their episodes end."""
        members: list[tuple[str, Callable[[Sequence[Transition]], Any], type]] = [
            ("success", self.task.success, bool),
            ("metrics", lambda steps: dict(self.task.metrics(steps)), dict),
        ]
        for episode in [*random, *(expert or [])]:
            for member, function, kind in members:
                value = self._try(member, function, episode.transitions)
                if value is not _FAILED and not isinstance(value, kind | np.bool_):
                    self._wrong(member, f"returns {value!r}, not a {kind.__name__}")
        if any(finding.severity == "wrong" and finding.member == "success" for finding in self.findings):
            return
        episodes = [*random, *(expert or [])]
        if any(len(episode.transitions) >= DEFAULT_STEP_LIMIT for episode in episodes):
            self._add("doubtful", "make_env", f"episodes don't end within {DEFAULT_STEP_LIMIT} steps")
        largest = max((abs(step.reward) for episode in episodes for step in episode.transitions), default=0.0)
        if largest * self.task.reward_scale > MAX_REWARD:
            self._add("doubtful", "reward_scale", f"rewards reach ±{largest:.3g}: set it to {1 / largest:.2g}")
        if expert is not None:
            self._compare_wins(random, expert)

    def _compare_wins(self, random: list[Episode], expert: list[Episode]) -> None:
        won, chance = (sum(self.task.success(each.transitions) for each in group) for group in (expert, random))
        possible = sum(each.solvable for each in expert)
        if won < chance:
            self._wrong("expert", f"wins {won} of {len(expert)} episodes, fewer than random play ({chance})")
        elif won < possible:
            self._add(
                "doubtful",
                "expert",
                f"wins {won} of {possible} episodes that can be won: fine only if the game involves luck",
            )

    # -- words -----------------------------------------------------------------------------------------------------

    def _check_prompts(self) -> None:
        for observation, info in self.states:
            prompt = self._words("prompt", self.task.prompt, observation, info)
            if prompt is _FAILED:
                return
            if self._words("earlier_prompt", self.task.earlier_prompt, observation, info) is _FAILED:
                return
            state = self._try("public_state", self.task.public_state, info)
            if state is _FAILED:
                return
            request = CorrectionRequest(observation, prompt, Response(""), state, info, self.task)
            self._try("public_state", request_digest, request)
        for key in self._leaks():
            self._add(
                "doubtful",
                "prompt",
                f"changes with info[{key!r}], but `public_state` doesn't: if players may know it, add it to "
                "`public_state`; otherwise the prompt leaks it",
            )

    def _words(self, member: str, function: Callable[..., Any], *state: Any) -> Any:
        """What the agent is told, or `_FAILED`."""
        words = self._try(member, function, *state)
        if words is _FAILED or (isinstance(words, str) and words.strip()):
            return words
        self._wrong(member, f"must be a non-empty string, not {words!r}")
        return _FAILED

    def _leaks(self) -> list[str]:
        """Keys of `info` that change the prompt without changing the public state."""
        leaks: dict[str, None] = {}
        for observation, info in self.states:
            told = self.task.prompt(observation, info), self.task.public_state(info)
            for key, value in info.items():
                other = next((i[key] for _, i in self.states if key in i and _differ(i[key], value)), _FAILED)
                if other is _FAILED or key in leaks:
                    continue
                changed = {**info, key: other}
                try:
                    prompt, public = self.task.prompt(observation, changed), self.task.public_state(changed)
                except Exception:  # a mixture of two states may be impossible, which shows nothing
                    continue
                if prompt != told[0] and not _differ(public, told[1]):
                    leaks[key] = None
        return list(leaks)

    def _check_judge(self) -> None:
        """The same keys for every response, booleans, and the expert's thoughts true."""
        task = self.task
        if not task.defines("judge"):
            return
        keys: set[str] | None = None
        for place, (_, info) in enumerate(self.states):
            expert = self.experts.get(place)
            for response in (Response("", error="empty"), *([] if expert is None else [expert])):
                judged = self._try("judge", task.judge, response, info)
                if judged is _FAILED:
                    return
                if not all(isinstance(value, bool | np.bool_) for value in judged.values()):
                    self._wrong("judge", f"must map each part to True or False, not {dict(judged)}")
                keys = set(judged) if keys is None else keys
                if set(judged) != keys:
                    self._wrong(
                        "judge",
                        f"must return the same keys for every response, not {sorted(keys)} and {sorted(judged)}",
                    )
                if response is expert and is_true_thought(judged) is False:
                    untrue = ", ".join(name for name, value in judged.items() if not value)
                    self._wrong("judge", f"calls the expert's own thought untrue ({untrue})")
                if response is not expert and is_true_thought(judged):
                    self._wrong("judge", "calls an empty response true")
            if expert is not None:
                self._check_hint(expert, info)
        if keys is not None and (unknown := set(task.reading_parts) - keys):
            self._wrong("reading_parts", f"{sorted(unknown)} are not keys of `judge`: {sorted(keys)}")

    def _check_hint(self, expert: Response, info: Mapping[str, Any]) -> None:
        """The expert must also cope with a response of which everything is wrong."""
        broken = replace(expert, fields={}, action=NO_ACTION)
        self._try("expert", self.task.expert, info, hint=broken, when=" with a hint that lacks every field")


def _differ(one: Any, other: Any) -> bool:
    return fingerprint(one) != fingerprint(other)

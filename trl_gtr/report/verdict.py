"""The head of the page: what a run came to, in words and three numbers, and whether it is still going on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import TrainerControl, TrainerState

from ..runs.callbacks import ThoughtCollapseCallback
from ..runs.logged_evaluations import Point, last_point
from . import evaluations
from .runs import Run
from .state import duration, seconds_of

LAST_UPDATES = 3
"""The mean over this many updates is the end of a curve."""
_ALARM = ("thoughts/distinct_4", "thoughts/top_share", "thoughts/identical_across_states")


@dataclass(frozen=True)
class Change:
    """A share before and after, with how sure each is: a 95 % interval, or the range over seeds."""

    name: str
    before: tuple[float, float, float] | None
    """Value, low and high."""
    after: tuple[float, float, float]
    detail: str
    over: bool
    """Whether this is about the trained agent, or only about where training stands."""

    @property
    def direction(self) -> str | None:
        """`up` or `down` where the intervals lie apart, else `None`."""
        if self.before is None:
            return None
        if self.after[1] > self.before[2]:
            return "up"
        return "down" if self.after[2] < self.before[1] else None

    def __str__(self) -> str:
        return (f"{self.before[0]:.0%} → " if self.before else "") + f"{self.after[0]:.0%}"


def verdicts(groups: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """One for each label."""
    return [_verdict(label, runs) for label, runs in groups.items()]


def _verdict(label: str, runs: Sequence[Run]) -> dict[str, Any]:
    success, collapse = _success(runs), _collapse(runs)
    thoughts = _curve(runs, "thoughts/true", "True thoughts in training")
    sentences = [_success_words(success), _thought_words(thoughts), collapse["words"]]
    numbers = [
        {"name": change.name, "value": str(change), "detail": change.detail, "tone": _tone(change)}
        for change in (success, thoughts)
        if change is not None
    ]
    return {
        "label": label,
        "words": " ".join(filter(None, sentences)) or "Nothing was logged yet.",
        "numbers": [*numbers, collapse] if collapse["value"] else numbers,
        **_state(runs),
    }


def _tone(change: Change) -> str:
    return {"up": "good", "down": "bad", None: ""}[change.direction]


def _state(runs: Sequence[Run]) -> dict[str, Any]:
    """Running, finished, stopped or crashed; of several seeds how many are what."""
    if len(runs) > 1:
        counts = Counter(run.state for run in runs if run.state)
        words = ", ".join(f"{count} {state}" for state, count in counts.items())
        return {"state": words, "tone": "", "facts": [], "command": None}
    (run,) = runs
    facts = []
    if run.last_update:
        planned = run.card.get("updates")
        facts.append(f"update {run.last_update}" + (f" of {planned}" if planned else ""))
    if (seconds := seconds_of(run.card)) is not None:
        facts.append(duration(seconds))
    if error := run.card.get("error"):
        facts.append(error)
    tone = {"finished": "good", "crashed": "bad", "stopped": "note"}.get(run.state or "", "")
    return {"state": run.state, "tone": tone, "facts": facts, "command": run.card.get("command")}


def _success(runs: Sequence[Run]) -> Change | None:
    """By evaluations if there was one after training, else by what training itself played."""
    evaluated = [evaluations.points(run) for run in runs]
    for name in dict.fromkeys(name for each in evaluated for name in each):
        mine = [each.get(name, []) for each in evaluated]
        after = [point for point in (last_point(each, "after") for each in mine) if point]
        before = [point for point in (last_point(each, "before") for each in mine) if point]
        if after:
            what = "95 % interval" if len(after) == 1 else f"range over {len(after)} seeds"
            value, low, high = _spread(after)
            return Change(
                f"Success on {name}" if name else "Success",
                _spread(before) if before else None,
                (value, low, high),
                f"evaluation; {what} {low:.0%} to {high:.0%}",
                over=True,
            )
    return _curve(runs, "episode/success", "Success in training")


def _spread(points: Sequence[Point]) -> tuple[float, float, float]:
    """One evaluation's own interval; of several the range."""
    if len(points) == 1:
        return points[0].value, points[0].low, points[0].high
    values = [point.value for point in points]
    return sum(values) / len(values), min(values), max(values)


def _curve(runs: Sequence[Run], metric: str, name: str) -> Change | None:
    """From the first update to the mean of the last ones."""
    series = [list(run.series(metric).values()) for run in runs if run.series(metric)]
    if not series:
        return None
    first = sum(values[0] for values in series) / len(series)
    ends = [values[-LAST_UPDATES:] for values in series]
    last = sum(sum(values) / len(values) for values in ends) / len(series)
    short = all(len(values) <= LAST_UPDATES for values in series)
    before = None if short else (first, first, first)
    detail = "mean of all updates so far" if short else f"first update → mean of the last {LAST_UPDATES}"
    return Change(name, before, (last, last, last), detail, over=False)


def _success_words(change: Change | None) -> str:
    if change is None:
        return ""
    what, after = change.name[0].lower() + change.name[1:], f"{change.after[0]:.0%}"
    if change.before is None:
        return f"{change.name} is {after}."
    before = f"{change.before[0]:.0%}"
    if not change.over:
        return f"{change.name} went from {before} to {after}."
    if change.direction is None:
        return f"No clear change: {what} went from {before} to {after}, within the error."
    return (
        f"Training helped: {what} rose from {before} to {after}."
        if change.direction == "up"
        else f"Training hurt: {what} fell from {before} to {after}."
    )


def _thought_words(change: Change | None) -> str:
    if change is None:
        return ""
    before = "" if change.before is None else f", {change.before[0]:.0%} at the start"
    return f"{change.after[0]:.0%} of thoughts in training are true{before}."


def _collapse(runs: Sequence[Run]) -> dict[str, Any]:
    """Whether the alarm for thought collapse goes off on what was logged."""
    alarms = [_alarms(run) for run in runs]
    measured = [each for each in alarms if each is not None]
    number = {"name": "Thought collapse", "value": "", "words": "", "detail": "", "tone": ""}
    if not measured:
        return number
    collapsed = [each for each in measured if each["updates"]]
    lasting = [each for each in collapsed if each["at_the_end"]]
    seeds = f" in {len(collapsed)} of {len(measured)} runs" if len(measured) > 1 else ""
    number["detail"] = measured[0]["detail"] if len(measured) == 1 else f"of {len(measured)} runs"
    if not collapsed and any(run.state == "running" for run in runs):
        return number | {"value": "not so far", "words": "Thoughts show no collapse so far."}
    if not collapsed:
        return number | {"value": "no", "words": "Thoughts did not collapse.", "tone": "good"}
    first = min(each["updates"][0] for each in collapsed)
    if lasting:
        return number | {"value": "yes", "words": f"Thoughts collapsed at update {first}{seeds}.", "tone": "bad"}
    words = f"Thoughts showed signs of collapse at update {first}{seeds}, and recovered."
    return number | {"value": "for a time", "words": words, "tone": "note"}


def _alarms(run: Run) -> dict[str, Any] | None:
    """The updates in which `ThoughtCollapseCallback`, as it is by default, would have stopped the run."""
    entries = [entry for entry in run.log if all(name in entry for name in _ALARM)]
    if not entries:
        return None
    alarm, quiet = ThoughtCollapseCallback(stop=True), TrainerState(is_world_process_zero=False)
    updates = []
    for entry in entries:
        control = TrainerControl()
        alarm.on_log(None, quiet, control, logs=entry)
        if control.should_training_stop:
            updates.append(entry["step"])
    first, last = entries[0], entries[-1]
    return {
        "updates": updates,
        "at_the_end": updates[-1:] == [last["step"]],
        "detail": f"commonest thought {last['thoughts/top_share']:.1%} of all; distinct 4-grams "
        f"{first['thoughts/distinct_4']:.0%} → {last['thoughts/distinct_4']:.0%}",
    }

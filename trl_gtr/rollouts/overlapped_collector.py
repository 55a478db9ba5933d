"""OverlappedCollector: two halves of the environments take turns, so that environments and image processing overlap
generation.

While the engine generates for one half, background threads step the other half's environments and prepare their new
observations for the engine.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, wait
from typing import Any

from ..correctors.background import DaemonPool
from ..correctors.base import Corrector
from ..engines.base import Engine
from ..tasks.base import Task
from ..types import Transition
from .collector import Answers, Collection, Part, RolloutCollector


class OverlappedCollector(RolloutCollector):
    """Collects the same rollouts as `RolloutCollector`, in the same order, with two `generate` calls per vector step.

    The halves always generate in turn, so the same seed still gives the same run, whatever the timing.

    Args:
        task, corrector, options: See `RolloutCollector`; `num_envs` must be at least 2.
    """

    def __init__(self, task: Task, corrector: Corrector | None = None, **options: Any) -> None:
        super().__init__(task, corrector, **options)
        # Environments in this process may share state, so only one steps at a time.
        self.background = DaemonPool(2 if self.in_workers else 1, "environments")

    @staticmethod
    def _split(num_envs: int) -> list[range]:
        if num_envs < 2:
            raise ValueError("`overlap` needs at least 2 environments per process: raise `num_envs` or turn it off.")
        middle = (num_envs + 1) // 2
        return [range(middle), range(middle, num_envs)]

    def _collect(self, run: Collection, steps: int) -> None:
        turns: deque[Future[list[Transition]]] = deque()

        def end_turn() -> None:
            """Wait for the oldest turn. Its environments' errors surface here."""
            with run.clock("environment"):
                played = turns.popleft().result()
                run.transitions += played
                run.episodes += self._close_episodes(played)
            run.progress.advance(len(played), **self._spending())

        run.progress.begin("collect", steps * self.num_envs, "step")
        try:
            for step in range(steps):
                if run.is_over(begun=step > 0):
                    break
                for part in self.parts:
                    if step > 0:
                        end_turn()  # this part's last one
                    with run.clock("generate"):
                        answers = self._respond(run.engine, part.places)
                    self._ask(run.pending, part.places, answers)
                    turns.append(self.background.submit(self._take_turn, run.engine, step, part, answers))
            while turns:
                end_turn()
        finally:  # after an error, nothing may go on in the background
            self.background.cancel()
            wait(turns)

    def _take_turn(self, engine: Engine, step: int, part: Part, answers: Answers) -> list[Transition]:
        """In the background: step a part's environments, and prepare what they show for the engine."""
        played = self._play(step, part, answers)
        engine.prepare(self._prompts(part.places), [self.images[i] for i in part.places])
        return played

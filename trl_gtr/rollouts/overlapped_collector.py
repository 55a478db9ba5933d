"""OverlappedCollector: two halves of the environments take turns, so that environments and image processing overlap
generation.

While the engine generates for one half, background threads step the other half's environments and prepare their new
observations for the engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from ..correctors.background import DaemonPool
from ..correctors.base import Corrector
from ..distributed.progress import Progress
from ..engines.base import Engine
from ..tasks.base import Task
from ..types import Rollout, Transition
from .clock import Clock
from .collector import Answers, Part, RolloutCollector
from .pending_corrections import PendingCorrections
from .vector_envs import in_processes


class OverlappedCollector(RolloutCollector):
    """Collects the same rollouts as `RolloutCollector`, in the same order, with two `generate` calls per vector step.

    The halves always generate in turn, so the same seed still gives the same run, whatever the timing.

    Args:
        task, corrector, options: See `RolloutCollector`; `num_envs` must be at least 2.
    """

    def __init__(self, task: Task, corrector: Corrector | None = None, **options: Any) -> None:
        # Environments in this process may share state, so only one steps at a time.
        self.background = DaemonPool(2 if in_processes(task) else 1, "environments")
        super().__init__(task, corrector, **options)

    @staticmethod
    def _split(num_envs: int) -> list[range]:
        if num_envs < 2:
            raise ValueError("`overlap` needs at least 2 environments per process: raise `num_envs` or turn it off.")
        middle = (num_envs + 1) // 2
        return [range(middle), range(middle, num_envs)]

    def _collect(
        self,
        engine: Engine,
        steps: int,
        pending: PendingCorrections,
        deadline: float,
        correction_timeout: float,
        stopped: Callable[[], bool],
        progress: Progress,
    ) -> Rollout:
        clock = Clock()
        transitions: list[Transition] = []
        finished: list[Sequence[Transition]] = []
        turns: deque[Future[list[Transition]]] = deque()

        def end_turn() -> None:
            """Wait for the oldest turn. Its environments' errors surface here."""
            with clock("environment"):
                played = turns.popleft().result()
                transitions.extend(played)
                finished.extend(self._close_episodes(played))
            progress.advance(len(played), **self._spending())

        progress.begin("collect", steps * self.num_envs, "step")
        try:
            for step in range(steps):
                if stopped() or (step > 0 and time.monotonic() >= deadline):
                    break
                for part in self.parts:
                    if step > 0:
                        end_turn()  # this part's last one
                    with clock("generate"):
                        answers = self._respond(engine, part.places)
                    self._ask(pending, part.places, answers)
                    turns.append(self.background.submit(self._take_turn, engine, step, part, answers))
            while turns:
                end_turn()
        finally:  # after an error, nothing may go on in the background
            self.background.cancel()
            wait(turns)
        return self._rollout(transitions, finished, pending, clock, correction_timeout, stopped, progress)

    def _take_turn(self, engine: Engine, step: int, part: Part, answers: Answers) -> list[Transition]:
        """In the background: step a part's environments, and prepare what they show for the engine."""
        played = self._play(step, part, answers)
        engine.prepare(self._prompts(part.places), [self.images[i] for i in part.places])
        return played

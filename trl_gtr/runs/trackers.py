"""Sends images of sampled steps to TensorBoard, Weights & Biases and Trackio, if they are in `report_to`.

The metrics get there through `Trainer.log` as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.integrations import TensorBoardCallback

from ..config import GTRConfig
from ..responses.safe_text import storable
from ..types import Rollout

TAG = "samples"


class TrackerImages(TrainerCallback):
    """Sends a few steps of every logged update to the trackers.

    Args:
        args: `num_completions_to_print` sets how many.
        callbacks: The trainer's callbacks, including the trackers.
    """

    def __init__(self, args: GTRConfig, callbacks: Sequence[TrainerCallback]) -> None:
        self.images, self.trackers, self.callbacks = args.num_completions_to_print, args.report_to, callbacks

    def on_step_end(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        rollout: Rollout | None = None,
        **kwargs: Any,
    ) -> None:
        if rollout is None or not control.should_log or not state.is_world_process_zero:
            return
        rng = np.random.default_rng(state.global_step)
        chosen = sorted(rng.choice(len(rollout), size=min(self.images, len(rollout)), replace=False))
        samples = [(rollout.transitions[i].image, caption(rollout, i)) for i in chosen]
        for callback in self.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
                for n, (image, words) in enumerate(samples):
                    callback.tb_writer.add_image(f"{TAG}/{n}", image, state.global_step, dataformats="HWC")
                    callback.tb_writer.add_text(f"{TAG}/{n}", _verbatim(words), state.global_step)
        if "wandb" in self.trackers:
            import wandb

            pictures = [wandb.Image(image, caption=words) for image, words in samples]
            wandb.log({TAG: pictures}, commit=False)  # goes with the next log
        if "trackio" in self.trackers:
            import trackio

            trackio.log(
                {f"{TAG}/{n}": trackio.Image(image, caption=words) for n, (image, words) in enumerate(samples)}
            )


def caption(rollout: Rollout, i: int) -> str:
    """The response and the corrector's verdict."""
    step, correction = rollout.transitions[i], rollout.corrections[i]
    verdict = correction.verdict if correction else "not asked"
    return storable(f"{step.response.text}\nreward {step.reward:g}, legal: {step.legal}, corrector: {verdict}")


def _verbatim(text: str) -> str:
    """Indent, so that trackers that render Markdown show the text verbatim."""
    return "\n".join("    " + line for line in text.splitlines())

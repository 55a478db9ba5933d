"""Train a vision-language agent on household tasks: ALFWorld.

    accelerate launch examples/alfworld.py
    accelerate launch examples/alfworld.py --config examples/configs/alfworld_llava.yaml

It needs `pip install "trl-gtr[alfworld]"`. Without `--config` it trains the embedded tiny LLaVA for ALFWorld on a CPU
(`trl_gtr/configs/alfworld_tiny.yaml`), on the bundled games, or on ALFWorld's own if `ALFWORLD_DATA` points to them.
It is evaluated on the training games and, separately, in unseen rooms. See docs/alfworld.md, also for THOR frames.
`trl-gtr train --task alfworld` does the same without a clone.
"""

from __future__ import annotations

from trl_gtr import train


def main() -> None:
    train(task="alfworld", description=__doc__)


if __name__ == "__main__":
    main()

"""Train a vision-language agent on household tasks: ALFWorld.

    accelerate launch examples/alfworld.py
    accelerate launch examples/alfworld.py --config examples/configs/alfworld_llava.yaml

It needs `pip install "trl-gtr[alfworld]"`. Without a `--config` it trains the embedded tiny LLaVA for ALFWorld by
`trl_gtr/configs/alfworld_tiny.yaml`, on a CPU: on the bundled games, or on ALFWorld's own where `ALFWORLD_DATA` leads
to them. It is evaluated on the games of training and, apart from them, in rooms that it has never seen.
docs/alfworld.md says more, also about frames of THOR. `trl-gtr train --task alfworld` is the same without a clone.
"""

from __future__ import annotations

from trl_gtr import train


def main() -> None:
    train(task="alfworld", description=__doc__)


if __name__ == "__main__":
    main()

"""Train a vision-language agent on one of the four card games.

    accelerate launch examples/gym_cards.py --task ezpoints
    accelerate launch examples/gym_cards.py --task number_line --config examples/configs/gym_cards_llava.yaml

Without a `--config` it trains the embedded tiny LLaVA by `trl_gtr/configs/gym_cards_tiny.yaml`, in minutes on a CPU,
into `runs/` and the name of the game. `trl-gtr train --task ezpoints` is the same without a clone.
"""

from __future__ import annotations

from trl_gtr import train


def main() -> None:
    train(task="ezpoints", description=__doc__)


if __name__ == "__main__":
    main()

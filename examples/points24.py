"""Train a vision-language agent to make 24 from four cards: the paper's main experiment.

    accelerate launch examples/points24.py
    accelerate launch examples/points24.py --config examples/configs/points24_llava.yaml

Without a `--config` it trains the embedded tiny LLaVA by `trl_gtr/configs/points24_tiny.yaml`, in minutes on a CPU: a
million parameters can't search for a formula, so it plays a stated pool of hands, and is evaluated on that pool and,
apart from it, on hands that it has never seen. `trl-gtr train --task points24` is the same without a clone.
"""

from __future__ import annotations

from trl_gtr import train


def main() -> None:
    train(task="points24", description=__doc__)


if __name__ == "__main__":
    main()

"""Train a vision-language agent on one of the four card games.

    accelerate launch examples/gym_cards.py --task ezpoints
    accelerate launch examples/gym_cards.py --task number_line --config examples/configs/gym_cards_llava.yaml

Without a `--config` it trains the embedded tiny LLaVA by `configs/gym_cards_tiny.yaml`, in minutes on a CPU. Every
field of the configuration can be given on the command line; `--help` lists them.
"""

from __future__ import annotations

from pathlib import Path

from trl_gtr import GTRTrainer, make_corrector
from trl_gtr.scripts import train as launch

CONFIGS = Path(__file__).parent / "configs"


def main() -> None:
    with launch.one_line_errors():
        config = CONFIGS / "gym_cards_tiny.yaml"
        script, args, model_args, corrector_args = launch.parse(config, description=__doc__)
        launch.refuse_unused(script, "task_options", "eval_hands")
        task = launch.task_with_hands(script.task, script.hands, cut=script.cut)
        launch.check_output_dir(args, task)
        corrector = make_corrector(corrector_args) if args.thought_cloning_coef > 0 else None
        model, processor, peft_config = launch.load_model(model_args, args.model_init_kwargs)
        trainer = GTRTrainer(
            model=model,
            args=args,
            task=task,
            corrector=corrector,
            processing_class=processor,
            peft_config=peft_config,
        )
    launch.train_and_report(trainer, {script.task: task}, report=script.report)


if __name__ == "__main__":
    main()

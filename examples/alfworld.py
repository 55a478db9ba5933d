"""Train a vision-language agent on household tasks: ALFWorld.

    accelerate launch examples/alfworld.py
    accelerate launch examples/alfworld.py --config examples/configs/alfworld_llava.yaml

It needs `pip install "trl-gtr[alfworld]"`. Without a `--config` it trains the embedded tiny LLaVA for ALFWorld by
`configs/alfworld_tiny.yaml`, on a CPU: on the bundled games, or on ALFWorld's own where `ALFWORLD_DATA` leads to them.
It is evaluated on the games of training and, apart from them, in rooms that it has never seen. docs/alfworld.md says
more, also about frames of THOR.
"""

from __future__ import annotations

from pathlib import Path

from trl_gtr import GTRTrainer, make_corrector, make_task
from trl_gtr.scripts import train as launch

CONFIGS = Path(__file__).parent / "configs"


def main() -> None:
    with launch.one_line_errors():
        config = CONFIGS / "alfworld_tiny.yaml"
        script, args, model_args, corrector_args = launch.parse(config, description=__doc__)
        launch.refuse_unused(script, "hands", "eval_hands")
        launch.refuse_other_tasks(script, "alfworld")
        options = {"cut": script.cut, **launch.task_options(script.task_options)}
        task, unseen = (
            make_task("alfworld", evaluation_split=split, **options) for split in ("train", "valid_unseen")
        )
        unseen.make_env(evaluation=True).close()  # what it lacks is told before a model is loaded
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
    launch.train_and_report(trainer, {"train": task, "valid_unseen": unseen}, report=script.report)


if __name__ == "__main__":
    main()

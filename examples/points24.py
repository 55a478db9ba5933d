"""Train a vision-language agent to make 24 from four cards: the paper's main experiment.

    accelerate launch examples/points24.py
    accelerate launch examples/points24.py --config examples/configs/points24_llava.yaml

Without a `--config` it trains the embedded tiny LLaVA by `configs/points24_tiny.yaml`, in minutes on a CPU: a million
parameters can't search for a formula, so it plays a stated pool of hands, and is evaluated on that pool and, apart
from it, on hands that it has never seen. Every field can be given on the command line; `--help` lists them.
"""

from __future__ import annotations

from pathlib import Path

from trl_gtr import GTRTrainer, make_corrector
from trl_gtr.scripts import train as launch

CONFIGS = Path(__file__).parent / "configs"


def main() -> None:
    with launch.one_line_errors():
        config = CONFIGS / "points24_tiny.yaml"
        script, args, model_args, corrector_args = launch.parse(config, description=__doc__)
        launch.refuse_unused(script, "task_options")
        launch.refuse_other_tasks(script, "points24")
        task = launch.task_with_hands("points24", script.hands, cut=script.cut)
        eval_tasks = {hands: launch.task_with_hands("points24", hands) for hands in script.eval_hands}
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
    launch.train_and_report(trainer, eval_tasks, report=script.report)


if __name__ == "__main__":
    main()

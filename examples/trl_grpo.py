"""A task of this library with TRL's own GRPOTrainer: a few steps on FrozenLake with the embedded model.

python examples/trl_grpo.py
python examples/trl_grpo.py --task ezpoints --model_name_or_path tiny --max_steps 10
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trl import GRPOConfig, GRPOTrainer

from trl_gtr import load_policy, make_task
from trl_gtr.interop import environment_factory, episodes, prepare_model, success
from trl_gtr.scripts.arguments import parse_arguments
from trl_gtr.scripts.train import one_line_errors


@dataclass
class Arguments:
    """What to play, with which model."""

    task: str = field(default="frozen_lake", metadata={"help": "The task."})
    model_name_or_path: str = field(default="tiny-grids", metadata={"help": "The model."})
    starts: int = field(default=64, metadata={"help": "Number of different episodes to train on."})


# GRPO compares the rollouts of one start: 4 starts × 8 rollouts a step.
DEFAULTS = {
    "output_dir": "runs/trl_grpo",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 32,
    "num_generations": 8,
    "max_steps": 5,
    "max_completion_length": 400,  # of an episode: all responses, and all prompts and pictures after the first
    "max_tool_calling_iterations": 8,
    "temperature": 0.7,
    "learning_rate": 1e-4,
    "reward_weights": [0.0],  # success is only logged: the episode's return is the reward
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


def make_trainer(args: Arguments, config: GRPOConfig) -> GRPOTrainer:
    model, processor = prepare_model(*load_policy(args.model_name_or_path))
    return GRPOTrainer(
        model,
        reward_funcs=success,
        args=config,
        train_dataset=episodes(args.starts),
        processing_class=processor,
        environment_factory=environment_factory(make_task(args.task)),
    )


def main() -> None:
    with one_line_errors():
        args, config = parse_arguments((Arguments, GRPOConfig), description=__doc__, defaults=DEFAULTS)
        trainer = make_trainer(args, config)
    trainer.train()
    trainer.save_model()
    print(f"The model is in {config.output_dir}. Look at it:")
    print(f"  trl-gtr evaluate --task {args.task} --agents {config.output_dir} --episodes 50")


if __name__ == "__main__":
    main()

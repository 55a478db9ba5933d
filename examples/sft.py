"""Supervised fine-tuning on expert play, or on a LLaVA-format data set, with TRL's SFTTrainer.

python examples/sft.py --config examples/configs/sft_tiny.yaml     # or another sft_*_tiny: what ships
accelerate launch examples/sft.py --config examples/configs/sft_llava.yaml
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from datasets import Dataset, concatenate_datasets
from trl import ModelConfig, SFTConfig, SFTTrainer

from trl_gtr import make_task, tiny_llava
from trl_gtr.guides.sft_data import make_sft_dataset, prompt_and_completion, read_llava_json
from trl_gtr.policy.adapters import ensure_named_base
from trl_gtr.scripts import train as launch
from trl_gtr.scripts.arguments import parse_arguments
from trl_gtr.tiny_llava.practice_games import alfworld_practice

BUILDS = {name.replace("tiny", "build"): name for name in tiny_llava.VARIANTS}  # untrained embedded models
OPTIONS = {  # training data of the embedded models besides whole tasks
    "points24_pool": lambda: {"hands": "pool"},
    "points24_reading": lambda: {"hands": "reading"},
    "alfworld_practice": lambda: {"env_kwargs": {"games": alfworld_practice(), "expert": "explorer"}},
    "frozen_lake_train": lambda: {"split": "train"},
    "minigrid_crowded": lambda: {"level": "BabyAI-GoToLocal-v0"},  # eight objects, which teach it to read positions
}


@dataclass
class DataArguments:
    """Training data: expert play on some tasks, or a file."""

    tasks: list[str] = field(default_factory=list, metadata={"help": f"points24=1000 … Also: {', '.join(OPTIONS)}."})
    task_options: dict | str | None = field(default=None, metadata={"help": 'For all, e.g. {"history_turns": 2}.'})
    exploration: float = field(default=0.15, metadata={"help": "Share of random steps in the expert's play."})
    image_size: int | None = field(default=None, metadata={"help": "Store images at this size: faster."})
    llava_json: str | None = field(default=None, metadata={"help": "LLaVA-format JSON file to train on."})
    image_folder: str = field(default=".", metadata={"help": "Folder with the images of `llava_json`."})
    torch_threads: int | None = field(default=None, metadata={"help": "Torch threads on a CPU."})


def expert_data(args: DataArguments, seed: int) -> Dataset:
    parts, how = [], {"exploration": args.exploration, "image_size": args.image_size}
    for task_and_rows in args.tasks:
        name, _, rows = task_and_rows.partition("=")
        if not rows.isdecimal():
            raise ValueError(f"--tasks {task_and_rows}: write task=rows, e.g. points24=1000.")
        options = OPTIONS.get(name, dict)() | launch.task_options_of(args.task_options)
        task = make_task(name.rpartition("_")[0] if name in OPTIONS else name, **options)
        parts.append(make_sft_dataset(task, int(rows), seed + len(parts), **how))
    return concatenate_datasets(parts)


def make_trainer(data: DataArguments, args: SFTConfig, model_args: ModelConfig) -> SFTTrainer:
    if (data.llava_json is None) == (not data.tasks):
        raise ValueError("Set the training data: either --tasks points24=1000 or --llava_json FILE.")
    if model_args.use_peft and model_args.model_name_or_path in BUILDS:
        raise ValueError("A newly built model trains all its weights: leave out --use_peft.")
    dataset = read_llava_json(data.llava_json, data.image_folder) if data.llava_json else expert_data(data, args.seed)
    if model_args.model_name_or_path in BUILDS:
        (model, processor), peft_config = tiny_llava.build(args.seed, BUILDS[model_args.model_name_or_path]), None
    else:
        model, processor, peft_config = launch.load_model(model_args, args.model_init_kwargs)
        args.model_init_kwargs = None  # avoids SFTTrainer's warning that it ignores them
        ensure_named_base(model, peft_config, processor, args.output_dir)
    dataset = prompt_and_completion(dataset, processor)
    return SFTTrainer(model, args, train_dataset=dataset, processing_class=processor, peft_config=peft_config)


def report(folder: str, tasks: list[str], model_args: ModelConfig) -> None:
    """Say what was made, and the commands that come next."""
    name = tasks[0].partition("=")[0] if tasks else "TASK"
    name = name.rpartition("_")[0] if name in OPTIONS else name  # all but an option's last word are its task
    embedded = model_args.model_name_or_path in (*BUILDS, *tiny_llava.VARIANTS)  # what the default settings are for
    print(f"The fine-tuned {'adapter' if model_args.use_peft else 'model'} is in {folder}. Look at it, then train it:")
    print(f"  trl-gtr evaluate --task {name} --agents {folder} --episodes 50")
    print(f"  trl-gtr train --task {name} --model_name_or_path {folder}", "" if embedded else "--config SETTINGS.yaml")


def main() -> None:
    with launch.one_line_errors():
        types, defaults = (DataArguments, SFTConfig, ModelConfig), {"bf16": torch.accelerator.is_available()}
        data, args, model_args = parse_arguments(types, description=__doc__, defaults=defaults)
        torch.set_num_threads(data.torch_threads or torch.get_num_threads())
        trainer = make_trainer(data, args, model_args)
    trainer.train()
    if model_args.model_name_or_path not in BUILDS:
        trainer.save_model()  # with the processor
    elif trainer.is_world_process_zero():
        tiny_llava.save(trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class, args.output_dir)
    if trainer.is_world_process_zero():
        report(args.output_dir, data.tasks, model_args)


if __name__ == "__main__":
    main()

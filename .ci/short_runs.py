"""Short runs whose metrics must be the same under every supported version of the stack.

    python .ci/short_runs.py OUTPUT                    three updates on each task and with LoRA; a checkpoint after two
    python .ci/short_runs.py OUTPUT --compare OTHER    the same, then compare with OTHER, made under other versions;
                                                       OTHER's checkpoints must resume to the same third update

Two processes: `ACCELERATE_USE_CPU=true accelerate launch --config_file examples/accelerate_configs/cpu_2proc.yaml
.ci/short_runs.py …`. Exits with 1 where something differs. ALFWorld is left out where its extra isn't installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState
from peft import LoraConfig
from transformers import PrinterCallback

from trl_gtr import ExpertCorrector, GTRConfig, GTRTrainer, lora_target_modules, make_task
from trl_gtr.policy.loading import load_policy

UNSTEADY = ("time/", "speed/", "memory/", "corrector/latency")  # of the machine, not of the run
UPDATES, STEPS, ENVS = 3, 4, 8


def runs() -> dict[str, dict[str, Any]]:
    """Name → task, model and whether to train an adapter."""
    cards = {name: {"task": name} for name in ("points24", "ezpoints", "number_line", "blackjack")}
    household = {"alfworld": {"task": "alfworld", "model": "tiny-alfworld"}}
    found = importlib.util.find_spec("alfworld") is not None
    return cards | (household if found else {}) | {"lora": {"task": "points24", "lora": True}}


def train(folder: Path, task: str, model: str = "tiny", lora: bool = False, resume: Path | None = None) -> list[dict]:
    """The metrics of a run, one dictionary per update."""
    processes = PartialState().num_processes
    args = GTRConfig(
        output_dir=str(folder),
        total_env_steps=UPDATES * STEPS * ENVS,
        num_envs=ENVS,
        rollout_steps=STEPS,
        per_device_train_batch_size=ENVS // processes,
        num_ppo_epochs=2,
        max_completion_length=64,
        temperature=0.5,
        learning_rate=1e-4,
        value_head_sizes=[32],
        gradient_checkpointing=False,
        save_steps=2,
        episode_log_rate=0.0,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    policy, processor = load_policy(model)
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=lora_target_modules(policy)) if lora else None
    trainer = GTRTrainer(
        policy, args, make_task(task), ExpertCorrector(), processing_class=processor, peft_config=adapter
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    trainer.collector.close()
    return [
        {key: value for key, value in entry.items() if not key.startswith(UNSTEADY)}
        for entry in trainer.state.log_history
    ]


def differences(name: str, mine: list[dict], other: list[dict], tolerance: float) -> list[str]:
    """What differs by more than rounding between two logs of the same run."""
    if len(mine) != len(other):
        return [f"{name}: {len(mine)} logged updates, not {len(other)}"]
    found = []
    for update, (a, b) in enumerate(zip(mine, other, strict=True), start=1):
        for key in sorted({*a, *b}):
            x, y = a.get(key), b.get(key)
            numbers = isinstance(x, int | float) and isinstance(y, int | float)
            if not numbers or abs(x - y) > tolerance * max(1.0, abs(x), abs(y)):
                found += [f"{name}, update {update}: {key} is {x}, not {y}"] if x != y else []
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--compare", type=Path, help="folder of the same runs under other versions")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative, above 1; absolute, below")
    parser.add_argument("--no-resume", action="store_true", help="leave OTHER's checkpoints alone")
    options = parser.parse_args()
    PartialState(cpu=True)  # before anybody asks it how many processes there are
    found = []
    for name, settings in runs().items():
        log = train(options.output / name, **settings)
        if PartialState().is_main_process:
            (options.output / name / "log.json").write_text(json.dumps(log, indent=1))
        if options.compare is None or not (options.compare / name / "log.json").is_file():
            continue
        theirs = json.loads((options.compare / name / "log.json").read_text())
        found += differences(name, log, theirs, options.tolerance)
        if not options.no_resume:
            checkpoint = options.compare / name / "checkpoint-2"
            resumed = train(options.output / f"{name}_resumed", **settings, resume=checkpoint)
            found += differences(f"{name}, resumed", resumed, theirs, options.tolerance)
        if PartialState().is_main_process:
            print(
                f"{name}: {len(log)} updates{'' if options.no_resume else ' and a resumed one'} compared", flush=True
            )
    if PartialState().is_main_process:
        print("\n".join(found) or ("no difference" if options.compare else f"recorded in {options.output}"))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

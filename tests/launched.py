"""What the tests of several processes start through `accelerate launch`: `launched.py FOLDER SCENARIO…`.

FOLDER holds the toy model in `toy/`. Each scenario is a run, or a few, on the toy world; process 0 writes what came of
it to `FOLDER/<scenario>.pkl`.
"""

import os
import pickle
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from peft import LoraConfig
from toy import ColourEnv, ColourTask, GuessTask, quiet_config
from transformers import TrainerCallback

from trl_gtr.correctors import ExpertCorrector
from trl_gtr.guides.merged_teacher import MergedTeacher
from trl_gtr.learning import losses
from trl_gtr.policy import adapters
from trl_gtr.policy.loading import unwrap_adapter
from trl_gtr.trainer import GTRTrainer

# Depend on the machine, not on the run.
UNSTEADY = ("time/", "speed/", "memory/", "corrector/latency", "teacher/merge_seconds")


def make_trainer(folder, name, task=None, corrector="expert", peft_config=None, model="toy", guide=None, **overrides):
    args = {
        "rollout_steps": 8,
        "total_env_steps": 64,
        "per_device_train_batch_size": 8 // int(os.environ.get("WORLD_SIZE", "1")),
        "gradient_accumulation_steps": 2,
        "num_ppo_epochs": 2,
        "learning_rate": 1e-3,
        **overrides,
    }
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        args |= {"ddp_backend": "gloo", "use_cpu": False}
    if corrector == "expert":
        corrector = ExpertCorrector() if guide is None else None
    config = quiet_config(folder / name, **args)
    given = {"peft_config": peft_config, "guide": None if guide is None else guide()}
    return GTRTrainer(str(folder / model), config, task or ColourTask(length=3), corrector, **given)


def steady(log_history):
    return [{k: v for k, v in entry.items() if not k.startswith(UNSTEADY)} for entry in log_history]


def weights(trainer):
    """Whole, on process 0."""
    state = trainer.accelerator.get_state_dict(trainer.model) if trainer.is_deepspeed_enabled else None
    return {name: tensor.detach().clone() for name, tensor in (state or trainer.trained.state_dict()).items()}


def alike_everywhere(trainer, module=None):
    """Whether all processes hold the same weights, to the last bit."""
    weights = (module or trainer.trained).parameters()
    everybody = trainer.processes.gather([p.detach().double().sum().item() for p in weights])
    return all(sums == everybody[0] for sums in everybody)


def different_starts(folder):
    """Process 1 draws other random numbers, for the value head and the adapter; training begins alike all the same."""
    seed = {"seed": 7 + int(os.environ["RANK"])}
    lora = LoraConfig(r=2, init_lora_weights="gaussian", target_modules=["q_proj", "v_proj"])
    return alike_everywhere(make_trainer(folder, "different_starts", peft_config=lora, **seed))


# --- one recorded run, again ---------------------------------------------------------------------------------------


SCHEDULES = {
    "joint": {"kl_coef": 0.1, "target_kl": 10.0, "value_gradient_to_trunk": True},
    "separate": {"update_schedule": "separate", "cloning_steps": 2, "value_warmup_updates": 1},
    "groups": {
        "task": GuessTask(length=3),  # episodes of different lengths
        "advantage_estimator": "gigpo",
        "group_size": 2,
        "refill_groups": 2,
        "ratio_level": "token",
        "kl_coef": 0.1,
        "value_head_sizes": [1024, 512],
    },
    "turbo": {"guide": lambda: MergedTeacher("kl", corrector=ExpertCorrector())},
}


def recorded_run(folder, schedule, rollouts=None):
    """Three updates. The rollouts are handed in, or played and recorded; only environment 0 is ever corrected."""
    task = ColourTask(length=3, terminates=False)  # every episode ends in a state whose value is asked for
    trainer = make_trainer(folder, "recorded", **{"task": task, "total_env_steps": 96, **SCHEDULES[schedule]})
    # What is drawn must not depend on how many draw it.
    trainer.guide.buffer.sample = lambda n: [list(trainer.guide.buffer.samples())[-1]] * n
    recorded, play = [], trainer.collector.collect
    own = range(trainer.collector.first_index, trainer.collector.first_index + trainer.collector.num_envs)

    def collect(*args, **kwargs):
        if rollouts is None:
            rollout = play(*args, **kwargs)
            pairs = zip(rollout.transitions, rollout.corrections, strict=True)
            rollout.corrections = [correction if step.env_index == 0 else None for step, correction in pairs]
            recorded.append(rollout)
            return rollout
        whole = rollouts[trainer.state.global_step]
        mine = [i for i, step in enumerate(whole.transitions) if step.env_index in own]
        return replace(
            whole,
            transitions=[whole.transitions[i] for i in mine],
            corrections=[whole.corrections[i] for i in mine],
            last_images=[whole.last_images[i] for i in own if whole.last_images],
            last_prompts=[whole.last_prompts[i] for i in own if whole.last_prompts],
            episodes=[episode for episode in whole.episodes if episode[0].env_index in own],
            times=dict(whole.times),
        )

    trainer.collector.collect = collect
    trainer.train()
    return trainer, recorded


def replay(folder):
    rollouts = pickle.loads((folder / "rollouts.pkl").read_bytes())
    return {schedule: replay_one(folder, schedule, recorded) for schedule, recorded in rollouts.items()}


def replay_one(folder, schedule, rollouts):
    trainer, _ = recorded_run(folder, schedule, rollouts)
    return {
        "num_processes": trainer.accelerator.num_processes,
        "distributed_type": trainer.accelerator.distributed_type.value,
        "weights": weights(trainer),
        "alike": alike_everywhere(trainer),
        "teacher_alike": schedule != "turbo" or alike_everywhere(trainer, trainer.guide.teacher),
        "past": sorted(trainer.guide.files()),
        "wrapper": type(trainer.model).__name__,
        "labels": trainer.processes.gather(len(trainer.guide.buffer)),
        "log": steady(trainer.state.log_history),
    }


# --- what might put processes out of step --------------------------------------------------------------------------


def settings(folder):
    """Settings under which a part of the network gets no gradient."""
    variants = {
        "separate": {"update_schedule": "separate", "cloning_steps": 2},
        "cloning_only": {"ppo_coef": 0.0},
        "no_value": {"vf_coef": 0.0},
        "warm_up": {"value_warmup_updates": 1, "thought_cloning_coef": 0.0, "corrector": None},
        "adapter": {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), "kl_coef": 0.1},
        "checkpointing": {"gradient_checkpointing": True},
        "early_stop": {"target_kl": 1e-9},
    }
    outcome = {}
    for name, variant in variants.items():
        trainer = make_trainer(folder, name, total_env_steps=32, **variant)
        trainer.train()
        outcome[name] = alike_everywhere(trainer), steady(trainer.state.log_history)
    return outcome


def on_an_adapter(folder):
    """A fresh adapter on one that is merged: its base has to be saved, by one process."""
    saved, real = [], adapters._save_base

    def save_base(*args):
        saved.append(os.environ["RANK"])
        real(*args)

    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    with mock.patch.object(adapters, "_save_base", save_base):
        trainer = make_trainer(
            folder, "on_an_adapter", model="adapter", peft_config=lora, kl_coef=0.1, save_strategy="steps"
        )
    trainer.train()
    trainer.save_model()
    return {
        "alike": alike_everywhere(trainer),
        "saved_by": trainer.processes.gather(saved),
        "weights": unwrap_adapter(trainer.trained.policy.merge_and_unload()).state_dict(),
    }


class SlowEnv(ColourEnv):
    """A second for each step of the first five."""

    slow_steps = 5

    def step(self, action):
        if self.slow_steps:
            self.slow_steps -= 1
            time.sleep(1.0)
        return super().step(action)


class SlowTask(ColourTask):
    def make_env(self, *, evaluation=False):
        return SlowEnv(length=3) if os.environ["RANK"] == "1" else ColourEnv(length=3)


def slow_process(folder):
    """Environments of process 1 take a second a step, and it has five seconds; then all the time that it needs."""
    trainer = make_trainer(
        folder, "slow", SlowTask(), num_envs=2, rollout_steps=16, total_env_steps=64, rollout_timeout=5.0
    )

    class NoHurry(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            args.rollout_timeout = 600.0

    trainer.add_callback(NoHurry())
    trainer.train()
    return {"alike": alike_everywhere(trainer), "log": trainer.state.log_history}


def bad_number(folder):
    """The loss of process 1 is NaN, once."""
    calls, real = iter(range(1000)), losses.policy_loss

    def policy_loss(*args):
        losses, stats = real(*args)
        return (losses * float("nan") if next(calls) == 2 else losses), stats

    trainer = make_trainer(folder, "bad_number")
    with mock.patch.object(losses, "policy_loss", policy_loss if os.environ["RANK"] == "1" else real):
        trainer.train()
    return {"alike": alike_everywhere(trainer), "log": trainer.state.log_history}


# --- resuming ------------------------------------------------------------------------------------------------------


def interrupted(folder, name, **settings):
    """Four updates at once, and two of them again from a checkpoint: both trainers, and how they differ."""
    settings |= {"total_env_steps": 128, "save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(folder, name, **settings)
    whole.train()
    resumed = make_trainer(folder, f"{name}_resumed", **settings)
    resumed.train(resume_from_checkpoint=str(folder / name / "checkpoint-2"))
    first, second = weights(whole), weights(resumed)
    return (whole, resumed), {
        "distributed_type": whole.accelerator.distributed_type.value,
        "difference": max(float((first[name] - second[name]).abs().max()) for name in first),
        "logs": (steady(whole.state.log_history), steady(resumed.state.log_history)),
    }


def resume(folder):
    return interrupted(folder, "whole")[1]


def resume_turbo(folder):
    """With adapters and a teacher whose thoughts are cloned, and which is evaluated at the end."""
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    trainers, outcome = interrupted(folder, "turbo", peft_config=lora, guide=lambda: MergedTeacher("sft"))
    teachers = [trainer.guide.teacher for trainer in trainers]
    first, second = (teacher.state_dict() for teacher in teachers)
    for trainer in trainers:
        trainer.evaluate(episodes=4)
    return {
        **outcome,
        "alike": [alike_everywhere(trainer) for trainer in trainers],
        "teachers_alike": [alike_everywhere(*pair) for pair in zip(trainers, teachers, strict=True)],
        "teachers_difference": max(float((first[name] - second[name]).abs().max()) for name in first),
        "labels": trainers[0].processes.gather(len(trainers[0].guide.buffer)),
        "past": sorted(trainers[0].guide.files()),
        "evaluations": [trainer.state.log_history[-1] for trainer in trainers],
    }


def signalled(folder):
    """Process 1 gets a SIGTERM in the second rollout; both stop. Nothing can follow in this launch."""
    trainer = make_trainer(folder, "signalled", total_env_steps=128, save_strategy="steps", save_steps=100)
    play = trainer.collector.collect

    def collect(*args, **kwargs):
        if trainer.state.global_step == 1 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return play(*args, **kwargs)

    trainer.collector.collect = collect
    try:
        trainer.train()
    except SystemExit as stop:
        (folder / f"status_{os.environ['RANK']}").write_text(str(stop.code))
        raise


def long_run(folder):
    """`UPDATES` updates, each saved; goes on where an earlier run was ended."""
    steps = 32 * int(os.environ["UPDATES"])
    guide = {"guide": lambda: MergedTeacher("sft")} if os.environ.get("GUIDE") == "turbo" else {}
    trainer = make_trainer(
        folder, "long", total_env_steps=steps, save_strategy="steps", save_steps=1, save_total_limit=2, **guide
    )
    trainer.train(resume_from_checkpoint=any((folder / "long").glob("checkpoint-*")))
    return {"log": steady(trainer.state.log_history)}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for scenario in sys.argv[2:]:
        outcome = globals()[scenario](folder)
        if os.environ.get("RANK", "0") == "0":
            (folder / f"{scenario}.pkl").write_bytes(pickle.dumps(outcome))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()

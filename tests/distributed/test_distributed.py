"""Several processes, through the real launcher: the same training, in step, interrupted and resumed."""

import math
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from launched import SCHEDULES, recorded_run, steady, weights
from paths import ROOT
from peft import LoraConfig, get_peft_model

from trl_gtr.policy.loading import load_policy

FAULTS = ("slow_process", "bad_number", "resume", "resume_turbo", "on_an_adapter", "signalled")
CONFIGS = ROOT / "examples" / "accelerate_configs"


def command(folder, *scenarios, processes=2, config="cpu_2proc"):
    # As `accelerate launch`, in this interpreter.
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{config}.yaml")]
    script = [str(ROOT / "tests" / "launched.py"), str(folder), *scenarios]
    if processes == 1:
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    return [*launcher, *script]


def environment():
    paths = [str(ROOT), str(ROOT / "tests"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "OMP_NUM_THREADS": "1"}


def launch(folder, *scenarios, **options):
    done = subprocess.run(
        command(folder, *scenarios, **options), env=environment(), capture_output=True, text=True, timeout=900
    )
    return done.returncode, done.stdout + done.stderr


def outcome(folder, scenario):
    return pickle.loads((folder / f"{scenario}.pkl").read_bytes())


def largest_difference(weights, others):
    return max(float((weights[name] - others[name]).abs().max()) for name in others)


@pytest.fixture(scope="module")
def folder(toy_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("launched")
    shutil.copytree(toy_checkpoint, folder / "toy")
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(load_policy(folder / "toy")[0], lora).save_pretrained(folder / "adapter")
    return folder


# --- two processes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_processes(folder, alone):
    """One launch with everything that two processes are tested with: its status and what it printed."""
    status, output = launch(folder, "replay", "settings", "different_starts", *FAULTS)
    return status, output


@pytest.fixture(scope="module")
def alone(folder):
    """The runs on one process that are replayed, by schedule."""
    runs = {schedule: recorded_run(folder, schedule) for schedule in SCHEDULES}
    (folder / "rollouts.pkl").write_bytes(
        pickle.dumps({schedule: rollouts for schedule, (_, rollouts) in runs.items()})
    )
    return {schedule: (weights(trainer), steady(trainer.state.log_history)) for schedule, (trainer, _) in runs.items()}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_processes_train_the_same_as_one(alone, two_processes, folder, schedule):
    assert (folder / "replay.pkl").is_file(), two_processes[1]
    both = outcome(folder, "replay")[schedule]
    assert (both["num_processes"], both["distributed_type"]) == (2, "MULTI_CPU")
    assert both["alike"]
    assert both["teacher_alike"]
    assert both["past"] == (["start_000000.safetensors", "sums_000002.safetensors"] if schedule == "turbo" else [])
    assert both["wrapper"] == "TrainedModule"  # DDP's would hold buckets as large as all gradients, for nothing
    assert both["labels"][0] > 0
    assert both["labels"][1] == 0  # process 1 has no correction in the whole run
    reference, logs = alone[schedule]
    assert schedule != "groups" or any(0 < entry["groups/dead"] < 1 for entry in logs)
    assert largest_difference(both["weights"], reference) < 1e-4
    # Means, shares, and what no mean of means could give: diagnostics over all texts, explained variance.
    assert [set(entry) for entry in both["log"]] == [set(entry) for entry in logs]
    for one, two in zip(logs, both["log"], strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=1e-4)


def test_processes_start_alike_whatever_they_drew(two_processes, folder):
    assert (folder / "different_starts.pkl").is_file(), two_processes[1]
    assert outcome(folder, "different_starts") is True


def test_processes_stay_alike_where_a_part_of_the_network_is_not_trained(two_processes, folder):
    assert (folder / "settings.pkl").is_file(), two_processes[1]
    found = outcome(folder, "settings")
    assert {name: alike for name, (alike, _) in found.items()} == dict.fromkeys(found, True)
    assert found["early_stop"][1][0]["policy/epochs"] == 1
    assert "loss/cloning" in found["separate"][1][0]
    assert "loss/policy" not in found["cloning_only"][1][0]


def test_a_slow_process_hands_in_less_and_the_run_goes_on(two_processes, folder):
    _, output = two_processes
    assert (folder / "slow_process.pkl").is_file(), output
    slow = outcome(folder, "slow_process")
    assert slow["alike"]
    first, second = slow["log"]
    made = int(first["env_steps"]) - 16
    assert 1 <= made <= 5
    assert second["env_steps"] == first["env_steps"] + 32
    assert first["time/collect_rank_1"] >= 5
    assert f"Process 1 ran out of time (rollout_timeout): it collected {made} of 16 steps" in output


def test_a_bad_number_on_one_process_skips_the_step_of_both(two_processes, folder):
    assert (folder / "bad_number.pkl").is_file(), two_processes[1]
    bad = outcome(folder, "bad_number")
    assert bad["alike"]
    assert [entry["optim/skipped_steps"] for entry in bad["log"]] == [1, 0]
    assert all(math.isfinite(entry["loss/policy"]) for entry in bad["log"])  # what was skipped is in no mean


def test_one_process_saves_the_base_of_an_adapter(two_processes, folder):
    assert (folder / "on_an_adapter.pkl").is_file(), two_processes[1]
    found = outcome(folder, "on_an_adapter")
    assert found["alike"]
    assert found["saved_by"] == [["0"], []]
    for saved in ("on_an_adapter", "on_an_adapter/checkpoint-2"):
        loaded = load_policy(folder / saved)[0].state_dict()
        assert largest_difference(loaded, found["weights"]) < 1e-6


def test_two_processes_resume_exactly(two_processes, folder):
    assert (folder / "resume.pkl").is_file(), two_processes[1]
    resumed = outcome(folder, "resume")
    assert resumed["difference"] == 0
    whole, again = resumed["logs"]
    assert again == whole


def check_same_teacher(resumed):
    assert resumed["alike"] == resumed["teachers_alike"] == [True, True]
    assert (resumed["difference"], resumed["teachers_difference"]) == (0, 0)
    whole, again = resumed["logs"]
    assert again == whole
    assert all(entry["teacher/distance"] > 0 for entry in whole)
    assert min(resumed["labels"]) > 0  # the teacher writes on both
    assert len(resumed["past"]) == 4  # every policy that acted
    assert resumed["evaluations"][0]["eval_teacher_episodes"] == 4
    assert resumed["evaluations"][1] == resumed["evaluations"][0]


def test_two_processes_resume_with_the_same_merged_teacher(two_processes, folder):
    assert (folder / "resume_turbo.pkl").is_file(), two_processes[1]
    check_same_teacher(outcome(folder, "resume_turbo"))


def test_a_signal_to_one_process_stops_both_with_a_checkpoint(two_processes, folder):
    status, output = two_processes
    assert status != 0
    assert [(folder / f"status_{rank}").read_text() for rank in (0, 1)] == ["143", "143"], output
    assert (folder / "signalled" / "checkpoint-1" / "manifest.json").is_file()
    assert "The run stops after update 1: SIGTERM received. Resume from" in output


# --- killed --------------------------------------------------------------------------------------------------------


def updates_so_far(folder):
    return max((int(path.name.split("-")[1]) for path in (folder / "long").glob("checkpoint-*")), default=0)


def start(folder):
    """The long run in a process group of its own."""
    return subprocess.Popen(
        command(folder, "long_run", processes=1),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_after(folder, process, updates, number, delay=0.0):
    """Send `number` to the run's processes after so many further updates."""
    goal, deadline = updates_so_far(folder) + updates, time.monotonic() + 600
    while updates_so_far(folder) < goal:
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(delay)
    os.killpg(process.pid, number)
    return process.wait(timeout=120)


@pytest.fixture
def killed_run(folder):
    shutil.rmtree(folder / "long", ignore_errors=True)
    (folder / "long_run.pkl").unlink(missing_ok=True)
    return folder


def uninterrupted_log(folder, tmp_path):
    from launched import long_run

    (tmp_path / "toy").symlink_to(folder / "toy")
    return long_run(tmp_path)["log"]


@pytest.mark.parametrize("guide", ["expert", pytest.param("turbo", marks=pytest.mark.slow)])
def test_a_killed_and_a_terminated_run_go_on_as_if_nothing_had_happened(killed_run, tmp_path, monkeypatch, guide):
    monkeypatch.setenv("UPDATES", "7")
    monkeypatch.setenv("GUIDE", guide)
    expected = uninterrupted_log(killed_run, tmp_path)
    assert end_after(killed_run, start(killed_run), 2, signal.SIGKILL) != 0
    assert end_after(killed_run, start(killed_run), 2, signal.SIGTERM) != 0
    status, output = launch(killed_run, "long_run", processes=1)
    assert status == 0, output
    assert outcome(killed_run, "long_run")["log"] == expected
    assert len(expected) == 7


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_is_the_same_run(killed_run, tmp_path, monkeypatch):
    monkeypatch.setenv("UPDATES", "20")
    expected = uninterrupted_log(killed_run, tmp_path)
    moments = random.Random(os.environ.get("KILL_SEED", "0"))
    for _ in range(6):
        end_after(killed_run, start(killed_run), moments.randint(1, 3), signal.SIGKILL, moments.uniform(0.0, 0.6))
    status, output = launch(killed_run, "long_run", processes=1)
    assert status == 0, output
    assert outcome(killed_run, "long_run")["log"] == expected


# --- DeepSpeed -----------------------------------------------------------------------------------------------------


@pytest.fixture
def deepspeed(folder, monkeypatch):
    pytest.importorskip("deepspeed", reason="needs the extra trl-gtr[deepspeed]")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for old in ("replay.pkl", "resume.pkl", "resume_turbo.pkl"):
        (folder / old).unlink(missing_ok=True)


def check_resumed(found):
    assert found["distributed_type"] == "DEEPSPEED"
    assert found["difference"] == 0
    whole, again = found["logs"]
    assert again == whole
    assert len(whole) == 4


def test_deepspeed_zero2_trains_the_same_saves_and_resumes(deepspeed, alone, folder):
    status, output = launch(folder, "replay", "resume", "resume_turbo", config="zero2")
    assert status == 0, output
    both = outcome(folder, "replay")["joint"]
    assert (both["num_processes"], both["distributed_type"]) == (2, "DEEPSPEED")
    # Not so with separate phases: DeepSpeed steps every parameter, those without a gradient by their momentum.
    assert largest_difference(both["weights"], alone["joint"][0]) < 1e-4
    turbo = outcome(folder, "replay")["turbo"]
    assert turbo["teacher_alike"]
    assert largest_difference(turbo["weights"], alone["turbo"][0]) < 1e-4
    for scenario in ("resume", "resume_turbo"):
        check_resumed(outcome(folder, scenario))
    check_same_teacher(outcome(folder, "resume_turbo"))


def test_deepspeed_zero3_trains_saves_and_resumes(deepspeed, folder):
    status, output = launch(folder, "resume", config="zero3")
    assert status == 0, output
    check_resumed(outcome(folder, "resume"))

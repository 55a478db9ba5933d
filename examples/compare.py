"""GTR against its ablations and other methods, from the same start and over several seeds: a table, a figure and the
raw numbers.

    python examples/compare.py --study points24 --seeds 0 1 2 3 4
    python examples/compare.py --study algorithms --tasks ezpoints --arms grpo grpo_guided
    python examples/compare.py --study ezpoints --task my_module:MyTask -- --config my_settings.yaml

A study is a file in `configs/studies`: options of `trl-gtr train` for every run, for each task if there are several,
and for each arm. Options after `--` go to every run. Table and figure are written after every run. Finished runs are
not repeated and interrupted ones go on from their checkpoint, so a study can be interrupted, continued later, or
extended with more seeds; on another machine too, with `--finished compare.json`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from tqdm.auto import tqdm

from trl_gtr.evaluation.comparison import CURVES, compact, comparison_markdown, comparison_table
from trl_gtr.evaluation.comparison_figures import draw_curves

STUDIES = Path(__file__).parent / "configs" / "studies"
TRAIN = [sys.executable, "-m", "trl_gtr.scripts.train"]  # one process
CONTINUE = ["--overwrite", "true", "--resume_from_checkpoint", "true"]  # from the newest checkpoint, if there is one


def run(folder: Path, settings: dict[str, Any], options: list[str]) -> list[dict[str, Any]]:
    """Train in a separate process and return the log history."""
    state, made_by = folder / "trainer_state.json", folder / "command.json"
    command = options
    for name, value in reversed(settings.items()):
        values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        command = [f"--{name}", *map(str, values), *command]
    if made_by.is_file() and json.loads(made_by.read_text()) != command:
        raise SystemExit(f"{folder} was created with other options: remove it, or choose another --output.")
    if not state.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        made_by.write_text(json.dumps(command))
        whole = [*TRAIN, *command, "--output_dir", str(folder), *CONTINUE]
        with (folder / "log.txt").open("a") as log:
            if code := subprocess.run(whole, stdout=log, stderr=subprocess.STDOUT, check=False).returncode:
                raise SystemExit(f"{folder} failed with status {code}: see {folder / 'log.txt'}")
    return json.loads(state.read_text())["log_history"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", default="points24", choices=sorted(file.stem for file in STUDIES.glob("*.yaml")))
    parser.add_argument("--tasks", "--task", nargs="+", help="instead of the study's, by name or as module:Class")
    parser.add_argument("--arms", nargs="+", help="some of the study's arms; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, help="default: runs/compare/STUDY")
    parser.add_argument("--finished", type=Path, help="compare.json of runs that need not be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs; use with OMP_NUM_THREADS=1")
    parser.add_argument("options", nargs="*", help="options for every run, after --")
    args = parser.parse_args()
    if find_spec("matplotlib") is None:  # fail early, not after all runs
        parser.error('the figure needs matplotlib: pip install "trl-gtr[report]"')
    study = yaml.safe_load((STUDIES / f"{args.study}.yaml").read_text())
    several = "tasks" in study or len(args.tasks or []) > 1
    tasks = study.get("tasks") or {study["options"].pop("task"): {}}
    arms, output = args.arms or list(study["arms"]), args.output or Path("runs/compare", args.study)
    if unknown := set(arms) - set(study["arms"]):
        parser.error(f"{args.study} has no arm {', '.join(unknown)}; it has {', '.join(study['arms'])}")
    output.mkdir(parents=True, exist_ok=True)
    finished = json.loads(args.finished.read_text()) if args.finished else []
    known = {(run["seed"], run.get("task", ""), run["arm"]): run for run in finished}

    def one(job: tuple[int, str, str]) -> dict[str, Any]:
        (seed, task, arm), named = job, {"task": job[1]} if several else {}
        if found := known.get((seed, named.get("task", ""), arm)):
            return found
        settings = {"task": task, **study["options"], **tasks.get(task, {}), **study["arms"][arm], "seed": seed}
        log = run(output / (task if several else "") / arm / f"seed{seed}", settings, args.options)
        return {"arm": arm, "seed": seed, "log": log} | named

    jobs, runs = [(seed, task, arm) for seed in args.seeds for task in args.tasks or tasks for arm in arms], []
    with ThreadPoolExecutor(args.jobs) as pool:
        where = f"{args.study} ({output}/{'TASK/' if several else ''}ARM/seedN/log.txt)"
        for made in tqdm(pool.map(one, jobs), where, len(jobs), unit="run"):
            runs = sorted([*runs, made], key=lambda run: arms.index(run["arm"]))
            draw_curves(runs, output / "compare.png", dict(list(CURVES.items())[: 2 if several else None]))
            (output / "compare.json").write_text(json.dumps([compact(run) for run in runs]))
            (output / "compare.md").write_text(comparison_markdown(runs))
    Console(width=200).print(comparison_table(runs, args.study))
    print(f"Table, figure and raw numbers are in {output}. Bands are the range over seeds.")


if __name__ == "__main__":
    main()

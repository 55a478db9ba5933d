"""The report of a run: what is read, drawn, counted and written, and that nothing in it can run."""

import base64
import hashlib
import io
import json
import os
import platform
import re
import runpy
import shutil
import sys

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

pytest.importorskip("jinja2", reason="needs trl-gtr[report]")
pytest.importorskip("matplotlib", reason="needs trl-gtr[report]")

from paths import EXAMPLES
from report_cases import HOSTILE, corrected, hostile_rows, row, write_run

from trl_gtr import cli
from trl_gtr.report import MAX_BYTES, page, write_report
from trl_gtr.report.collapse import repeated_thoughts
from trl_gtr.report.curves import mean_line
from trl_gtr.report.episodes import Budget, Gallery, episodes_of, shared_starts, spread, start_of, word_diff
from trl_gtr.report.runs import Run, groups, read_runs

SCRIPT = re.compile(r"<script([^>]*)>(.*?)</script>", re.DOTALL)


def embedded(html):
    """The data that the page's script reads, and the script."""
    (kind, data), (_, script) = SCRIPT.findall(html)
    assert kind == ' type="application/json" id="data"'
    return json.loads(data), script


# --- reading --------------------------------------------------------------------------------------------------------


def test_seed_folders_are_one_group_and_labels_win(tmp_path):
    folders = [write_run(tmp_path / name, updates=1) for name in ("gtr/seed0", "gtr/seed1", "ppo")]
    assert {label: len(runs) for label, runs in groups(read_runs(folders)).items()} == {"gtr": 2, "ppo": 1}
    assert list(groups(read_runs(folders, ["a", "b", "a"]))) == ["a", "b"]
    with pytest.raises(ValueError, match="2 labels for 3 runs"):
        read_runs(folders, ["a", "b"])


def test_a_run_without_metrics_file_is_read_from_its_newest_checkpoint(tmp_path):
    folder = write_run(tmp_path / "run", updates=1)
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="is not a run's output folder"):
        read_runs([folder])
    for n in (2, 10):
        (folder / f"checkpoint-{n}").mkdir()
        state = {"log_history": [{"step": n, "episode/success": 0.5}]}
        (folder / f"checkpoint-{n}" / "trainer_state.json").write_text(json.dumps(state))
    assert read_runs([folder])[0].series("episode/success") == {10: 0.5}


def test_a_line_that_is_being_written_is_not_read(tmp_path):
    folder = write_run(tmp_path / "run", updates=2)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "episode/succ')
    assert list(read_runs([folder])[0].series("episode/success")) == [1, 2]


# --- what is shown --------------------------------------------------------------------------------------------------


def test_seeds_are_a_mean_and_a_range(tmp_path):
    seeds = [
        Run(tmp_path, "gtr", [{"step": 1, "m": 0.2}, {"step": 2, "m": 0.4}]),
        Run(tmp_path, "gtr", [{"step": 1, "m": 0.6}, {"step": 2, "m": float("nan")}]),
    ]
    (line,) = mean_line("m", "gtr", 0, "-", seeds)
    assert (line.x, line.mean, line.low, line.high) == ([1, 2], [0.4, 0.4], [0.2, 0.4], [0.6, 0.4])
    assert mean_line("other", "gtr", 0, "-", seeds) == []


def test_long_curves_keep_their_ends(tmp_path):
    run = Run(tmp_path, "gtr", [{"step": n, "m": n} for n in range(1, 5001)])
    (line,) = mean_line("m", "gtr", 0, "-", [run])
    assert (line.x[0], line.x[-1]) == (1, 5000)
    assert len(line.x) < 400


def test_word_diff_keeps_both_texts():
    before, after = "cards: 3, 8\nI aim at 3*8=24.", "cards: 3, 9\nI aim at 3*8=24, so *."
    pieces = word_diff(before, after)
    assert "".join(text for kind, text in pieces if kind in "=-") == before
    assert "".join(text for kind, text in pieces if kind in "=+") == after
    assert pieces[:3] == [["=", "cards: 3, "], ["-", "8"], ["+", "9"]]
    assert word_diff("go up now.", "walk down now.") == [["-", "go up"], ["+", "walk down"], ["=", " now."]]
    assert word_diff("same", "same") == [["=", "same"]]


def test_episodes_are_spread_over_the_run_and_whole_ones_come_first():
    episodes = [[row(u, episode=e, step=e, ended=e == 0, image=None)] for u in range(1, 101) for e in (1, 0)]
    assert [episode[0]["update"] for episode in spread(episodes, 3)] == [1, 100, 51]
    few = list(spread(episodes[:8], 6))
    assert [(episode[0]["update"], episode[0]["episode"]) for episode in few] == [
        (1, 0),
        (4, 0),
        (2, 0),
        (3, 0),
        (1, 1),
        (4, 1),
    ]


def test_episodes_from_the_same_start_are_matched_across_runs(tmp_path):
    def rows(first, shared):
        """One step an episode: one start that only this run has, one that both have."""
        return lambda update: [
            row(update, env=0, episode=update, prompt=f"{first} {update}", image=None, ended=True),
            row(update, env=1, episode=update, prompt=shared, image=None, ended=update < 3),
        ]

    folders = [write_run(tmp_path / name, 3, rows(name, "Make 24 of 3, 8.")) for name in ("gtr", "ppo")]
    runs = read_runs(folders)
    assert len(shared_starts(runs)) == 1
    assert shared_starts(runs[:1]) == set()
    data, _ = embedded(write_report(folders, output=tmp_path / "both.html").read_text("utf-8"))
    starts = [{episode["start"] for episode in run["episodes"]} for run in data["runs"]]
    assert [len(each) for each in starts] == [4, 4]
    assert len(starts[0] & starts[1]) == 1
    # where there isn't room for all, those that can be compared come first, even before whole ones
    (chosen,) = spread([e for e in episodes_of(runs[0]) if e[0]["update"] == 3], 1, shared_starts(runs))
    assert chosen[0]["prompt"] == "Make 24 of 3, 8."
    # a later step is no start
    assert start_of([row(1, step=1)]) is None


def test_the_action_that_was_really_taken_is_shown(tmp_path):
    folder = write_run(tmp_path / "run", updates=1)
    data, _ = embedded(write_report([folder]).read_text("utf-8"))
    step = data["runs"][0]["episodes"][1]["steps"][1]
    assert (step["action"], step["legal"], step["substitute"]) == ("banana", False, "+")
    # runs of earlier versions didn't say which one it was
    (shard,) = (folder / "episodes").iterdir()
    pq.write_table(pq.read_table(shard).drop_columns(["substitute"]), shard)
    data, _ = embedded(write_report([folder]).read_text("utf-8"))
    assert data["runs"][0]["episodes"][1]["steps"][1]["substitute"] is None


def test_pictures_that_the_agent_saw_again_are_shown(tmp_path):
    def rows(update):
        return [row(update, step=n, history_turns=min(n, 3), history_images=min(n, 2)) for n in range(5)]

    folder = write_run(tmp_path / "run", updates=1, rows=rows)
    data, _ = embedded(write_report([folder]).read_text("utf-8"))
    steps = data["runs"][0]["episodes"][0]["steps"]
    own = [step["image"] for step in steps]
    assert "turns" not in steps[0]
    assert [step["turns"] for step in steps[1:]] == [1, 2, 3, 3]
    assert [step["earlier"] for step in steps[1:]] == [own[:1], own[:2], own[1:3], own[2:4]]
    # runs of earlier versions had none
    (shard,) = (folder / "episodes").iterdir()
    pq.write_table(pq.read_table(shard).drop_columns(["history_turns", "history_images"]), shard)
    data, _ = embedded(write_report([folder]).read_text("utf-8"))
    assert "earlier" not in data["runs"][0]["episodes"][0]["steps"][4]


def test_the_shipped_model_has_its_name(tmp_path):
    folder = write_run(tmp_path / "run", updates=1)
    card = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(
        json.dumps(card | {"model": "/opt/somewhere/trl_gtr/tiny_llava/alfworld_weights"})
    )
    html = write_report([folder]).read_text("utf-8")
    assert "<dd>tiny-alfworld</dd>" in html
    assert "/opt/somewhere" not in html


def test_repeated_thoughts_count_states_and_truth(tmp_path):
    said = {"thought_text": "I aim at 24."}
    rows = [corrected(1, env=n, **said) for n in range(3)]  # three pictures
    rows += [row(1, env=0, **said), row(1, env=7, thought_text="Something else")]
    folder = write_run(tmp_path / "run", updates=2, rows=lambda update: rows if update == 1 else [row(2)])
    first, last = repeated_thoughts(read_runs([folder]), Gallery(Budget(10**6)))
    assert (first["first"], first["last"], first["steps"], first["distinct"]) == (1, 1, 5, 2)
    top = first["thoughts"][0]
    assert (top["text"], top["count"], top["states"], top["true"]) == ("I aim at 24.", 4, 3, 0.25)
    assert len(top["pictures"]) == 3
    assert (last["first"], last["steps"]) == (2, 1)


def test_the_page_shows_all_four_parts(tmp_path):
    path = write_report([write_run(tmp_path / "run")])
    assert path == tmp_path / "run" / "report.html"
    html = path.read_text("utf-8")
    data, script = embedded(html)
    assert [len(run["episodes"]) for run in data["runs"]] == [8]
    first = data["runs"][0]["episodes"][0]
    assert (first["update"], first["success"], len(first["steps"])) == (1, True, 2)
    step = first["steps"][0]
    assert step["thought"] == "cards: 3, 8\nthoughts: I aim at 3*8=24."
    assert ["-", "8"] in step["diff"]
    assert data["images"][step["image"]].startswith("data:image/webp;base64,")
    assert data["prompts"][step["prompt"]] == "Make 24."
    assert data["runs"][0]["scale"]["reward"] == 10.0
    # metrics that were never numbers have no chart; the others have theirs, with a table
    titles = re.findall(r"<figcaption><strong>(.*?)</strong>", html)
    assert titles == ["Success", "Return", "True thoughts", "Corrector cost", "Distinct n-grams", "True by part"]
    assert len(data["charts"]) == len(titles) == html.count("<svg ")
    assert "25% [10%, 50%]" in html
    assert "Settings that differ" in html
    assert "after update 2, 3 times" in html
    assert "generate 12 s (75 %)" in html
    assert "16 s over all updates" in html
    # one script may run, and this is it
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src &#39;sha256-{digest}&#39;" in html or f"script-src 'sha256-{digest}'" in html
    assert not re.search(r'(src|href)="(?!#|data:)', html)


def test_the_same_run_gives_the_same_page(tmp_path):
    folder = write_run(tmp_path / "run")
    made = re.compile(r"Made .*? by")
    pages = [made.sub("", write_report([folder]).read_text("utf-8")) for _ in range(2)]
    assert pages[0] == pages[1]


def test_several_runs_share_their_charts(tmp_path):
    folders = [write_run(tmp_path / name, offset=0.1 * n) for n, name in enumerate(("gtr/seed0", "gtr/seed1", "ppo"))]
    data, _ = embedded(write_report(folders, output=tmp_path / "all.html").read_text("utf-8"))
    assert [run["name"] for run in data["runs"]] == ["gtr · seed0", "gtr · seed1", "ppo"]
    success = {line["name"]: line for line in data["charts"][0]["lines"]}
    assert success["gtr: in training"]["low"][0] == pytest.approx(0.1)
    assert success["gtr: in training"]["high"][0] == pytest.approx(0.2)
    assert success["ppo: in training"]["mean"][0] == pytest.approx(0.3)


def test_a_run_without_episodes_and_card_has_a_page_too(tmp_path):
    folder = write_run(tmp_path / "run", card=False)
    shutil.rmtree(folder / "episodes")
    html = write_report([folder]).read_text("utf-8")
    assert "No episodes were logged" in html
    assert embedded(html)[0]["runs"][0]["episodes"] == []


def test_what_a_model_writes_stays_text(tmp_path):
    html = write_report([write_run(tmp_path / "run", rows=hostile_rows)]).read_text("utf-8")
    data, _ = embedded(html)  # two script elements, no more
    assert "<script>window" not in html
    assert "<img src=x" not in html
    assert "<svg onload" not in html
    assert ">49 " not in html
    assert len(html) < 1_500_000
    steps = data["runs"][0]["episodes"][0]["steps"]
    assert steps[0]["thought"].startswith("<script>window.hacked = 1</script>")
    assert steps[2]["thought"].endswith("(96,000 more characters)")
    assert HOSTILE[:40] in data["prompts"][0]


def test_the_page_stays_below_its_limit(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)

    def noisy_rows(update):  # pictures that don't shrink, and texts that grow sixfold when escaped
        noise = {"image": rng.integers(0, 255, (150, 150, 3), np.uint8), "thought": "<" * 3000}
        return [row(update, env=n, episode=update, **noise) for n in range(10)]

    folder = write_run(tmp_path / "run", updates=8, rows=noisy_rows)
    unlimited = write_report([folder]).stat().st_size
    assert unlimited < MAX_BYTES
    limit = 1_000_000
    assert unlimited > limit
    monkeypatch.setattr(page, "MAX_BYTES", limit)
    monkeypatch.setattr(page, "_RESERVE", 200_000)
    path = write_report([folder])
    assert path.stat().st_size < limit
    updates = {episode["update"] for episode in embedded(path.read_text("utf-8"))[0]["runs"][0]["episodes"]}
    assert updates == set(range(1, 9))


def test_the_readme_figure_is_drawn_from_a_study(tmp_path, monkeypatch):
    script = EXAMPLES / "readme_figure.py"
    results = []
    for arm in ("gtr", "ppo"):
        run = read_runs([write_run(tmp_path / arm / "seed0")])[0]
        results.append({"arm": arm, "seed": 0, "log": run.log})
    (tmp_path / "compare.json").write_text(json.dumps(results))
    figure = tmp_path / "figure.png"
    monkeypatch.setattr(sys, "argv", ["readme_figure.py", str(tmp_path), "--output", str(figure)])
    runpy.run_path(str(script), run_name="__main__")
    assert Image.open(figure).size == (1210, 682)
    monkeypatch.setattr(sys, "argv", ["readme_figure.py", str(tmp_path), "--gtr", "other"])
    with pytest.raises(SystemExit, match=r"compare\.json has no run of other"):
        runpy.run_path(str(script), run_name="__main__")


# --- the command line -----------------------------------------------------------------------------------------------


def test_command_report(tmp_path, capsys):
    folders = [str(write_run(tmp_path / name)) for name in ("a", "b")]
    output = tmp_path / "page.html"
    assert cli.main(["report", *folders, "--labels", "gtr", "ppo", "--output", str(output)]) == 0
    assert "page.html" in capsys.readouterr().out
    assert "<title>gtr, ppo" in output.read_text("utf-8")
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"error: Folder {tmp_path / 'nowhere'} does not exist.\n"


def test_watching_goes_on_until_the_run_ends(tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path / "run", updates=2)
    card = json.loads((folder / "run.json").read_text())

    def write(state, lines=""):
        process = {"host": platform.node(), "pid": os.getpid(), "created": psutil.Process().create_time()}
        gone = process | {"created": 0.0}
        told = {"state": state, "process": process if state == "running" else gone}
        (folder / "run.json").write_text(json.dumps(card | told))
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(lines)

    write("running")
    waits = []
    moments = [
        lambda: None,  # nothing new: nothing is written
        lambda: write("running", json.dumps({"step": 3, "episode/success": 0.5}) + "\n"),
        lambda: write("finished", json.dumps({"step": 3, "end_pool_success": 0.75}) + "\n"),
    ]

    def wait(seconds):
        moments[len(waits)]()
        waits.append(seconds)

    pages = [path.read_text("utf-8") for path in page.watch_report([folder], seconds=7, wait=wait)]
    assert waits == [7, 7, 7]
    assert [">running</span>" in html for html in pages] == [True, True, False]
    assert ['http-equiv="refresh" content="7"' in html for html in pages] == [True, True, False]
    assert [embedded(html)[0]["refresh"] for html in pages] == [7, 7, None]
    assert "update 3 of 2" in pages[1]
    assert "25% [10%, 50%]" in pages[2]
    assert "75%" in pages[2]
    # on the command line too; a run that is over is written once
    assert cli.main(["report", str(folder), "--watch"]) == 0
    assert capsys.readouterr().out.count("report.html") == 1


def test_command_evaluate_plays(capsys):
    options = ["--task", "number_line", "--agents", "expert", "--episodes", "3"]
    assert cli.main(["evaluate", *options]) == 0
    assert "1.000 [0.439, 1.000]" in capsys.readouterr().out


def test_command_check_names_what_is_missing(monkeypatch, capsys):
    assert cli.main(["check"]) == 0
    assert "needed: ok" in capsys.readouterr().out
    monkeypatch.setattr(cli.importlib.metadata, "requires", lambda name: ["no-such-package>=1"])
    assert cli.main(["check"]) == 1
    assert "missing  no-such-package>=1" in capsys.readouterr().out


# --- hostile folders ------------------------------------------------------------------------------------------------


def left_out(folder):
    (run,) = read_runs([folder])
    return run, "\n".join(run.problems)


def test_one_bad_line_costs_its_own_line(tmp_path, caplog):
    folder = write_run(tmp_path / "run", updates=2)
    bad = [b"{", b"\xff\x00\x1b[2J", b"[" * 100_000, b"3", b"{}", b'{"step": "1"}', b'{"step": true}', b'{"step": -1}']
    odd = json.dumps({"step": 9, "episode/success": 10**300, "episode/return": "high", "loss/policy": [1], "ok": 1})
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    (folder / "metrics.jsonl").write_bytes(b"\n".join([lines[0], *bad, odd.encode(), *lines[1:], b""]))
    run, said = left_out(folder)
    assert [entry["step"] for entry in run.log] == [0, 9, 1, 2]
    assert run.log[1] == {"step": 9, "ok": 1}
    assert said.count("metrics.jsonl, line") == len(bad)
    assert "skipped: metrics.jsonl, line 2" in caplog.text
    assert "\x1b" not in caplog.text
    html = write_report([folder]).read_text("utf-8")
    assert "Left out of this page" in html
    assert "metrics.jsonl, line 2" in html


def test_only_so_many_problems_are_listed(tmp_path, caplog):
    folder = write_run(tmp_path / "run", updates=1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("bad\n" * 10_000)
    _, said = left_out(folder)
    assert len(said.splitlines()) == 21
    assert said.endswith("9980 more")
    assert len(caplog.records) == 20


@pytest.mark.parametrize(
    "card",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[1]",
        b'{"config": 3, "warnings": {"a": 1}, "hardware": [], "changed": "x"}',
        b'{"warnings": [1, {}, {"message": "m", "update": [], "count": 1}], "parameters": "many"}',
        b'{"config": {"thought_prob_coef": NaN, "gamma": [[{}]]}, "changed": [1, "gamma"]}',
    ],
    ids=range(7),
)
def test_a_bad_card_ends_nothing(tmp_path, card):
    folder = write_run(tmp_path / "run", updates=1)
    (folder / "run.json").write_bytes(card)
    data, _ = embedded(write_report([folder]).read_text("utf-8"))
    assert data["runs"][0]["thoughtCoef"] == 1.0
    assert len(data["runs"][0]["episodes"]) == 2


def test_bad_parquet_files_cost_themselves(tmp_path):
    folder = write_run(tmp_path / "run", updates=1)
    episodes = folder / "episodes"
    good = (episodes / "update-000001-process-0.parquet").read_bytes()
    (episodes / "update-000002-process-0.parquet").write_bytes(b"no parquet")
    (episodes / "update-000003-process-0.parquet").write_bytes(good[: len(good) // 2])
    pq.write_table(pa.table({"update": [1]}), episodes / "update-000004-process-0.parquet")
    (episodes / "update-000005-process-0.parquet").mkdir()
    run, said = left_out(folder)
    assert len(run.rows) == 4
    assert [f"update-00000{n}" in said for n in (1, 2, 3, 4)] == [False, True, True, True]
    assert "no column" in said
    write_report([folder])


@pytest.mark.parametrize(
    "changes",
    [
        {"update": None},
        {"env_index": -1},
        {"episode": None},
        {"step": None},
        {"history_images": -1},
        {"tokens": ["a", None]},
        {"judgement": [{"part": None, "right": True}]},
        {"judgement": [{"part": "cards", "right": None}]},
    ],
    ids=str,
)
def test_a_bad_row_costs_itself(tmp_path, changes):
    folder = write_run(tmp_path / "run", updates=1, rows=lambda n: [row(n), row(n, episode=1) | changes, row(n, 1)])
    run, said = left_out(folder)
    assert len(run.rows) == 2
    assert f"row 1: invalid {next(iter(changes))}" in said
    write_report([folder])


def test_columns_of_other_types_and_texts_that_are_no_utf8(tmp_path):
    folder = write_run(tmp_path / "run", updates=1)
    (shard,) = (folder / "episodes").iterdir()
    table = pq.read_table(shard)
    at = table.schema.get_field_index
    words = pa.array([b"fine", b"\xff\xfe", b"fine", b"fine"], pa.binary())
    odd = pa.Array.from_buffers(pa.string(), 4, words.buffers())
    pq.write_table(
        table.set_column(at("action"), "action", odd), folder / "episodes" / "update-000002-process-0.parquet"
    )
    numbers = table.set_column(at("thought"), "thought", pa.array([1, 2, 3, 4]))
    pq.write_table(numbers, folder / "episodes" / "update-000003-process-0.parquet")
    run, said = left_out(folder)
    assert len(run.rows) == 4 + 3
    assert said.count("update-000003-process-0.parquet, row") == 4
    write_report([folder])


def picture(kind, size=(20, 20)):
    data = io.BytesIO()
    Image.new("RGB", size, "red").save(data, kind)
    return data.getvalue()


def test_no_other_pictures_than_png_and_webp_are_opened(tmp_path):
    gallery = Gallery(Budget(10**6))
    shown = [gallery.add({"bytes": picture(kind)}) for kind in ("PNG", "WEBP", "JPEG", "GIF", "BMP", "TIFF", "PPM")]
    assert shown == [0, 1, None, None, None, None, None]
    png = picture("PNG")
    damaged = [b"", png[:40], png[:60], png.replace(b"IDAT", b"IDAX"), picture("PNG", (5000, 5000))]
    assert [gallery.add({"bytes": data}) for data in damaged] == [None] * 5
    assert gallery.unreadable == 10
    folder = write_run(tmp_path / "run", updates=1)
    (shard,) = (folder / "episodes").iterdir()
    table = pq.read_table(shard)
    images = pa.array([{"bytes": picture("JPEG"), "path": None}] * 4, table.schema.field("image").type)
    pq.write_table(table.set_column(table.schema.get_field_index("image"), "image", images), shard)
    html = write_report([folder]).read_text("utf-8")
    assert "1 pictures that are not PNG or WebP, or too large" in html
    assert embedded(html)[0]["images"] == []


def test_links_out_of_the_folder_are_not_followed(tmp_path):
    secret = write_run(tmp_path / "secret", updates=3)
    (secret / "run.json").write_text(json.dumps({"task": "a secret"}))
    folder = write_run(tmp_path / "run", updates=1)
    (folder / "run.json").unlink()
    (folder / "run.json").symlink_to(secret / "run.json")
    shard = "update-000002-process-0.parquet"
    (folder / "episodes" / shard).symlink_to(secret / "episodes" / shard)
    inner = "update-000003-process-0.parquet"
    (folder / "kept.parquet").write_bytes((secret / "episodes" / inner).read_bytes())
    (folder / "episodes" / inner).symlink_to(folder / "kept.parquet")  # within the folder a link may be
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    (folder / ".report.html").symlink_to(victim)
    run, said = left_out(folder)
    assert {row["update"] for row in run.rows} == {1, 3}
    assert run.card.get("task") is None
    assert "run.json is a link out of the run's folder" in said
    assert f"episodes/{shard} is a link out of the run's folder" in said
    assert "a secret" not in write_report([folder]).read_text("utf-8")
    assert victim.read_text() == "mine"
    # The folder itself may be reached by a link: somebody named it.
    (tmp_path / "link").symlink_to(folder)
    assert len(read_runs([tmp_path / "link"])[0].rows) == len(run.rows)
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").symlink_to(secret / "metrics.jsonl")
    with pytest.raises(ValueError, match="is not a run's output folder"):
        read_runs([folder])


def test_names_control_no_terminal(tmp_path, capsys):
    name = b"run\x1b]0;title\x07\xff".decode("utf-8", "surrogateescape")
    folder = write_run(tmp_path / name, updates=1)
    assert cli.main(["report", str(folder)]) == 0
    assert cli.main(["report", str(folder / "\x1b[2Jnowhere")]) == 2
    shown = capsys.readouterr()
    assert "\\x1b]0;title\\x07\\udcff" in shown.out
    assert "\\x1b[2Jnowhere" in shown.err
    assert not set(shown.out + shown.err) & set("\x1b\x07\udcff")


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=10),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=8), parts, max_size=3),
    max_leaves=6,
)
NAMES = ["step", "episode/success", "loss/policy", "thoughts/true_x", "eval_success", "time/generate", "env_steps"]
KEYS = ["config", "warnings", "hardware", "versions", "changed", "task", "parameters", "trainable", "updated"]


@settings(max_examples=25, deadline=None)
@given(
    entries=st.lists(st.dictionaries(st.sampled_from(NAMES), json_values), max_size=3),
    card=st.dictionaries(st.sampled_from(KEYS), json_values),
)
def test_whatever_the_files_say_there_is_a_page(tmp_path_factory, entries, card):
    folder = tmp_path_factory.mktemp("run")
    lines = [json.dumps({"step": n} | entry) + "\n" for n, entry in enumerate(entries)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "run.json").write_text(json.dumps(card))
    embedded(write_report([folder]).read_text("utf-8"))

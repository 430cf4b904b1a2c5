"""The state-tracking results, gathered from made-up tables of sweeps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "python/pathattn/state_tracking.py"


def write_table(folder, runs):
    """runs: (fields, evaluation); those without an evaluation have failed."""
    training = {"device": "cpu", "versions": {"commit": "abc"}}
    rows = [
        {"name": str(fields), "status": "done" if evaluation else "failed", "fields": fields, "training": training, "evaluation": evaluation}
        for fields, evaluation in runs
    ]
    folder.mkdir(parents=True)
    (folder / "table.json").write_text(json.dumps({"side_by_side": 2, "threads": 1, "seconds": 7.5, "tokens": 100, "runs": rows}))


def write_sweeps(folder):
    flip_flop = [("path", 2, 0.5), ("path", 1, 0.0), ("rope", 1, 30.0)]
    sets = {"sparse": 1.0, "dense": 0.25, "reads": {"sparse": 1000}}
    write_table(folder / "flip_flop", [({"model.kind": k, "train.seed": s}, {"in_distribution": e} | sets) for k, s, e in flip_flop])
    a5 = [("path", 2, 1, 99.0, 95.0), ("path", 1, 1, 92.0, 10.0), ("path", 1, 2, 40.0, 5.0), ("path", 2, 2, 97.0, 60.0), ("rope", 1, 1, 80.0, 1.0)]
    fields = ("model.kind", "model.num_layers", "train.seed")
    write_table(folder / "a5", [(dict(zip(fields, run)), {"accuracy": {"4": run[3], "10": run[4]}}) for run in a5])
    a5_long = [("path", 3, 2, 95.0, 91.0, 96.0), ("path", 3, 1, 99.0, 80.0, 95.0)]
    write_table(folder / "a5_long", [(dict(zip(fields, run)), {"accuracy": dict(zip(("2", "9", "10"), run[3:]))}) for run in a5_long])
    mqrar = [("path", 2, 2, 96.0), ("path", 2, 1, 98.0), ("path", 1, 1, 99.0), ("rope", 1, 1, 97.0), ("rope", 2, 1, None)]
    fields = ("model.kind", "data.n_back", "train.seed")
    write_table(folder / "mqrar", [(dict(zip(fields, run)), {"accuracy": run[3]} if run[3] else {}) for run in mqrar])


def gather(folder, output="results.json", picture="picture.png"):
    command = [sys.executable, PROGRAM, folder, folder / output, folder / picture]
    return subprocess.run(list(map(str, command)), capture_output=True, encoding="utf-8")


def test_results_have_seeds_in_order_and_fewest_layers(tmp_path):
    write_sweeps(tmp_path)
    process = gather(tmp_path)
    assert process.returncode == 0, process.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(run["seed"], run["in_distribution"], run["dense"]) for run in results["flip_flop"]["path"]] == [(1, 0.0, 0.25), (2, 0.5, 0.25)]
    assert results["a5"]["path"]["fewest_layers"] == {"4": 1, "10": 2}
    assert results["a5"]["path"]["fewest_layers_of_mean"] == {"4": 2, "10": None}
    assert results["a5"]["path"]["accuracy"]["1"] == {"4": [92.0, 40.0], "10": [10.0, 5.0]}
    assert results["a5"]["rope"]["fewest_layers"] == {"4": None, "10": None}
    long = results["a5_long"]["path"]
    assert long["longest_word"] == [2, 10]  # nothing beyond a length that is not mastered counts
    assert long["accuracy"] == {"2": [99.0, 95.0], "9": [80.0, 91.0], "10": [95.0, 96.0]}
    assert results["mqrar"]["path"]["accuracy"] == {"1": [99.0], "2": [98.0, 96.0]}
    assert results["mqrar"]["rope"]["accuracy"] == {"1": [97.0]}
    assert results["sweeps"]["mqrar"]["runs"] == {"done": 4, "failed": 1, "unfinished": 0, "waiting": 0}
    a5 = results["sweeps"]["a5"]
    assert (a5["seconds"], a5["tokens"], a5["side_by_side"], a5["devices"], a5["commits"]) == (7.5, 100, 2, ["cpu"], ["abc"])
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_tables_show_best_mean_and_the_papers_numbers(tmp_path):
    write_sweeps(tmp_path)
    printed = gather(tmp_path).stdout
    assert "| PaTH | 2 | 0 / 0.25 (0) | 1 / 1 (0.0001) | 0.25 / 0.25 (0) |" in printed
    assert "| RoPE | 1 | 30 / 30 (6.9) |" in printed
    assert "| PaTH | 1 | 2 |" in printed and "| PaTH | 2 | – |" in printed
    assert "| PaTH | 2, 10 | 97 | 85.5 | 95.5 |" in printed
    assert "| PaTH | 99 / 99 | 98 / 97 |" in printed and "| RoPE | 97 / 97 |  |" in printed


@pytest.mark.parametrize("task", ["flip_flop", "a5", "a5_long", "mqrar"])
def test_one_sweep_alone_is_enough(tmp_path, task):
    write_sweeps(tmp_path / "all")
    (tmp_path / "all" / task).rename(tmp_path / task)
    assert gather(tmp_path).returncode == 0
    assert set(json.loads((tmp_path / "results.json").read_text())) == {task, "sweeps"}


def test_sweeps_of_one_task_are_taken_together(tmp_path):
    write_sweeps(tmp_path)
    write_table(tmp_path / "mqrar-more", [({"model.kind": "rope", "data.n_back": 1, "train.seed": 0}, {"accuracy": 96.0})])
    assert gather(tmp_path).returncode == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["mqrar"]["rope"]["accuracy"] == {"1": [96.0, 97.0]}
    assert (results["sweeps"]["mqrar"]["seconds"], results["sweeps"]["mqrar"]["runs"]["done"]) == (15.0, 5)


def test_a_run_done_in_two_sweeps_is_refused(tmp_path):
    write_sweeps(tmp_path)
    fields = {"train.seed": 1, "model.kind": "rope"}
    write_table(tmp_path / "flip_flop-failed", [(fields, {})])
    assert gather(tmp_path).returncode == 0
    write_table(tmp_path / "flip_flop-old", [(fields, {"in_distribution": 30.0, "sparse": 1.0, "dense": 0.25, "reads": {}})])
    (tmp_path / "results.json").unlink()
    process = gather(tmp_path)
    assert process.returncode == 1 and len(process.stderr.splitlines()) == 1
    assert f'{tmp_path}/flip_flop and {tmp_path}/flip_flop-old both have the run {{"model.kind": "rope", "train.seed": 1}}' in process.stderr
    assert not (tmp_path / "results.json").exists()


def test_folders_of_the_results_are_made(tmp_path):
    write_sweeps(tmp_path)
    process = gather(tmp_path, "new/results/results.json", "new/images/picture.png")
    assert process.returncode == 0, process.stderr
    assert [path.name for path in (tmp_path / "new/results").iterdir()] == ["results.json"] and (tmp_path / "new/images/picture.png").exists()
    process = gather(tmp_path, "new/results/results.json/results.json")
    assert process.returncode == 1 and "results.json cannot be written" in process.stderr and len(process.stderr.splitlines()) == 1


def test_results_are_replaced_whole(tmp_path):
    write_sweeps(tmp_path)
    (tmp_path / "results.json").write_text("earlier")
    (tmp_path / "results.tmp").mkdir()  # in the way of what is written beside
    process = gather(tmp_path)
    assert process.returncode == 1 and "results.tmp cannot be written" in process.stderr and len(process.stderr.splitlines()) == 1
    assert (tmp_path / "results.json").read_text() == "earlier"


@pytest.mark.parametrize(
    "content, message", [("{", "table.json is damaged"), ("[]", "is damaged"), ('{"runs": []}', "no finished run"), (None, "no finished run")]
)
def test_missing_or_damaged_tables_give_one_clear_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "a5").mkdir()
        (tmp_path / "a5/table.json").write_text(content)
    process = gather(tmp_path)
    assert process.returncode == 1 and message in process.stderr and len(process.stderr.splitlines()) == 1
    assert not (tmp_path / "results.json").exists()


def test_table_of_another_sweep_is_refused(tmp_path):
    write_table(tmp_path / "a5", [({"model.kind": "path", "train.seed": 1}, {"accuracy": {"1": 3.0}})])
    process = gather(tmp_path)
    assert process.returncode == 1 and "model.num_layers" in process.stderr and len(process.stderr.splitlines()) == 1

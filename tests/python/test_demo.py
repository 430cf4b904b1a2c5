"""The demo's bookkeeping, with a stand-in for the pathattn program that writes what docs/training.md promises and counts its trainings."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUNS = {"flip_flop_rope", "flip_flop_path", "text_rope", "text_path_fox"}
STAND_IN = """#!{python}
import json, pathlib, sys
command, arguments = sys.argv[1], sys.argv[2:]
here = pathlib.Path(__file__).parents[1]
if command == "generate":
    sys.exit(print("x): return x"))
run = pathlib.Path(arguments[arguments.index("--output") + 1] if command == "train" else arguments[0])
if command == "train":
    with open(here / "trained", "a") as log:
        print(run.name, run.exists(), file=log)
    run.mkdir(exist_ok=True)
    if (here / "fail").exists() and run.name == (here / "fail").read_text():
        sys.exit(2)
    (run / "run.json").write_text('{{"status": "finished"}}')
    (run / "metrics.jsonl").write_text('{{"step": 1, "loss": 0.7}}\\n')
else:
    about = dict(seconds=1.5, steps=10, step=10, tokens=100, parameters=1000, seed=1, versions=dict(torch="2.11.0"))
    if run.name.startswith("text"):
        result = dict(task="text", training_length=256, bits_per_byte={{"128-256": 1.5, "1536-2048": 2.25}}, run=about)
    else:
        result = dict(task="flip_flop", in_distribution=0.0, sparse=12.5, dense=0.0, run=about)
    pathlib.Path(arguments[arguments.index("--output") + 1]).write_text(json.dumps(result))
"""


class Demo:
    """A copy of what the demo reads, so that recipes can be changed."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("scripts/demo.py", "python/pathattn/report.py", "python/pathattn/results.py", "recipes/flip-flop.toml", "recipes/text.toml"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        self.program = folder / "build/pathattn"
        self.program.parent.mkdir()
        self.program.write_text(STAND_IN.format(python=sys.executable))
        self.program.chmod(0o755)

    def run(self, *options):
        """Returns the process and what was trained: {run: whether it had begun before}."""
        (self.folder / "trained").write_text("")
        command = [sys.executable, "scripts/demo.py", "build/pathattn", "runs/demo", *options]
        process = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
        lines = (self.folder / "trained").read_text().split("\n")[:-1]
        return process, {run: begun == "True" for run, begun in (line.split() for line in lines)}


@pytest.fixture
def demo(tmp_path):
    return Demo(tmp_path)


def test_commands_name_a_torch_below_the_root_by_its_place_there(demo, monkeypatch):
    package = demo.folder / "libraries/torch/__init__.py"
    package.parent.mkdir(parents=True)
    package.touch()
    monkeypatch.setenv("PYTHONPATH", str(package.parents[1]))
    assert demo.run()[0].returncode == 0
    summary = json.loads((demo.folder / "runs/demo/summary.json").read_text())
    assert 'data.files="libraries/torch"' in summary["text"]["rope"]["commands"][0]


def test_summary_has_every_figure(demo):
    process, trained = demo.run()
    assert process.returncode == 0, process.stderr
    assert set(trained) == RUNS
    summary = json.loads((demo.folder / "runs/demo/summary.json").read_text())
    assert {task: set(summary[task]) for task in ("flip_flop", "text")} == {"flip_flop": {"rope", "path"}, "text": {"rope", "path_fox"}}
    path, text = summary["flip_flop"]["path"], summary["text"]["path_fox"]
    assert (path["in_distribution"], path["sparse"], path["dense"]) == (0.0, 12.5, 0.0)
    assert text["bits_per_byte"] == {"128-256": 1.5, "1536-2048": 2.25}
    for run in (path, text):
        assert {"seconds", "steps", "tokens", "parameters", "seed", "versions"} <= set(run)
    assert summary["sample"] == {"kind": "path_fox", "prompt": "def forward(self, ", "text": "x): return x\n"}
    assert (demo.folder / "runs/demo/report.png").exists() and (demo.folder / "runs/demo/report.html").exists()
    assert "12.50" in process.stdout and "2.25" in process.stdout and "def forward(self, x): return x" in process.stdout


def test_finished_runs_are_reused(demo):
    demo.run()
    process, trained = demo.run()
    assert process.returncode == 0 and trained == {}


def test_a_changed_recipe_starts_its_runs_anew(demo):
    demo.run()
    recipe = demo.folder / "recipes/text.toml"
    recipe.write_text(recipe.read_text() + "\n# changed\n")
    _, trained = demo.run()
    assert trained == {"text_rope": False, "text_path_fox": False}


def test_a_failed_run_stops_the_demo_and_goes_on_next_time(demo):
    (demo.folder / "fail").write_text("text_rope")
    process, _ = demo.run()
    assert process.returncode == 1 and "failed with status 2: build/pathattn train recipes/text.toml" in process.stderr
    assert not (demo.folder / "runs/demo/summary.json").exists()
    (demo.folder / "fail").unlink()
    process, trained = demo.run()
    assert process.returncode == 0 and trained == {"text_rope": True, "text_path_fox": False}


def test_full_trains_every_kind(demo):
    process, trained = demo.run("--full")
    assert process.returncode == 0, process.stderr
    assert set(trained) == {f"{task}_{kind}" for task in ("flip_flop", "text") for kind in ("rope", "fox", "path", "path_fox")}

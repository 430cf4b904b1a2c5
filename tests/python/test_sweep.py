"""pathattn sweep from outside: runs equal those trained alone, stops and kills lose nothing, failures stay with their run."""

import csv
import json
import os
import signal
import subprocess
import time

import pytest

TINY = """
[model]
kind = "path_fox"
hidden_size = 16
num_layers = 1
num_heads = 2
intermediate_size = 32
[data]
kind = "flip_flop"
test_reads = 100
[train]
batch_size = 4
tokens = 32
steps = 40
warmup_steps = 30
checkpoint_every = 10
validate_every = 20
"""
SWEEP = """
recipe = "tiny.toml"
[grid]
model.kind = ["path", "rope"]
train.seed = [1, 2]
[[figure]]
y = ["in_distribution", "sparse", "dense"]
line = "model.kind"
"""
NAMES = [f"kind={kind},seed={seed}" for seed in (1, 2) for kind in ("path", "rope")]


@pytest.fixture
def sweep(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    path = tmp_path / "sweep.toml"
    path.write_text(SWEEP)
    return path


def statuses(output):
    return {run["name"]: run["status"] for run in json.loads((output / "table.json").read_text())["runs"]}


def logged(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("tokens_per_s", None)
    return lines


def expect_same_run(run, other, step):
    """Parameters, moments, logged losses and results are the same bits."""
    for name in ("model.safetensors", "trainer.safetensors"):
        assert (run / f"checkpoints/step-{step:06}" / name).read_bytes() == (other / f"checkpoints/step-{step:06}" / name).read_bytes(), name
    assert logged(run) == logged(other)
    results = [json.loads((folder / "evaluation.json").read_text()) for folder in (run, other)]
    for result in results:
        result.pop("run")
    assert results[0] == results[1]


def train_alone(call, tmp_path, kind, seed, *more):
    run = tmp_path / f"alone-{kind}-{seed}"
    sets = ["--set", f"model.kind={kind}", "--set", f"train.seed={seed}", *more]
    call("train", tmp_path / "tiny.toml", "--output", run, *sets)
    call("evaluate", run, "--output", run / "evaluation.json")
    return run


def start(build, sweep, output, *more):
    command = [build / "pathattn", "--threads", "2", "sweep", sweep, "--output", output, "--side-by-side", "2", *more]
    return subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, encoding="utf-8", start_new_session=True)


def wait_for_steps(run, count):
    for _ in range(600):
        if (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text().count("\n") >= count:
            return
        time.sleep(0.05)
    pytest.fail(f"{run} did not come to step {count}")


def test_runs_side_by_side_equal_those_trained_alone(call, sweep, tmp_path):
    output = tmp_path / "out"
    printed = call("sweep", sweep, "--output", output, "--side-by-side", "2").stderr
    assert "4 of 4 runs done, 0 failed" in printed and "tokens/s" in printed and "steps/s" in printed and "\r" not in printed
    assert statuses(output) == dict.fromkeys(NAMES, "done")
    with open(output / "table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [f"kind={row['model.kind']},seed={row['train.seed']}" for row in rows] == NAMES
    assert {row["step"] for row in rows} == {"40"}
    assert "<svg" in (output / "figure-1.svg").read_text()
    for kind, seed in (("path", 1), ("rope", 2)):
        alone = train_alone(call, tmp_path, kind, seed)
        expect_same_run(output / f"runs/kind={kind},seed={seed}", alone, 40)
        row = rows[NAMES.index(f"kind={kind},seed={seed}")]
        assert float(row["dense"]) == json.loads((alone / "evaluation.json").read_text())["dense"]


def test_what_is_done_is_skipped(call, sweep, tmp_path):
    output = tmp_path / "out"
    call("sweep", sweep, "--output", output)
    logs = {name: (output / f"runs/{name}/log.txt").read_bytes() for name in NAMES}
    sweep.write_text(SWEEP.replace("[1, 2]", "[1, 2, 3]"))
    printed = call("sweep", sweep, "--output", output).stderr
    assert "4 of 6 runs are done already" in printed and "6 of 6 runs done" in printed
    assert logs == {name: (output / f"runs/{name}/log.txt").read_bytes() for name in NAMES}


@pytest.mark.parametrize("how, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_interrupted_sweep_goes_on_bit_for_bit(build, call, sweep, tmp_path, how, status):
    output, more = tmp_path / "out", ["--set", "train.steps=400"]
    process = start(build, sweep, output, *more)
    wait_for_steps(output / "runs" / NAMES[0], 25)
    process.send_signal(how)
    printed = process.communicate(timeout=60)[1]
    assert process.returncode == status, printed
    assert "done" not in statuses(output).values()
    if how != signal.SIGKILL:
        assert json.loads((output / "runs" / NAMES[0] / "run.json").read_text())["status"] == "interrupted"
        assert statuses(output)[NAMES[0]] == "unfinished"
    printed = call("sweep", sweep, "--output", output, "--side-by-side", "2", *more).stderr
    assert "4 of 4 runs done, 0 failed" in printed
    assert "continuing from step" in (output / "runs" / NAMES[0] / "log.txt").read_text()
    expect_same_run(output / "runs" / NAMES[0], train_alone(call, tmp_path, "path", 1, *more), 400)


def test_second_interrupt_ends_at_once_and_leaves_no_process(build, sweep, tmp_path):
    output = tmp_path / "out"
    process = start(build, sweep, output, "--set", "train.steps=100000")
    wait_for_steps(output / "runs" / NAMES[0], 5)
    children = subprocess.run(["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True).stdout.split()
    assert len(children) == 2
    for child in children:
        os.kill(int(child), signal.SIGSTOP)  # such that they cannot end in good order
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGINT
    for _ in range(100):
        alive = [child for child in children if os.path.exists(f"/proc/{child}") and "Z" not in open(f"/proc/{child}/stat").read().rsplit(")")[1][:3]]
        if not alive:
            break
        time.sleep(0.05)
    assert not alive


def test_failed_run_is_recorded_and_tried_again(call, sweep, tmp_path):
    output = tmp_path / "out"
    wild = TINY.replace("warmup_steps = 30", "warmup_steps = 0\nweight_decay = 100").replace("steps = 40", "steps = 100")
    (tmp_path / "tiny.toml").write_text(wild)
    sweep.write_text('recipe = "tiny.toml"\n[grid]\ntrain.learning_rate = [100.0, 0.001]\n')
    for _ in range(2):
        printed = call("sweep", sweep, "--output", output, status=1).stderr
        assert "1 of 2 runs done, 1 failed" in printed and "the training diverges" in printed
        assert statuses(output) == {"learning_rate=100.0": "failed", "learning_rate=0.001": "done"}
    assert "the training diverges" in (output / "table.csv").read_text()


def test_run_of_another_recipe_is_refused_and_untouched(call, sweep, tmp_path):
    output = tmp_path / "out"
    call("sweep", sweep, "--output", output)
    before = (output / "table.json").read_bytes()
    message = call("sweep", sweep, "--output", output, "--set", "train.batch_size=8", status=2).stderr
    assert "train.batch_size was 4 in this run and is 8 now" in message and len(message.splitlines()) == 1
    assert (output / "table.json").read_bytes() == before


@pytest.mark.parametrize(
    "change, message",
    [
        (("model.kind", "model.knd"), "did you mean model.kind?"),
        (("[1, 2]", "[1, -2]"), "train.seed = -2"),
        (("[1, 2]", "1"), "must be a list of values"),
        (("recipe =", "recipes ="), "did you mean recipe?"),
    ],
)
def test_bad_sweep_is_refused_before_any_run(call, sweep, tmp_path, change, message):
    sweep.write_text(SWEEP.replace(*change))
    printed = call("sweep", sweep, "--output", tmp_path / "out", status=2).stderr
    assert message in printed and len(printed.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_misspelt_result_of_a_figure_is_named_and_may_be_put_right(call, sweep, tmp_path):
    output = tmp_path / "out"
    sweep.write_text(SWEEP.replace('["in_distribution", "sparse", "dense"]', '"dnse"'))
    printed = call("sweep", sweep, "--output", output, status=1).stderr
    assert "figure 1: no run has a result dnse; there are dense, in_distribution, reads, sparse" in printed and "4 of 4 runs done, 0 failed" in printed
    assert not (output / "figure-1.svg").exists()
    sweep.write_text(SWEEP)
    assert "4 of 4 runs are done already" in call("sweep", sweep, "--output", output).stderr
    assert (output / "figure-1.svg").exists()


def test_sweep_whose_table_is_gone_goes_on(call, sweep, tmp_path):
    output = tmp_path / "out"
    call("sweep", sweep, "--output", output)
    for table in ("table.json", "table.csv"):
        (output / table).unlink()
    assert "4 of 4 runs are done already" in call("sweep", sweep, "--output", output).stderr
    assert statuses(output) == dict.fromkeys(NAMES, "done")


def test_folder_of_something_else_is_refused(call, sweep, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("kept")
    assert "holds no sweep" in call("sweep", sweep, "--output", tmp_path / "out", status=2).stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]

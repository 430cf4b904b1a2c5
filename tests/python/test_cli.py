"""The pathattn program from outside: help, users' mistakes, stopping at any moment and going on, full disks, evaluation."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

TINY = """
[model]
kind = "path"
hidden_size = 16
num_layers = 1
num_heads = 2
intermediate_size = 32
[data]
kind = "flip_flop"
[train]
batch_size = 4
tokens = 32
steps = 60
warmup_steps = 30
checkpoint_every = 10
validate_every = 20
gradient_clip = 0.5
precision = "bf16"
"""
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
KILLS = int(os.environ.get("PATHATTN_KILLS", "12"))  # of the test T08; 200 takes minutes


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def last_line(result):
    return result.stderr.strip().splitlines()[-1]


def logged(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("tokens_per_s", None)
    return lines


def bits(run, step):
    folder = run / f"checkpoints/step-{step:06}"
    return [(folder / name).read_bytes() for name in ("model.safetensors", "trainer.safetensors")]


@pytest.mark.parametrize("command", [[], ["train"], ["evaluate"], ["generate"], ["logits"], ["construct"], ["sweep"]])
def test_help_has_examples_or_commands(call, command):
    text = call(*command, "--help").stdout
    assert ("pathattn " + command[0] if command else "train") in text
    assert "--help" in text


def test_version_names_project_and_torch(call):
    assert "pathattn 0." in call("--version").stdout and "torch 2." in call("--version").stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "subcommand"),
        (["fly"], "fly"),
        (["train"], "--output is required"),
        (["train", "--wings"], "there is no option --wings; see --help"),
        (["train", "{recipe}", "--output", "{run}", "--wings"], "there is no option --wings; see --help"),
        (["train", "{recipe}", "--outptu", "{run}"], "there is no option --outptu; did you mean --output?"),
        (["train", "{recipe}", "--outptu={run}"], "there is no option --outptu; did you mean --output?"),
        (["train", "{recipe}", "--output", "{run}", "--thread", "1"], "there is no option --thread; did you mean --threads?"),
        (["generate", "x", "--prompt-file", "x"], "there is no option --prompt-file; see --help"),
        (["generate", "x", "--prompt", "x", "--max-new-token", "5"], "there is no option --max-new-token; did you mean --max-new-tokens?"),
        (["train", "{recipe}", "--output", "{run}", "left", "over"], "left"),
        (["train", "{recipe}", "--output", "{run}", "--set", "train.lerning_rate=1"], "train.learning_rate"),
        (["train", "{recipe}", "--output", "{run}", "--set", "modl.kind=path"], "model.kind"),
        (["train", "{recipe}", "--output", "{run}", "--set", "train.steps=many"], "train.steps"),
        (["train", "{recipe}", "--output", "{run}", "--set", "train.accumulation=3"], "train.accumulation"),
        (["train", "{recipe}", "--output", "{run}", "--set", "model.kind=pathh"], "path_fox"),
        (["train", "{recipe}", "--output", "{run}", "--set", "steps"], "section.field=value"),
        (["train", "{recipe}", "--output", "{run}", "--set", "model.rope_theta=100"], "there is no setting model.rope_theta, or other settings"),
        (["train", "{recipe}", "--output", "{run}", "--set", "data={kind='text', files='no/'}"], "data.files: no/: No such file or directory"),
        (["train", "{recipe}", "--output", "{run}", "--device", "gpu"], "there is no device gpu: cpu, cuda and cuda:N are known"),
        (["train", "{recipe}", "--output", "{run}", "--set", "train.device=cuda:x"], "there is no device cuda:x"),
        (["train", "{recipe}", "--output", "{run}", "--device", "cuda:99"], "device cuda:99"),
        (["train", "no/such.toml", "--output", "{run}"], "no/such.toml"),
        (["train", "--output", "{run}"], "RECIPE"),
        (["train", "--output", "{run}", "--resume"], "run.json"),
        (["evaluate", "no/such/run"], "no/such/run"),
        (["evaluate", "/usr"], "config.json"),
        (["evaluate", "runs", "--precision", "fp8"], "fp8"),
        (["--threads", "0", "evaluate", "x"], "--threads"),
        (["evaluate", "x", "--sequences", "0"], "Value 0 not in range 1 to"),
        (["evaluate", "x", "--positions", "0,9223372036854775807"], "--positions"),
        (["train", "{recipe}", "--output="], "--output"),
        (["train", "{recipe}", "--output", "{run}", "--set", "a." * 60000 + "a=1"], "parts"),
    ],
)
def test_users_mistakes_are_one_line_and_status_2(build, recipe, tmp_path, arguments, message):
    run = tmp_path / "run"
    arguments = [a.replace("{recipe}", str(recipe)).replace("{run}", str(run)) for a in arguments]
    result = subprocess.run([build / "pathattn", *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("pathattn: ") and message in result.stderr
    assert not run.exists()


def test_broken_recipe_names_the_line(call, recipe, tmp_path):
    recipe.write_text(TINY + "steps = = 3\n")
    assert "line" in last_line(call("train", recipe, "--output", tmp_path / "run", status=2))


def test_T02_resume_in_a_new_process_changes_no_bit(call, recipe, tmp_path):
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    call("train", recipe, "--output", straight)
    assert "continuing" not in call("train", recipe, "--output", stopped, "--resume").stderr
    shutil.rmtree(stopped / "checkpoints/step-000060")
    assert "continuing from step 50" in call("train", recipe, "--output", stopped, "--resume").stderr
    assert bits(straight, 60) == bits(stopped, 60)
    assert logged(straight) == logged(stopped)
    assert [line["step"] for line in logged(stopped) if "loss" in line] == list(range(1, 61))

    again = call("train", "--output", stopped, "--resume")
    assert "finished already" in again.stderr
    assert logged(straight) == logged(stopped)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_first(build, call, recipe, tmp_path, number):
    run = tmp_path / "run"
    arguments = ["train", recipe, "--output", run, "--set", "train.steps=100000", "--set", "train.checkpoint_every=0"]
    child = subprocess.Popen([build / "pathattn", "--threads", "1", *arguments], stderr=subprocess.PIPE, text=True)
    wait_for_line(run / "metrics.jsonl")
    child.send_signal(number)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 128 + number
    assert f"continue with: {build / 'pathattn'} train --output {run} --resume\n" in errors
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == "interrupted"
    assert (run / f"checkpoints/step-{record['step']:06}/model.safetensors").exists()
    assert logged(run)[-1]["step"] == record["step"]
    call("train", recipe, "--output", run, "--resume", "--set", f"train.steps={record['step'] + 2}", "--set", "train.checkpoint_every=0")
    assert [line["step"] for line in logged(run) if "loss" in line] == list(range(1, record["step"] + 3))


@pytest.mark.parametrize(
    "given, policy",
    [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active"), ({"GOMP_SPINCOUNT": "1000"}, None)],
)
def test_threads_wait_without_spinning_unless_told_how(build, recipe, tmp_path, given, policy):
    run = tmp_path / "run"
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")} | given
    command = [build / "pathattn", "--threads", "1", "train", recipe, "--output", run, "--set", "train.steps=100000"]
    child = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_for_line(run / "metrics.jsonl")
        started_with = dict(entry.split("=", 1) for entry in Path(f"/proc/{child.pid}/environ").read_text().split("\0") if entry)
        assert started_with.get("OMP_WAIT_POLICY") == policy
        assert Path(f"/proc/{child.pid}/comm").read_text() == "pathattn\n"
    finally:
        child.kill()
        child.wait()


def test_second_signal_ends_at_once(build, recipe, tmp_path):
    run = tmp_path / "run"
    slow_steps = ["--set", "train.batch_size=64", "--set", "train.tokens=8192", "--set", "train.validate_every=0"]
    child = subprocess.Popen([build / "pathattn", "--threads", "1", "train", recipe, "--output", run, *slow_steps], stderr=subprocess.DEVNULL)
    while not (run / "metrics.jsonl").exists():
        assert child.poll() is None
        time.sleep(0.1)
    for _ in range(2):
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
    assert child.wait(timeout=10) == -signal.SIGINT
    assert not (run / "checkpoints").exists()


def wait_for_line(path):
    for _ in range(600):
        if path.exists() and path.stat().st_size:
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} stays empty")


def test_T08_kill_at_any_moment_keeps_a_whole_checkpoint(build, call, recipe, tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    started = time.monotonic()
    call("train", recipe, "--output", straight, "--set", "train.checkpoint_every=2")
    duration = time.monotonic() - started
    generator = random.Random(8)
    command = [build / "pathattn", "--threads", "1", "train", recipe, "--output", killed, "--resume", "--set", "train.checkpoint_every=2"]
    for _ in range(KILLS):
        child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            _, errors = child.communicate(timeout=generator.uniform(0.3, 1) * duration)
            assert child.returncode == 0, errors
            shutil.rmtree(killed)  # finished between the kills: start over
        except subprocess.TimeoutExpired:
            child.kill()
            _, errors = child.communicate()
        assert "damaged" not in errors
    call(*command[3:])
    assert bits(straight, 60) == bits(killed, 60)
    assert logged(straight) == logged(killed)
    assert not list((killed / "checkpoints").glob(".*")), "temporaries are left"


def test_full_disk_keeps_the_last_good_checkpoint(call, recipe, tmp_path):
    run = tmp_path / "run"
    call("train", recipe, "--output", run, "--set", "train.steps=20")
    before = bits(run, 20)
    largest = max(len(content) for content in before)
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, largest // 2))}
    result = call("train", recipe, "--output", run, "--resume", "--set", "train.steps=40", status=2, **limit)
    assert "File too large" in last_line(result) and str(run) in last_line(result)
    assert bits(run, 20) == before
    call("train", recipe, "--output", run, "--resume", "--set", "train.steps=40")
    assert [line["step"] for line in logged(run) if "loss" in line] == list(range(1, 41))


def test_divergence_is_reported(call, recipe, tmp_path):
    wild = ["train.learning_rate=100", "train.weight_decay=100", "train.warmup_steps=0", "train.steps=500"]
    result = call("train", recipe, "--output", tmp_path / "run", *[part for value in wild for part in ("--set", value)], status=2)
    assert "train.learning_rate" in last_line(result)


def test_evaluate_flip_flop(call, recipe, tmp_path):
    run = tmp_path / "run"
    call("train", recipe, "--output", run)
    result = call("evaluate", run, "--sequences", 40)
    values = json.loads(result.stdout)
    assert set(values["reads"]) == {"in_distribution", "sparse", "dense"}
    assert all(0 <= values[name] <= 100 for name in values["reads"])
    assert values["reads"]["dense"] > values["reads"]["in_distribution"] > values["reads"]["sparse"] >= 40
    assert values["run"]["steps"] == 60 and values["run"]["kind"] == "path"
    assert "sparse" in result.stderr
    call("evaluate", run, "--sequences", 40, "--output", tmp_path / "evaluation.json")
    assert json.loads((tmp_path / "evaluation.json").read_text()) == values


def test_evaluate_text(call, recipe, tmp_path):
    for i in range(8):
        (tmp_path / f"{i}.py").write_text(f"value_{i} = {i}\n" * 100)
    run = tmp_path / "run"
    text = ["--set", "data={kind='text', files='%s', extensions='.py', validation_fraction=0.3}" % tmp_path]
    call("train", recipe, "--output", run, *text)
    values = json.loads(call("evaluate", run, "--positions", "0,32,64,512").stdout)
    assert list(values["bits_per_byte"]) == ["0-32", "32-64", "64-512"]
    assert all(0 < value < 9 for value in values["bits_per_byte"].values())
    assert values["training_length"] == 32
    assert "rising" in last_line(call("evaluate", run, "--positions", "64,32", status=2))

    model = run / "checkpoints/step-000060"
    (model / "trainer.json").unlink()
    assert "--recipe" in last_line(call("evaluate", model, status=2))
    same = json.loads(call("evaluate", model, "--positions", "0,32,64,512", "--recipe", recipe, *text).stdout)
    assert same["bits_per_byte"] == values["bits_per_byte"]


def test_two_processes_in_one_run(build, call, recipe, tmp_path):
    run = tmp_path / "run"
    first = subprocess.Popen([build / "pathattn", "--threads", "1", "train", recipe, "--output", run, "--set", "train.steps=100000"], stderr=subprocess.DEVNULL)
    try:
        wait_for_line(run / "metrics.jsonl")
        for resume in ([], ["--resume"]):
            assert "another process is training in" in last_line(call("train", recipe, "--output", run, *resume, status=2))
    finally:
        first.kill()
        first.wait()
    call("train", recipe, "--output", run, "--resume")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_results_that_stdout_does_not_take_are_an_error(build, call, recipe, tmp_path):
    run = tmp_path / "run"
    call("train", recipe, "--output", run)
    for arguments in (["evaluate", run, "--sequences", "1"], ["generate", GOLDEN / "model_path_gate", "--prompt", "A"]):
        with open("/dev/full", "w") as full:
            result = subprocess.run([build / "pathattn", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
        assert result.returncode == 2 and "standard output" in last_line(result)


def run_with_unwritable_log(build, where, *arguments):
    """Exit status of the program whose stderr goes to `where` in the shell's words."""
    command = [build / "pathattn", "--threads", "1", *arguments]
    result = subprocess.run(["sh", "-c", f'exec "$@" {where}', "sh", *command], stdout=subprocess.PIPE, timeout=120)
    return result.returncode


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-"])
def test_a_log_that_cannot_be_written_ends_nothing(build, recipe, tmp_path, where):
    (tmp_path / "sweep.toml").write_text('recipe = "tiny.toml"\n[grid]\ntrain.seed = [1]\n')
    run, swept = tmp_path / "run", tmp_path / "swept"
    finished = [
        ["train", recipe, "--output", run],
        ["train", "--output", run, "--resume"],
        ["evaluate", run, "--sequences", "1"],
        ["generate", GOLDEN / "model_path_gate", "--prompt", "A"],
        ["sweep", tmp_path / "sweep.toml", "--output", swept, "--set", "data.test_reads=20"],
    ]
    for arguments in finished:
        assert run_with_unwritable_log(build, where, *arguments) == 0, arguments
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    assert json.loads((swept / "table.json").read_text())["runs"][0]["status"] == "done"
    for command in ("train", "evaluate", "generate", "sweep"):
        assert run_with_unwritable_log(build, where, command, tmp_path / "none", "--wings") == 2, command


def test_training_goes_on_when_nobody_reads_its_log(build, recipe, tmp_path):
    run = tmp_path / "run"
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([build / "pathattn", "--threads", "1", "train", recipe, "--output", run], stderr=writer, timeout=120)
    os.close(writer)
    assert result.returncode == 0
    assert json.loads((run / "run.json").read_text())["status"] == "finished"


def test_evaluate_looks_at_its_output_first(call, recipe, tmp_path):
    run, short = tmp_path / "run", ["--sequences", 1]
    call("train", recipe, "--output", run, "--set", "train.steps=1")
    (tmp_path / "file").write_text("")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    cases = [(tmp_path, "is a folder"), (f"{tmp_path}/new/", "is a folder"), (tmp_path / "file/out.json", "is not a folder")]
    if not os.access(locked, os.W_OK):  # root may write anywhere
        cases.append((locked / "new/out.json", f"cannot be written into {locked}: Permission denied"))
    for output, message in cases:
        refusal = call("evaluate", run, *short, "--output", output, status=2).stderr
        assert refusal.startswith(f"pathattn: --output {output} ") and message in refusal and len(refusal.splitlines()) == 1
    call("evaluate", run, *short, "--output", tmp_path / "new/folder/out.json")
    assert json.loads((tmp_path / "new/folder/out.json").read_text())["task"] == "flip_flop"


def test_evaluate_prints_its_table_even_if_nothing_can_be_written(build, call, recipe, tmp_path):
    run = tmp_path / "run"
    call("train", recipe, "--output", run, "--set", "train.steps=1")
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))}
    result = call("evaluate", run, "--sequences", 1, "--output", tmp_path / "out.json", status=2, **limit)
    assert "test set          error" in result.stderr and "File too large" in last_line(result)


def test_a_damaged_trainer_file_is_named(call, recipe, tmp_path):
    run = tmp_path / "run"
    call("train", recipe, "--output", run)
    model = run / "checkpoints/step-000060"
    for damaged in ("", "[]", '{"recipe": '):
        (model / "trainer.json").write_text(damaged)
        assert "trainer.json" in last_line(call("evaluate", model, status=2))

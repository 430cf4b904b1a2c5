#!/usr/bin/env python3
"""The demo: PaTH against other position encodings on flip-flop and on real code: demo.py PATHATTN FOLDER [--full]

Trains and evaluates one run after the other with the pathattn program, then writes FOLDER/summary.json, report.png and report.html and prints the
figures and a sample. What is finished is not done again, what was interrupted goes on; a run whose recipe or command changed is started anew.
"""

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python/pathattn"))
from results import STYLES, TEST_SETS, write_json  # noqa: E402  (the path comes first)

RECIPES = {"flip_flop": "recipes/flip-flop.toml", "text": "recipes/text.toml"}
KINDS = {"flip_flop": ["rope", "path"], "text": ["rope", "path_fox"]}
ALL_KINDS = ["rope", "fox", "path", "path_fox"]
STEPS, FULL_STEPS = 300, 600  # of the text runs
PROMPT = "def forward(self, "


def call(command, **options):
    """Runs a command to its end, which after Ctrl-C is when it has saved; stops the demo if it fails. Returns what it printed, if captured."""
    child = subprocess.Popen([str(part) for part in command], encoding="utf-8", errors="replace", **options)
    output = interrupted = None
    while child.returncode is None:
        try:
            output = child.communicate()[0]
        except KeyboardInterrupt:
            interrupted = True
    if interrupted or child.returncode in (130, 143):
        sys.exit("\ndemo: interrupted; the same command goes on from here")
    if child.returncode:
        sys.exit(f"\ndemo: this command failed with status {child.returncode}: {shlex.join(str(part) for part in command)}")
    return output


def read_json(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def train_command(pathattn, folder, task, kind, full):
    command = [pathattn, "train", RECIPES[task], "--output", folder / f"{task}_{kind}", "--set", f"model.kind={kind}"]
    if task == "text":
        torch = Path(importlib.util.find_spec("torch").origin).parent
        torch = torch.relative_to(ROOT) if torch.is_relative_to(ROOT) else torch
        command += ["--set", f"train.steps={FULL_STEPS if full else STEPS}", "--set", f'data.files="{torch}"', "--set", 'data.extensions=".py"']
    return [*command, "--resume"]


def train_and_evaluate(command, pathattn, run):
    """The run's evaluation, reused if neither its command nor its recipe has changed."""
    plan = {"command": shlex.join(str(part) for part in command), "recipe": Path(command[2]).read_text()}
    plan_file, evaluation_file = run.with_suffix(".plan.json"), run / "evaluation.json"
    if run.exists() and read_json(plan_file) != plan:
        print(f"{run} came from another recipe or command: starting it anew")
        shutil.rmtree(run)
    write_json(plan_file, plan)
    finished = read_json(run / "run.json").get("status") == "finished"
    evaluation = read_json(evaluation_file) if finished else {}
    if evaluation:
        print(f"{run} is finished: reusing it")
        return plan["command"], evaluation
    print(plan["command"], flush=True)
    call(command)
    call([pathattn, "evaluate", run, "--output", evaluation_file])
    return plan["command"], json.loads(evaluation_file.read_text())


def result_of(task, command, evaluation):
    """A run's entry in summary.json."""
    run = evaluation["run"]
    entry = {key: run[key] for key in ("seconds", "steps", "tokens", "parameters", "seed", "versions")} | {"commands": [command]}
    if task == "flip_flop":
        return {key: evaluation[key] for key in TEST_SETS} | entry
    return {"bits_per_byte": evaluation["bits_per_byte"], "training_length": evaluation["training_length"]} | entry


def print_table(title, header, rows):
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    print(f"\n{title}")
    for row in [header, *rows]:
        print("  " + "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths))))


def print_results(summary):
    rows = [[STYLES[kind][0], *(f"{run[key]:.2f}" for key in TEST_SETS), f"{run['seconds']:.0f}"] for kind, run in summary["flip_flop"].items()]
    print_table("Flip-flop: error on bits after a read (%)", ["", "in distribution", "sparse", "dense", "seconds"], rows)
    text = summary["text"]
    ranges = list(next(iter(text.values()))["bits_per_byte"])
    length = next(iter(text.values()))["training_length"]
    rows = []
    for kind, run in text.items():
        rows.append([STYLES[kind][0], *(f"{run['bits_per_byte'][positions]:.2f}" for positions in ranges), f"{run['seconds']:.0f}"])
    print_table(f"Python source: bits per byte, by position; trained at {length} bytes", ["", *ranges, "seconds"], rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pathattn", type=Path, help="the pathattn program")
    parser.add_argument("folder", type=Path, help="where runs, summary and report go, for example runs/demo")
    parser.add_argument("--full", action="store_true", help=f"all four kinds, and {FULL_STEPS} instead of {STEPS} steps on text")
    arguments = parser.parse_args()
    folder, pathattn = (Path(os.path.relpath(path.absolute(), ROOT)) for path in (arguments.folder, arguments.pathattn))
    os.chdir(ROOT)
    folder.mkdir(parents=True, exist_ok=True)

    runs = [(task, kind) for task in RECIPES for kind in (ALL_KINDS if arguments.full else KINDS[task])]
    summary = {task: {} for task in RECIPES}
    for number, (task, kind) in enumerate(runs, 1):
        print(f"\n[{number}/{len(runs)}] {task.replace('_', '-')} with {STYLES[kind][0]}", flush=True)
        command = train_command(pathattn, folder, task, kind, arguments.full)
        summary[task][kind] = result_of(task, *train_and_evaluate(command, pathattn, folder / f"{task}_{kind}"))

    command = [pathattn, "generate", folder / "text_path_fox", "--prompt", PROMPT]
    text = call([*command, "--max-new-tokens", "200", "--temperature", "0.7", "--seed", "1"], stdout=subprocess.PIPE)
    summary["sample"] = {"kind": "path_fox", "prompt": PROMPT, "text": text}
    write_json(folder / "summary.json", summary)
    call([sys.executable, "python/pathattn/report.py", folder])

    print_results(summary)
    shown = "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in summary["sample"]["text"])  # no terminal commands
    print(f"\n{STYLES['path_fox'][0]} goes on after {PROMPT!r}:\n{PROMPT}{shown}")
    print(f"\nSee {folder}/report.html, {folder}/report.png and {folder}/summary.json")


if __name__ == "__main__":
    main()

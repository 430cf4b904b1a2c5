"""Gathers the paper's state-tracking results from finished sweeps: state_tracking.py SWEEPS OUTPUT.json PICTURE.png

SWEEPS holds the outputs of `pathattn sweep` for recipes/state-tracking/sweeps: flip_flop/, a5/, a5_long/ and mqrar/, each with its table.json; those
that are not there are left out, and further sweeps of a task (flip_flop-baselines/, a5-second-gpu/) are taken with it. Writes OUTPUT.json (docs/sweeps.md has
the format) and PICTURE.png, and prints tables in Markdown. A program that needs matplotlib and report.py and
results.py beside it, but not the package it lies in.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
from pathlib import Path

from report import ReportError, finish, plt
from results import STYLES, TEST_SETS, write_json

MASTERED = 90  # % of words with the right last state
PAPER_FLIP_FLOP = {"rope": (6.9, 40.3, 0.01), "sba": (9.6, 38.9, 0), "fox": (8.3, 36.3, 0), "path": (0, 0.0001, 0)}  # %, in the order of TEST_SETS


def read_task(sweeps, task):
    """The tables of a task's sweeps as one, the seeds of its runs rising; None if there is none. No run may be done in two of them."""
    whole = {"seconds": 0, "tokens": 0, "side_by_side": 0, "runs": []}
    folder_of = {}  # by the fields of a done run
    paths = sorted([*sweeps.glob(f"{task}/table.json"), *sweeps.glob(f"{task}-*/table.json")])
    for path in paths:
        try:
            table = json.loads(path.read_text())
            for key in ("seconds", "tokens"):
                whole[key] += table.get(key, 0)
            whole["side_by_side"] = max(whole["side_by_side"], table.get("side_by_side", 0))
            whole["runs"] = sorted(whole["runs"] + table["runs"], key=lambda run: run["fields"]["train.seed"])
            done = [json.dumps(run["fields"], sort_keys=True) for run in table["runs"] if run["status"] == "done"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ReportError(f"{path} is damaged ({error!r}): run the sweep again, which writes it anew") from None
        for fields in done:
            if fields in folder_of:
                raise ReportError(f"{folder_of[fields]} and {path.parent} both have the run {fields}: move one of the two out of {sweeps}")
            folder_of[fields] = path.parent
    return whole if paths else None


def done_runs(table):
    """(kind, seed, fields, evaluation) of the runs with results, kinds in the order of STYLES, seeds rising."""
    for kind in STYLES:
        for run in table["runs"]:
            if run["status"] == "done" and run["fields"]["model.kind"] == kind:
                yield kind, run["fields"]["train.seed"], run["fields"], run["evaluation"]


def gather_flip_flop(table):
    result = {}
    for kind, seed, _, evaluation in done_runs(table):
        result.setdefault(kind, []).append({"seed": seed} | {name: evaluation[name] for name in TEST_SETS} | {"reads": evaluation["reads"]})
    return result


def gather_by(table, field, value_of):
    """{kind: {value of the field: (list by seed of what value_of makes of an evaluation)}}, values of the field rising."""
    result = {}
    for kind, _, fields, evaluation in sorted(done_runs(table), key=lambda run: run[2][field]):
        result.setdefault(kind, {}).setdefault(fields[field], []).append(value_of(evaluation))
    return {kind: result[kind] for kind in STYLES if kind in result}


def fewest_layers(by_layers, length, summary):
    """Fewest layers whose accuracy, `summary` of those of the seeds, is above MASTERED; None if none of those trained is."""
    return next((layers for layers, runs in by_layers.items() if summary([run[length] for run in runs]) > MASTERED), None)


def gather_a5(table):
    result = {}
    for kind, by_layers in gather_by(table, "model.num_layers", lambda evaluation: evaluation["accuracy"]).items():
        lengths = sorted(set.intersection(*(set(run) for runs in by_layers.values() for run in runs)), key=int)
        result[kind] = {
            "fewest_layers": {length: fewest_layers(by_layers, length, max) for length in lengths},
            "fewest_layers_of_mean": {length: fewest_layers(by_layers, length, statistics.mean) for length in lengths},
            "accuracy": {layers: {length: [run[length] for run in runs] for length in lengths} for layers, runs in by_layers.items()},
        }
    return result


def longest_word(accuracy, seed):
    """The length up to which a run has over MASTERED % of the words of every length right; accuracy: {length: list by seed}."""
    mastered = itertools.takewhile(lambda length: accuracy[length][seed] > MASTERED, sorted(accuracy, key=int))
    return max((int(length) for length in mastered), default=0)


def gather_a5_long(table):
    result = {}
    for kind, figures in gather_a5(table).items():
        (accuracy,) = figures["accuracy"].values()  # of the one number of layers
        num_seeds = len(next(iter(accuracy.values())))
        result[kind] = {"accuracy": accuracy, "longest_word": [longest_word(accuracy, seed) for seed in range(num_seeds)]}
    return result


def gather_mqrar(table):
    return {kind: {"accuracy": by_n} for kind, by_n in gather_by(table, "data.n_back", lambda evaluation: evaluation["accuracy"]).items()}


def costs(table):
    """What a sweep took and with which build."""
    trainings = [run["training"] for run in table["runs"] if run["status"] == "done"]
    commits = sorted({training["versions"]["commit"] for training in trainings})
    counts = {status: sum(run["status"] == status for run in table["runs"]) for status in ("done", "failed", "unfinished", "waiting")}
    keys = ("seconds", "tokens", "side_by_side")
    return {key: table[key] for key in keys} | {"devices": sorted({training["device"] for training in trainings}), "commits": commits, "runs": counts}


def spread(values):
    """Mean of each list, and its distances to the lowest and the highest, as matplotlib's yerr wants them."""
    means = [statistics.mean(group) for group in values]
    return means, [[mean - min(group) for mean, group in zip(means, values)], [max(group) - mean for mean, group in zip(means, values)]]


def draw_flip_flop(axes, result):
    width = 0.8 / len(result)
    for number, (kind, runs) in enumerate(result.items()):
        name, colour, _, _, hatch = STYLES[kind]
        x = [place + (number - (len(result) - 1) / 2) * width for place in range(len(TEST_SETS))]
        means, errors = spread([[run[test_set] for run in runs] for test_set in TEST_SETS])
        axes.bar(x, means, 0.9 * width, yerr=errors, capsize=2, label=name, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
    axes.set_xticks(range(len(TEST_SETS)), TEST_SETS.values())
    axes.legend(frameon=False)
    finish(axes, "Flip-flop: mean of the seeds, and their range", "test set", "error on bits after a read (%)")


def draw_a5(axes, result):
    for number, (kind, figures) in enumerate(result.items()):
        name, colour, marker, line, _ = STYLES[kind]
        shift = 0.06 * (number - (len(result) - 1) / 2)  # so that equal numbers do not hide each other
        reached = [(int(length), layers + shift) for length, layers in figures["fewest_layers"].items() if layers is not None]
        axes.plot(*zip(*reached) if reached else ([], []), linestyle=line, marker=marker, color=colour, label=name)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    finish(axes, f"A5 words: fewest layers with over {MASTERED} % in the best seed", "length of the word (elements)", "layers")


def draw_a5_long(axes, result):
    for kind, figures in result.items():
        name, colour, marker, line, _ = STYLES[kind]
        lengths, by_length = zip(*figures["accuracy"].items())
        lengths = [int(length) for length in lengths]
        for of_seed in zip(*by_length):
            axes.plot(lengths, of_seed, linestyle=line, linewidth=0.7, color=colour, alpha=0.5)
        axes.plot(lengths, [statistics.mean(group) for group in by_length], linestyle=line, marker=marker, color=colour, label=name)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(0, 103)
    axes.legend(frameon=False)
    title = "A5, three layers, more steps: mean (thick), each seed (thin)"
    finish(axes, title, "length of the word (elements)", "words with the right last state (%)")


def draw_mqrar(axes, result):
    for kind, figures in result.items():
        name, colour, marker, line, _ = STYLES[kind]
        means, errors = spread(figures["accuracy"].values())
        axes.errorbar(list(figures["accuracy"]), means, yerr=errors, capsize=3, linestyle=line, marker=marker, color=colour, label=name)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(0, 103)
    axes.legend(frameon=False)
    finish(axes, "MQRAR-N: mean of the seeds, and their range", "N (occurrences back)", "recalls that are right (%)")


TASKS = {
    "flip_flop": (gather_flip_flop, draw_flip_flop),
    "a5": (gather_a5, draw_a5),
    "a5_long": (gather_a5_long, draw_a5_long),
    "mqrar": (gather_mqrar, draw_mqrar),
}


def draw(results, path):
    columns = min(len(results), 2)
    rows = math.ceil(len(results) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(6.4 * columns, 4.3 * rows), layout="constrained", squeeze=False)
    for axis, (task, result) in itertools.zip_longest(axes.flat, results.items(), fillvalue=(None, None)):
        if task is None:
            axis.remove()
        else:
            TASKS[task][1](axis, result)
    figure.savefig(path, format="png", dpi=130)
    plt.close(figure)


def print_table(title, header, rows):
    print(f"\n{title}\n\n| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def best_and_mean(values, best):
    return f"{best(values):.4g} / {statistics.mean(values):.4g}"


def print_tables(results):
    if flip_flop := results.get("flip_flop"):
        rows = []
        for kind, runs in flip_flop.items():
            paper = [f" ({number})" for number in PAPER_FLIP_FLOP[kind]] if kind in PAPER_FLIP_FLOP else [""] * len(TEST_SETS)
            cells = [best_and_mean([run[name] for run in runs], min) + number for name, number in zip(TEST_SETS, paper)]
            rows.append([STYLES[kind][0], str(len(runs)), *cells])
        print_table("Flip-flop, error in %: best / mean of the seeds (the paper's)", ["", "seeds", *TEST_SETS], rows)
    if a5 := results.get("a5"):
        lengths = sorted({length for figures in a5.values() for length in figures["fewest_layers"]}, key=int)
        for key, words in (("fewest_layers", "the best seed"), ("fewest_layers_of_mean", "the seeds' mean")):
            rows = [[STYLES[kind][0], *(str(figures[key].get(n) or "–") for n in lengths)] for kind, figures in a5.items()]
            print_table(f"A5, fewest layers with over {MASTERED} % in {words}, by length", ["", *lengths], rows)
    if a5_long := results.get("a5_long"):
        lengths = sorted({length for figures in a5_long.values() for length in figures["accuracy"]}, key=int)
        rows = []
        for kind, figures in a5_long.items():
            cells = [f"{statistics.mean(figures['accuracy'][n]):.3g}" if n in figures["accuracy"] else "" for n in lengths]
            rows.append([STYLES[kind][0], ", ".join(map(str, figures["longest_word"])), *cells])
        print_table("A5 in three times as many steps: longest word of each seed, mean accuracy in % by length", ["", "longest", *lengths], rows)
    if mqrar := results.get("mqrar"):
        columns = sorted({n for figures in mqrar.values() for n in figures["accuracy"]})
        rows = []
        for kind, figures in mqrar.items():
            rows.append([STYLES[kind][0], *(best_and_mean(figures["accuracy"][n], max) if n in figures["accuracy"] else "" for n in columns)])
        print_table("MQRAR-N, accuracy in %: best / mean of the seeds", ["", *(f"N = {n}" for n in columns)], rows)


def write_results(sweeps, output, picture):
    tables = {task: table for task in TASKS if (table := read_task(sweeps, task))}
    try:
        results = {task: result for task, table in tables.items() if (result := TASKS[task][0](table))}
        summary = results | {"sweeps": {task: costs(tables[task]) for task in results}}
    except (KeyError, TypeError, AttributeError) as error:
        raise ReportError(f"a table.json in {sweeps} is not that of its sweep in recipes/state-tracking/sweeps: {error!r}") from None
    if not results:
        raise ReportError(f"{sweeps} has no finished run in flip_flop/, a5/, a5_long/ or mqrar/: run `pathattn sweep` with such an --output first")
    try:
        for path in (output, picture):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json(output, summary)
        draw(results, picture)
    except OSError as error:
        raise ReportError(f"{error.filename} cannot be written ({error.strerror}): name another place for it") from None
    print_tables(results)


def main():
    parser = argparse.ArgumentParser(description="Gathers the state-tracking sweeps' results as JSON, a picture and tables.")
    parser.add_argument("sweeps", type=Path, help="folder with the sweeps flip_flop, a5, a5_long and mqrar, for example runs/state-tracking")
    parser.add_argument("output", type=Path, help="for example docs/results/state-tracking.json")
    parser.add_argument("picture", type=Path, help="for example docs/images/state-tracking.png")
    arguments = parser.parse_args()
    try:
        write_results(arguments.sweeps, arguments.output, arguments.picture)
    except ReportError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

"""Draws a demo folder from its files alone: report.py FOLDER

Reads FOLDER/summary.json (written by scripts/demo.py; docs/training.md has the format) and each run's metrics.jsonl;
writes FOLDER/report.png and FOLDER/report.html, which needs no other file. A program that needs matplotlib and results.py beside it, but not
the package it lies in.
"""

import argparse
import base64
import html
import io
import json
import math
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  (the backend comes first)
from matplotlib.ticker import FixedLocator, NullLocator  # noqa: E402
from results import STYLES, TEST_SETS  # noqa: E402

TASKS = {"flip_flop": "Flip-flop language", "text": "Python source, bytes"}
FLIP_FLOP_EXPLAINED = "A word writes, reads and ignores bits; after a read the model must give the bit last written. Chance is 50 %."
POSITIONS_EXPLAINED = "How well the next byte is predicted, lower being better; whoever cannot read past the training length gets worse to the right."


class ReportError(Exception):
    """What is wrong with which file, in one sentence."""


def read_summary(folder):
    path = folder / "summary.json"
    try:
        summary = json.loads(path.read_text())
    except OSError as error:
        raise ReportError(f"{path} cannot be read ({error.strerror}): run `make demo` first") from None
    except ValueError as error:
        raise ReportError(f"{path} is damaged ({error}): remove it and run `make demo` again") from None
    if not isinstance(summary, dict) or not any(summary.get(task) for task in TASKS):
        raise ReportError(f"{path} has neither flip_flop nor text results: run `make demo` again")
    return summary


def runs_of(summary, task):
    """(kind, run) in the order of STYLES."""
    return [(kind, summary[task][kind]) for kind in STYLES if kind in summary.get(task, {})]


def read_losses(folder, task, kind):
    """Steps and training losses of a run; empty if it left no metrics. A line cut short by a kill is passed over."""
    path = folder / f"{task}_{kind}" / "metrics.jsonl"
    steps, losses = [], []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if "loss" in record:
            steps.append(record["step"])
            losses.append(record["loss"])
    return steps, losses


def running_mean(values, share=0.05):
    """Mean of each value and its neighbours, over `share` of the curve."""
    half = int(len(values) * share / 2)
    return [sum(values[max(0, i - half) : i + half + 1]) / len(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def finish(axes, title, x, y):
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y", color="0.88")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_flip_flop(axes, summary, _folder):
    runs = runs_of(summary, "flip_flop")
    width = 0.8 / len(runs)
    highest = max(run[test_set] for _, run in runs for test_set in TEST_SETS)
    for number, (kind, run) in enumerate(runs):
        name, colour, _, _, hatch = STYLES[kind]
        x = [place + (number - (len(runs) - 1) / 2) * width for place in range(len(TEST_SETS))]
        errors = [run[test_set] for test_set in TEST_SETS]
        bars = axes.bar(x, errors, 0.9 * width, label=name, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
        axes.bar_label(bars, [f"{error:.2g}" if error < 10 else f"{error:.0f}" for error in errors], padding=2, fontsize=9)
    axes.set_xticks(range(len(TEST_SETS)), TEST_SETS.values())
    axes.set_ylim(0, max(1.3 * highest, 1))  # room for the legend above the bars
    axes.legend(frameon=False, loc="upper center", ncols=len(runs))
    finish(axes, "State tracking: flip-flop language", "test set", "error on bits after a read (%)")


def draw_positions(axes, summary, _folder):
    runs = runs_of(summary, "text")
    edges = set()
    for kind, run in runs:
        name, colour, marker, line, _ = STYLES[kind]
        ranges = sorted(tuple(int(edge) for edge in text.split("-")) for text in run["bits_per_byte"])
        edges.update(edge for pair in ranges for edge in pair)
        middles = [math.sqrt(max(low, 1) * high) for low, high in ranges]
        bits = [run["bits_per_byte"][f"{low}-{high}"] for low, high in ranges]
        axes.plot(middles, bits, linestyle=line, marker=marker, color=colour, label=name, linewidth=2)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(edges)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(edge) for edge in sorted(edges)])
    axes.set_xlim(0.95 * min(edges), 1.05 * max(edges))
    axes.set_ylim(bottom=0, top=1.25 * axes.get_ylim()[1])
    length = runs[0][1]["training_length"]
    axes.axvline(length, color="0.4", linewidth=1, linestyle=(0, (6, 3)))
    axes.annotate("trained up to here ", (length, axes.get_ylim()[1]), ha="right", va="top", rotation=90, color="0.3", fontsize=9)
    axes.legend(frameon=False, loc="upper right", ncols=2)
    finish(axes, "Reading past the training length: Python source", "position in the window (bytes)", "bits per byte")


def draw_training(task, unit, scale):
    """A function that draws the training losses of a task, times `scale`."""

    def draw(axes, summary, folder):
        for kind, _ in runs_of(summary, task):
            name, colour, marker, line, _ = STYLES[kind]
            steps, losses = read_losses(folder, task, kind)
            if steps:
                smooth = running_mean([loss * scale for loss in losses])
                axes.plot(steps, smooth, linestyle=line, color=colour, label=name, marker=marker, markevery=0.125, markersize=5)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
        finish(axes, f"Training: {TASKS[task]}", "step", unit)

    return draw


def panels(summary):
    """(draw function, what a reader who cannot see it should know) of each part of the picture that has data."""
    drawn = []
    if summary.get("flip_flop"):
        drawn.append((draw_flip_flop, "Bars: error on the three flip-flop test sets for each kind of attention"))
    if summary.get("text"):
        drawn.append((draw_positions, "Lines: bits per byte against position for each kind of attention"))
    if summary.get("flip_flop"):
        drawn.append((draw_training("flip_flop", "loss (nats per bit read)", 1), "Lines: training loss on flip-flop against step"))
    if summary.get("text"):
        drawn.append((draw_training("text", "loss (bits per byte)", 1 / math.log(2)), "Lines: training loss on text against step"))
    return drawn


def draw_png(draws, summary, folder, columns):
    """The panels as one PNG, `columns` beside each other."""
    rows = math.ceil(len(draws) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(6.4 * columns, 4.1 * rows), layout="constrained", squeeze=False)
    for axis, draw in zip(axes.flat, draws):
        draw(axis, summary, folder)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    plt.close(figure)
    return buffer.getvalue()


STYLE_SHEET = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
img { width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; font-size: .85rem; } .sample { white-space: pre-wrap; overflow-wrap: anywhere; }
"""


def html_table(header, rows):
    def row(cells, tag):
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return f'<div class="wide"><table>{row(header, "th")}{"".join(row(cells, "td") for cells in rows)}</table></div>'


def html_figures(summary):
    """The tables of results and of what each run cost."""
    parts = []
    if summary.get("flip_flop"):
        rows = [[STYLES[kind][0], *(f"{run[test_set]:.2f}" for test_set in TEST_SETS)] for kind, run in runs_of(summary, "flip_flop")]
        header = ["attention", "in distribution", "sparse", "dense"]
        parts += ["<h2>Flip-flop: error on bits after a read (%)</h2>", f"<p>{FLIP_FLOP_EXPLAINED}</p>", html_table(header, rows)]
    if summary.get("text"):
        runs = runs_of(summary, "text")
        ranges = sorted({text for _, run in runs for text in run["bits_per_byte"]}, key=lambda text: int(text.split("-")[0]))
        rows = []
        for kind, run in runs:
            bits = run["bits_per_byte"]
            rows.append([STYLES[kind][0], *(f"{bits[text]:.3f}" if text in bits else "" for text in ranges)])
        length = runs[0][1]["training_length"]
        title = f"Python source: bits per byte, by position; trained at {length} bytes"
        parts += [f"<h2>{title}</h2>", f"<p>{POSITIONS_EXPLAINED}</p>", html_table(["attention", *ranges], rows)]
    rows = [
        [f"{TASKS[task]}, {STYLES[kind][0]}", *(f"{run[key]:,.0f}" for key in ("parameters", "steps", "tokens", "seconds")), run["seed"]]
        for task in TASKS
        for kind, run in runs_of(summary, task)
    ]
    parts += ["<h2>Runs</h2>", html_table(["run", "parameters", "steps", "tokens", "seconds", "seed"], rows)]
    return parts


def write_report(folder):
    """Writes report.png and report.html into `folder`; ReportError says what is missing."""
    summary = read_summary(folder)
    drawn = panels(summary)
    (folder / "report.png").write_bytes(draw_png([draw for draw, _ in drawn], summary, folder, columns=2))
    pictures = [
        f'<img alt="{html.escape(words)}" src="data:image/png;base64,{base64.b64encode(draw_png([draw], summary, folder, columns=1)).decode()}">'
        for draw, words in drawn
    ]
    parts = ["<h1>PaTH attention: what the demo measured</h1>", f'<div class="pictures">{"".join(pictures)}</div>', *html_figures(summary)]
    sample = summary.get("sample")
    if sample:
        name = STYLES[sample["kind"]][0]
        text = f"<b>{html.escape(sample['prompt'])}</b>{html.escape(sample['text'])}"
        parts += [f"<h2>A sample: {name} goes on after the bold prompt</h2>", f'<pre class="sample">{text}</pre>']
    runs = [run for task in TASKS for _, run in runs_of(summary, task)]
    commands = [command for run in runs for command in run.get("commands", [])]
    if commands:
        parts += ["<h2>Commands</h2>", f"<pre>{html.escape(chr(10).join(commands))}</pre>"]
    versions = {f"{name} {version}" for run in runs for name, version in run.get("versions", {}).items()}
    parts.append(f"<p>Versions: {html.escape(', '.join(sorted(versions)))}</p>")
    (folder / "report.html").write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>PaTH attention: demo</title><style>{STYLE_SHEET}</style></head>\n<body>{chr(10).join(parts)}</body></html>\n",
        encoding="utf-8",
    )


def main():
    parser = argparse.ArgumentParser(description="Draws report.png and report.html of a demo folder from its summary.json and metrics files.")
    parser.add_argument("folder", type=Path, help="for example runs/demo")
    try:
        write_report(parser.parse_args().folder)
    except ReportError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

"""The report of a demo folder, drawn from made-up figures."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "python/pathattn/report.py"
RUN = {"seconds": 93.2, "steps": 300, "tokens": 2457600, "parameters": 49792, "seed": 1}
RUN |= {"versions": {"torch": "2.11.0"}, "commands": ["pathattn train <recipe>"]}
TEXT = {"bits_per_byte": {"128-256": 1.7, "256-512": 1.71, "1536-2048": 1.8}, "training_length": 256}


def summary():
    return {
        "flip_flop": {
            "path": {"in_distribution": 0.0, "sparse": 0.04, "dense": 0.0} | RUN,
            "rope": {"in_distribution": 22.1, "sparse": 41.3, "dense": 0.8} | RUN,
        },
        "text": {"path_fox": TEXT | RUN, "rope": TEXT | {"bits_per_byte": {"128-256": 1.8, "256-512": 2.5, "1536-2048": 5.3}} | RUN},
        "sample": {"kind": "path_fox", "prompt": "def f", "text": "(x): return x < 1 & y\n"},
    }


def report(folder, content):
    (folder / "summary.json").write_text(content)
    return subprocess.run([sys.executable, REPORT, folder], capture_output=True, text=True)


def test_picture_and_page_are_written(tmp_path):
    for run in ("flip_flop_path", "text_rope"):
        (tmp_path / run).mkdir()
        lines = '{"step": 1, "loss": 0.7}\n{"step": 2, "validation_loss": 0.5}\n{"step": 2, "loss": 0.6}\n{"step": 3, "lo'
        (tmp_path / run / "metrics.jsonl").write_text(lines)
    result = report(tmp_path, json.dumps(summary()))
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    for figure in ("0.04", "41.30", "5.300", "1.700", "49,792", "PaTH-FoX", "torch 2.11.0", "trained at 256 bytes"):
        assert figure in page, figure
    assert "(x): return x &lt; 1 &amp; y" in page and "&lt;recipe&gt;" in page
    assert page.count("data:image/png;base64,") == 4
    assert not re.search(r'(src|href)="(?!data:)', page) and "url(" not in page  # nothing is loaded from elsewhere


@pytest.mark.parametrize("task, num_pictures", [("flip_flop", 2), ("text", 2)])
def test_one_task_alone_is_drawn(tmp_path, task, num_pictures):
    assert report(tmp_path, json.dumps({task: summary()[task]})).returncode == 0
    assert (tmp_path / "report.html").read_text().count("data:image/png;base64,") == num_pictures


@pytest.mark.parametrize(
    "content, complaint", [('{"flip_flop": {', "summary.json is damaged"), ("{}", "has neither flip_flop nor text results"), ("[]", "has neither")]
)
def test_a_damaged_summary_gives_one_clear_line(tmp_path, content, complaint):
    result = report(tmp_path, content)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ") and complaint in result.stderr and result.stderr.count("\n") == 1


def test_a_missing_summary_gives_one_clear_line(tmp_path):
    result = subprocess.run([sys.executable, REPORT, tmp_path], capture_output=True, text=True)
    assert result.returncode == 1 and "run `make demo` first" in result.stderr and result.stderr.count("\n") == 1

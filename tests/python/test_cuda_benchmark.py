"""What benchmarks/attention_cuda.py does besides timing, which needs no GPU: limits, the check of results, tables and the chart."""

import importlib
import math
import time

import pytest
import torch
from conftest import ROOT


@pytest.fixture
def benchmark(monkeypatch):
    """The benchmark on the CPU, with no clock: every call takes 2 ms and 3 MiB."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("attention_cuda")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    for name, value in (("median_ms", 2), ("peak_mib", 3)):
        monkeypatch.setattr(module, name, lambda call, value=value: call() or value)
    return module


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        for _ in range(1000):
            time.sleep(0.01)
        return dx


def line_of(benchmark, name, attention, case=(2, 70, 4, 2, 16), limit_s=60):
    inputs, d_o = benchmark.make_inputs(*case)
    line = benchmark.measure(name, attention, {x: inputs[x] for x in benchmark.TAKES[name]}, d_o, limit_s)
    return {"name": name, "B,T,HQ,H,D": case} | line


def test_right_results_are_timed(benchmark):
    line = line_of(benchmark, "pathattn_path_fox", benchmark.find_attention("pathattn_path_fox"))
    assert list(line["relative_errors"]) == ["o", "dq", "dk", "dv", "dw", "dbeta", "dg"]
    assert all(0 < error < 2.8e-3 for error in line["relative_errors"].values())
    assert {name: line[name] for name in ("fwd_ms", "fwd_peak_mib", "fwd_bwd_ms", "fwd_bwd_peak_mib")} == dict(
        fwd_ms=2, fwd_peak_mib=3, fwd_bwd_ms=2, fwd_bwd_peak_mib=3
    )


@pytest.mark.parametrize("factor, message", [(1.01, "beyond the tolerance"), (math.inf, "not finite")])
def test_wrong_results_of_ours_are_not_timed(benchmark, factor, message):
    path_attention = benchmark.find_attention("pathattn_path")

    def scale_last_row(**tensors):
        o = path_attention(**tensors)
        return torch.cat([o[:-1], factor * o[-1:]])

    line = line_of(benchmark, "pathattn_path", scale_last_row)
    assert message in line["error"] and "fwd_ms" not in line
    if factor == 1.01:  # a peer's errors are reported, and it is timed
        line = line_of(benchmark, "fla_path", scale_last_row)
        assert line["relative_errors"]["o"] > 9e-3 and line["fwd_bwd_ms"] == 2


def test_a_peer_that_fails_or_takes_too_long_ends_alone(benchmark):
    def fail(**tensors):
        raise RuntimeError("no such kernel")

    assert line_of(benchmark, "sdpa_cudnn", fail)["error"] == "RuntimeError: no such kernel"
    line = line_of(benchmark, "sdpa_flash2", lambda q, k, v: SlowBackward.apply(q), limit_s=0.3)
    assert line["error"] == "TimeoutError: stopped after 0.3 s" and line["fwd_ms"] == 2 and "fwd_bwd_ms" not in line


def test_tables_and_chart_have_room_for_gaps(benchmark, capsys, tmp_path):
    whole, half = benchmark.STANDING_CASES[:2]
    lines = [
        {"name": "sdpa_cudnn", "B,T,HQ,H,D": whole, "fwd_ms": 4.0, "fwd_bwd_ms": 8.0, "fwd_bwd_peak_mib": 10.0},
        {"name": "pathattn_path", "B,T,HQ,H,D": whole, "fwd_ms": 6.0, "fwd_bwd_ms": 10.0, "fwd_bwd_peak_mib": 15.0},
        {"name": "sdpa_cudnn", "B,T,HQ,H,D": half, "error": "out of memory"},
        {"name": "pathattn_path", "B,T,HQ,H,D": half, "fwd_ms": 5.0},
    ]
    benchmark.print_table(lines, "fwd_ms")
    rows = capsys.readouterr().out.split("\n")
    assert rows[3].split()[-2:] == ["4.000", "1.500"] and rows[4].split()[-2:] == ["nan", "nan"]
    benchmark.draw(lines, "title", tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 1000

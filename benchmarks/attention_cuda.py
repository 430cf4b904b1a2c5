#!/usr/bin/env python3
"""Times PaTH attention on a CUDA device against cuDNN's and FlashAttention's causal attention and the public kernels: attention_cuda.py

One process, bfloat16, the same tensors for all. The public kernels (flash-linear-attention, where it is installed) come after all the rest, since a
crash of theirs ends the process. What is ours is timed only if o and every gradient, of the last batch row's last key head, are within TOLERANCE of
the portable float32 kernels'; otherwise the exit status is 1. Prints each JSON line once it is measured, then tables; writes OUTPUT.jsonl and
OUTPUT.png. A line has
  name, "B,T,HQ,H,D"; fwd_ms, fwd_bwd_ms: medians of CUDA-event times; fwd_peak_mib, fwd_bwd_peak_mib: peak memory above the inputs;
  relative_errors: Frobenius, against float32, of what has w or a gate; error: why there is no more.
The figures in docs/results: attention_cuda.py --output docs/results/attention-h200
"""

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import itertools
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(os.environ.get("PATHATTN_BUILD", ROOT / "build/release")) / "python"))

import pathattn  # noqa: E402  from the build folder

STANDING_CASES = [  # B, T, HQ, H, D
    (32, 2048, 32, 32, 64),
    (8, 8192, 32, 32, 64),
    (16, 4096, 16, 16, 128),
    (4, 16384, 16, 16, 128),
    (1, 65536, 16, 16, 128),
    (1, 65536, 32, 32, 64),
    (4, 16384, 32, 8, 128),
]
LONGEST_CASE = (1, 262144, 16, 16, 128)
WIDTH_CASES = [(1, 8192, 32, 32, 64), (1, 8192, 16, 16, 128), (1, 8192, 8, 8, 256)]  # the same width of all heads together
TOLERANCE = {"o": 1.9e-3, "dq": 2.8e-3, "dk": 2.8e-3, "dv": 2.8e-3, "dw": 3e-3, "dbeta": 4e-3, "dg": 4e-3}  # bfloat16's own rounding: 1.66e-3
REFERENCE = "sdpa_cudnn"
PLAIN, GATED, ROTATED = ("q", "k", "v"), ("q", "k", "v", "g"), ("q", "k", "v", "w", "beta")
ALL = (*ROTATED, "g")
TAKES = {  # what each attention is given
    REFERENCE: PLAIN,
    "sdpa_flash2": PLAIN,
    "pathattn_path": ROTATED,
    "pathattn_path_fox": ALL,
    "pathattn_fox": GATED,
    "fla_fox": GATED,
    "fla_path": ROTATED,
    "fla_path_fox": ALL,
}
DEVICE = "cuda"


def make_inputs(B, T, HQ, H, D):
    random = torch.Generator(device=DEVICE).manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, device=DEVICE, generator=random)

    inputs = {"q": normal(B, T, HQ, D).bfloat16(), "k": normal(B, T, H, D).bfloat16(), "v": normal(B, T, H, D).bfloat16()}
    inputs["w"] = F.normalize(normal(B, T, H, D), dim=-1)
    inputs["beta"] = 2 * torch.rand(B, T, H, device=DEVICE, generator=random)
    inputs["g"] = F.logsigmoid(normal(B, T, HQ) + 4)
    return {name: x.requires_grad_() for name, x in inputs.items()}, normal(B, T, HQ, D).bfloat16()


def torch_attention(backend, q, k, v):
    with sdpa_kernel(backend):
        o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=q.shape[2] != k.shape[2])
    return o.transpose(1, 2)


def find_attention(name):
    """A function of the tensors that TAKES names, as keywords. Raises ImportError where its package is not installed."""
    if name == REFERENCE:
        return lambda **tensors: torch_attention(SDPBackend.CUDNN_ATTENTION, **tensors)
    if name == "sdpa_flash2":
        return lambda **tensors: torch_attention(SDPBackend.FLASH_ATTENTION, **tensors)
    if name.startswith("pathattn"):
        return pathattn.path_attention
    if name == "fla_fox":
        from fla.ops.forgetting_attn import parallel_forgetting_attn

        return parallel_forgetting_attn
    from fla.ops.path_attn.parallel import parallel_path_attn

    return lambda **tensors: parallel_path_attn(**tensors)[0]


@contextlib.contextmanager
def time_limit(seconds):
    """TimeoutError in the body after `seconds`. Backward runs on this thread, or the signal would wait for its end."""

    def stop(signum, frame):
        raise TimeoutError(f"stopped after {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def results_and_gradients(attention, inputs, d_o):
    o = attention(**inputs)
    gradients = torch.autograd.grad(o, list(inputs.values()), d_o)
    return {"o": o.detach()} | {"d" + name: x for name, x in zip(inputs, gradients)}


def last_head(tensors, group):
    """Of the last batch row: the last key head, and its group of query heads."""
    return {name: x[-1:, :, -group if name in ("q", "g", "o", "dq", "dg") else -1 :].detach() for name, x in tensors.items()}


def relative_errors(attention, inputs, d_o):
    group = inputs["q"].shape[2] // inputs["k"].shape[2]
    actual = results_and_gradients(attention, inputs, d_o)
    for name, x in actual.items():
        if not x.isfinite().all():
            raise ArithmeticError(f"{name} is not finite everywhere")
    actual = last_head(actual, group)
    exact = {name: x.float().requires_grad_() for name, x in last_head(inputs, group).items()}
    expected = results_and_gradients(pathattn.path_attention, exact, d_o[-1:, :, -group:].float())
    return {name: float(f"{((x.float() - expected[name]).norm() / expected[name].norm()).item():.2e}") for name, x in actual.items()}


def median_ms(call):
    """Of 3 to 30 calls, half a second's worth, after a fifth of a second of others: clocks rise from idle, and some kernels tune themselves."""
    start, num_calls = time.monotonic(), 0
    while num_calls < 2 or time.monotonic() - start < 0.2:
        call()
        torch.cuda.synchronize()
        num_calls += 1
    times = []
    while len(times) < 3 or (len(times) < 30 and sum(times) < 500):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return round(statistics.median(times), 4)


def peak_mib(call):
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def measure(name, attention, inputs, d_o, limit_s):
    """The line of one attention of one case, less its name and case; `error` tells what ended it."""

    def forward():
        with torch.no_grad():
            attention(**inputs)

    def both():
        torch.autograd.grad(attention(**inputs), list(inputs.values()), d_o)

    line = {}
    try:
        with time_limit(limit_s):
            if TAKES[name] != PLAIN:
                line["relative_errors"] = relative_errors(attention, inputs, d_o)
                beyond = [result for result, error in line["relative_errors"].items() if not error <= TOLERANCE[result]]
                if beyond and name.startswith("pathattn"):
                    return line | {"error": f"not timed: {', '.join(beyond)} beyond the tolerance"}
            line |= {"fwd_ms": median_ms(forward), "fwd_peak_mib": peak_mib(forward)}
            line |= {"fwd_bwd_ms": median_ms(both), "fwd_bwd_peak_mib": peak_mib(both)}
    except Exception as error:  # of any kind: a peer that cannot run a case is a result too
        line["error"] = f"{type(error).__name__}: {error}"[:300]
    return line


def of_case(lines, case, key):
    return {line["name"]: line[key] for line in lines if tuple(line["B,T,HQ,H,D"]) == case and key in line}


def print_table(lines, key):
    names = [name for name in TAKES if name != REFERENCE and any(line["name"] == name for line in lines)]
    print(f"\n{key}, times {REFERENCE}'s\n{'B, T, HQ, H, D':<26}{REFERENCE:>14}" + "".join(f"{name:>19}" for name in names))
    for case in dict.fromkeys(tuple(line["B,T,HQ,H,D"]) for line in lines):
        values = of_case(lines, case, key)
        reference = values.get(REFERENCE, float("nan"))
        ratios = "".join(f"{values[name] / reference:>19.3f}" if name in values else f"{'-':>19}" for name in names)
        print(f"{', '.join(map(str, case)):<26}{reference:>14.3f}{ratios}")


def draw(lines, title, path):
    """Times, ratios and memory against T: a column a head size, of the standing cases that have 65536 tokens and as many key heads as query heads."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    times = f"times {REFERENCE}'s"
    rows = [("fwd_ms", "forward, ms"), ("fwd_ms", f"forward,\n{times}"), ("fwd_bwd_ms", "forward and backward, ms")]
    rows += [("fwd_bwd_ms", f"forward and backward,\n{times}"), ("fwd_bwd_peak_mib", "peak memory, MiB")]
    figure, panels = pyplot.subplots(len(rows), 2, figsize=(11, 13), layout="constrained", sharex="col", squeeze=False)
    for column, width in enumerate((64, 128)):
        cases = sorted((case for case in STANDING_CASES if case[4] == width and case[2] == case[3]), key=lambda case: case[1])
        for panel, (key, label) in zip(panels[:, column], rows):
            for name, marker in zip(TAKES, "os^Dv<>P"):
                points = []
                for case in cases:
                    values = of_case(lines, case, key)
                    unit = values.get(REFERENCE) if times in label else 1
                    if name in values and unit:
                        points.append((case[1], values[name] / unit))
                if points:
                    panel.plot(*zip(*points), marker=marker, markersize=4, label=name)
            panel.set_xscale("log")
            panel.set_xticks([case[1] for case in cases], [str(case[1]) for case in cases])
            panel.set_yscale("log", base=2)
            panel.yaxis.set_major_formatter("{x:g}")
            panel.minorticks_off()
            panel.set_ylabel(label)
            panel.grid(alpha=0.3)
        panels[0, column].set_title(f"heads of {width}")
        panels[-1, column].set_xlabel("T, with 65536 tokens in all")
    if lines:
        panels[0, 0].legend(fontsize=7, ncols=2)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def describe_machine():
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": datetime.date.today().isoformat()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        machine["fla-core"] = importlib.metadata.version("fla-core")
    return machine


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=lambda text: tuple(map(int, text.split(","))), action="append", help="B,T,HQ,H,D; may be repeated")
    parser.add_argument("--only", nargs="+", choices=TAKES, default=list(TAKES), metavar="NAME", help=f"of {', '.join(TAKES)}")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one attention of one case")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/attention_cuda"), help="path of the results, without .jsonl or .png")
    return parser.parse_args()


def measure_all(cases, only, limit_s):
    """Yields lines: first of what is ours or PyTorch's, then of the public kernels."""
    for are_public in (False, True):
        try:
            attentions = {name: find_attention(name) for name in TAKES if name in only and name.startswith("fla") == are_public}
        except ImportError as error:
            yield {"note": f"flash-linear-attention is not installed: {error}"}
            continue
        for case in cases if attentions else []:
            inputs, d_o = make_inputs(*case)
            for name, attention in attentions.items():
                line = measure(name, attention, {x: inputs[x] for x in TAKES[name]}, d_o, limit_s)
                yield {"name": name, "B,T,HQ,H,D": case} | line
            del inputs, d_o


def main():
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        sys.exit("attention_cuda: there is no CUDA device; attention_cpu.py times a CPU")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    machine, lines = describe_machine(), []
    cases = arguments.case or [*STANDING_CASES, *WIDTH_CASES, LONGEST_CASE]
    try:
        with open(f"{arguments.output}.jsonl", "w") as file:
            for line in itertools.chain([machine], measure_all(cases, arguments.only, arguments.limit)):
                for stream in (sys.stdout, file):
                    print(json.dumps(line), file=stream, flush=True)
                if "name" in line:
                    lines.append(line)
    finally:  # what there is, also when a kernel's error has ended the device's context
        for key in ("fwd_ms", "fwd_bwd_ms", "fwd_bwd_peak_mib"):
            print_table(lines, key)
        draw(lines, f"Causal attention, bfloat16, {machine['gpu']}, torch {machine['torch']}, {machine['date']}", f"{arguments.output}.png")
        print(f"\nSee {arguments.output}.jsonl and {arguments.output}.png")
    return 1 if any("error" in line for line in lines if line["name"].startswith("pathattn")) else 0


if __name__ == "__main__":
    sys.exit(main())

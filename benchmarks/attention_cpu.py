#!/usr/bin/env python3
"""Times PaTH attention on a CPU against torch's scaled_dot_product_attention and against rewriting the keys at every step: attention_cpu.py

One process, the same float32 tensors, ours and the peer in turn; a case's ratio is the median of its pairs' ratios. Results are checked first, against
the definition in float64, and nothing is timed if the check fails. Prints a table; writes attention_cpu.json and attention_cpu.png.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(os.environ.get("PATHATTN_BUILD", ROOT / "build/release")) / "python"))

import pathattn  # noqa: E402  from the build folder

BATCH, HEADS, WIDTH = 1, 8, 64
LOOP_TOKENS = 2048
TARGETS = {"forward": 1.6, "forward+backward": 2.0}  # at most this many times the peer's time
LOOP_TARGET = 20  # at least this many times faster than the loop
TOLERANCE = {"o": 1e-5, "gradient": 1e-4}  # relative, against float64
NAMES = ("q", "k", "v", "w", "beta")


def progress(text):
    print(text, file=sys.stderr, flush=True)


def make_inputs(tokens):
    random = torch.Generator().manual_seed(tokens)
    q, k, v, w = (torch.randn(BATCH, tokens, HEADS, WIDTH, generator=random) for _ in range(4))
    inputs = [q, k, v, F.normalize(w, dim=-1), 2 * torch.rand(BATCH, tokens, HEADS, generator=random)]
    return [x.requires_grad_() for x in inputs], torch.randn(BATCH, tokens, HEADS, WIDTH, generator=random)


def defined_row(steps, row):
    """o of one row [B, H, V] in float64 as the definition reads: the query goes back through one factor a key. `steps`: inputs by token."""
    q, k, v, w, beta = steps
    query, scores = q[row] * WIDTH**-0.5, []
    for j in range(row, -1, -1):
        scores.append((query * k[j]).sum(-1))
        query = query - (beta[j] * (query * w[j]).sum(-1)).unsqueeze(-1) * w[j]
    weights = torch.stack(scores[::-1]).softmax(0)
    return (weights.unsqueeze(-1) * torch.stack(v[: row + 1])).sum(0)


def check(tokens):
    """Worst relative errors of a middle and the last row of o, and of the gradients through them, which reach every token."""
    inputs, d_o = make_inputs(tokens)
    rows = [tokens // 2, tokens - 1]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    steps = [x.unbind(1) for x in exact]
    defined = torch.stack([defined_row(steps, row) for row in rows], dim=1)
    expected = torch.autograd.grad(defined, exact, d_o[:, rows].double())
    o = pathattn.path_attention(*inputs)
    d_o[:, [row for row in range(tokens) if row not in rows]] = 0
    actual = torch.autograd.grad(o, inputs, d_o)

    def error(x, reference):
        return ((x.double() - reference).norm() / reference.norm()).item()

    errors = {"o": error(o[:, rows].detach(), defined.detach())} | {"d" + name: error(*pair) for name, *pair in zip(NAMES, actual, expected)}
    for name, value in errors.items():
        limit = TOLERANCE["o" if name == "o" else "gradient"]
        if not value <= limit:
            sys.exit(f"attention_cpu: {name} at {tokens} tokens is off by {value:.1e} of its norm, more than {limit:.0e}: no speed is reported")
    return errors


@torch.no_grad()
def rewriting_loop(q, k, v, w, beta):
    """The paper's rule for decoding, in place in preallocated tensors: every older key goes through each new factor."""
    q, k, v, w = (x[0].transpose(0, 1).contiguous() for x in (q, k, v, w))
    keys, o = torch.empty_like(k), torch.empty_like(v)
    for t in range(q.shape[1]):
        older = keys[:, :t]
        w_t = w[:, t].unsqueeze(1)
        older.baddbmm_(torch.bmm(older, w_t.transpose(1, 2)) * -beta[0, t].view(-1, 1, 1), w_t)
        keys[:, t] = k[:, t]
        weights = (torch.bmm(keys[:, : t + 1], q[:, t].unsqueeze(2)) * WIDTH**-0.5).softmax(1)
        o[:, t] = torch.bmm(weights.transpose(1, 2), v[:, : t + 1]).squeeze(1)
    return o.transpose(0, 1).unsqueeze(0)


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def time_pairs(ours, peer, pairs):
    """Milliseconds of each and the ratio ours / peer, medians over pairs run in turn and in alternating order, after one untimed run of each."""
    ours(), peer()
    times = []
    for n in range(pairs):
        if n % 2:
            times.append((seconds(ours), seconds(peer)))
        else:
            times.append((seconds(peer), seconds(ours))[::-1])
    ratios = sorted(a / b for a, b in times)
    return {
        "ours_ms": round(1e3 * statistics.median(a for a, _ in times), 2),
        "peer_ms": round(1e3 * statistics.median(b for _, b in times), 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(ratios[0], 3), round(ratios[-1], 3)],
        "pairs": pairs,
    }


def attention_cases(tokens, pairs):
    inputs, d_o = make_inputs(tokens)

    def peer_forward():
        q, k, v = (x.transpose(1, 2) for x in inputs[:3])
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def ours_forward():
        return pathattn.path_attention(*inputs)

    for kind, target in TARGETS.items():
        progress(f"timing {kind}, {tokens} tokens, {pairs} pairs ...")
        if kind == "forward":
            with torch.no_grad():
                times = time_pairs(ours_forward, peer_forward, pairs)
        else:
            times = time_pairs(
                lambda: torch.autograd.grad(ours_forward(), inputs, d_o), lambda: torch.autograd.grad(peer_forward(), inputs[:3], d_o), pairs
            )
        yield {"pass": kind, "tokens": tokens, "peer": "scaled_dot_product_attention", **times, "target": f"at most {target}"}


def loop_case(pairs):
    inputs, _ = make_inputs(LOOP_TOKENS)
    progress(f"timing the loop that rewrites keys, {LOOP_TOKENS} tokens, {pairs} pairs ...")
    with torch.no_grad():
        o = pathattn.path_attention(*inputs)
        error = (rewriting_loop(*inputs) - o).norm() / o.norm()
        if not error <= 1e-4:
            sys.exit(f"attention_cpu: the loop and ours differ by {error:.1e} of their norm: no speed is reported")
        times = time_pairs(lambda: pathattn.path_attention(*inputs), lambda: rewriting_loop(*inputs), pairs)
    return {"pass": "forward", "tokens": LOOP_TOKENS, "peer": "keys rewritten at each step", **times, "target": f"at most {1 / LOOP_TARGET}"}


def cpu_name():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def print_table(cases):
    print(f"{'pass':<17} {'tokens':>6}  {'peer':<29} {'ours ms':>9} {'peer ms':>9} {'ratio':>7}  target")
    for case in cases:
        print(
            f"{case['pass']:<17} {case['tokens']:>6}  {case['peer']:<29} {case['ours_ms']:>9.1f} {case['peer_ms']:>9.1f} "
            f"{case['ratio']:>7.3f}  {case['target']}"
        )


def draw(cases, title, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    ours_style = dict(color="#0072B2", edgecolor="black")
    peer_style = dict(color="#dddddd", edgecolor="black", hatch="//")
    for x, case in enumerate(cases):
        ours = axes.bar(x - 0.2, case["ours_ms"], 0.4, label="pathattn" if x == 0 else None, **ours_style)
        peer = axes.bar(x + 0.2, case["peer_ms"], 0.4, label="peer named below" if x == 0 else None, **peer_style)
        for bars in (ours, peer):
            axes.bar_label(bars, fmt="%.0f ms", fontsize=8)
    labels = [f"{c['pass']}, {c['tokens']} tokens\n{c['peer']}\nratio {c['ratio']:.3g}" for c in cases]
    axes.set_xticks(range(len(cases)), labels, fontsize=7)
    axes.set_yscale("log")
    axes.set_ylabel("time of one call, ms (logarithmic)")
    axes.set_title(title, fontsize=9)
    axes.legend()
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--pairs", type=int, default=11, help="of the shortest case; longer ones take fewer, at least 5")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder of the JSON file and the chart")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    errors = {}
    for tokens in arguments.tokens:
        progress(f"checking {tokens} tokens against the definition in float64 ...")
        errors[tokens] = check(tokens)
    cases = []
    for tokens in arguments.tokens:
        pairs = max(5, arguments.pairs * min(arguments.tokens) // tokens)
        cases.extend(attention_cases(tokens, pairs))
    cases.append(loop_case(3))

    machine = {"cpu": cpu_name(), "threads": arguments.threads, "torch": torch.__version__, "python": platform.python_version()}
    shape = {"batch": BATCH, "heads": HEADS, "width": WIDTH, "dtype": "float32"}
    print_table(cases)
    arguments.output.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine, "shape": shape, "relative_errors": errors, "cases": cases}
    (arguments.output / "attention_cpu.json").write_text(json.dumps(report, indent=2) + "\n")
    title = f"PaTH attention, float32, batch {BATCH}, {HEADS} heads of {WIDTH}, {arguments.threads} threads, {machine['cpu']}"
    draw(cases, title, arguments.output / "attention_cpu.png")
    print(f"\nSee {arguments.output}/attention_cpu.json and {arguments.output}/attention_cpu.png")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Times PaTH attention on a CUDA device against cuDNN's and FlashAttention's causal attention and the public PaTH kernels: attention_cuda.py

One process, bfloat16, the same tensors for all. Ours is checked first, on one key head, against the portable float32 kernels, and nothing is timed if
the check fails. Prints JSON lines and a table of ratios to cuDNN; writes attention_cuda.jsonl and attention_cuda.png. A line has:
  name, case [B, T, HQ, H, D]; fwd_ms, fwd_bwd_ms: medians of CUDA-event times; fwd_peak_mib, fwd_bwd_peak_mib: peak memory above the inputs.
The public kernels (flash-linear-attention) are timed where that package is installed; they tune themselves for minutes at first.
"""

import argparse
import gc
import json
import os
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(os.environ.get("PATHATTN_BUILD", ROOT / "build/release")) / "python"))

import pathattn  # noqa: E402  from the build folder

CASES = [
    (32, 2048, 32, 32, 64),
    (8, 8192, 32, 32, 64),
    (16, 4096, 16, 16, 128),
    (4, 16384, 16, 16, 128),
    (1, 65536, 16, 16, 128),
    (1, 65536, 32, 32, 64),
    (4, 16384, 32, 8, 128),
]
TOLERANCE = {"o": 2.8e-3, "gradient": 4e-3}  # relative, of bfloat16 results; their own rounding is 1.66e-3
REFERENCE = "sdpa_cudnn"


def make_inputs(B, T, HQ, H, D):
    random = torch.Generator(device="cuda").manual_seed(T)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=random)

    inputs = {"q": normal(B, T, HQ, D).bfloat16(), "k": normal(B, T, H, D).bfloat16(), "v": normal(B, T, H, D).bfloat16()}
    inputs["w"] = F.normalize(normal(B, T, H, D), dim=-1)
    inputs["beta"] = 2 * torch.rand(B, T, H, device="cuda", generator=random)
    inputs["g"] = F.logsigmoid(normal(B, T, HQ) + 4)
    return {name: x.requires_grad_() for name, x in inputs.items()}, normal(B, T, HQ, D).bfloat16()


def check(inputs, d_o, with_gradients):
    """Relative errors of ours on the first key head of the first batch row, with the gate, against the same in float32."""
    group = inputs["q"].shape[2] // inputs["k"].shape[2]
    part = {name: x[:1, :, : group if name in "qg" else 1].detach() for name, x in inputs.items()}
    ours = [x.clone().requires_grad_() for x in part.values()]
    exact = [x.float().requires_grad_() for x in part.values()]
    errors = {}

    def note(name, x, reference):
        errors[name] = ((x.float() - reference).norm() / reference.norm()).item()

    o, reference = pathattn.path_attention(*ours), pathattn.path_attention(*exact)
    note("o", o, reference)
    if with_gradients:
        d_o = d_o[:1, :, :group]
        for name, *pair in zip(part, torch.autograd.grad(o, ours, d_o), torch.autograd.grad(reference, exact, d_o.float())):
            note("d" + name, *pair)
    for name, value in errors.items():
        limit = TOLERANCE["o" if name == "o" else "gradient"]
        if not value <= limit:
            sys.exit(f"attention_cuda: {name} is off by {value:.1e} of its norm, more than {limit:.0e}: no speed is reported")
    return errors


def attentions(inputs):
    """(name, call, inputs that get a gradient) of everything that is timed."""
    q, k, v, w, beta, g = inputs.values()
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]

    def torch_attention(backend):
        with sdpa_kernel(backend):
            o = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=q.shape[2] != k.shape[2])
        return o.transpose(1, 2)

    yield REFERENCE, lambda: torch_attention(SDPBackend.CUDNN_ATTENTION), [q, k, v]
    yield "sdpa_flash2", lambda: torch_attention(SDPBackend.FLASH_ATTENTION), [q, k, v]
    yield "pathattn_path", lambda: pathattn.path_attention(q, k, v, w, beta), [q, k, v, w, beta]
    yield "pathattn_path_fox", lambda: pathattn.path_attention(q, k, v, w, beta, g), [q, k, v, w, beta, g]
    yield "pathattn_fox", lambda: pathattn.path_attention(q, k, v, g=g), [q, k, v, g]
    try:
        from fla.ops.path_attn.parallel import parallel_path_attn
    except ImportError:
        return
    yield "fla_path", lambda: parallel_path_attn(q, k, v, w, beta)[0], [q, k, v, w, beta]
    yield "fla_path_fox", lambda: parallel_path_attn(q, k, v, w, beta, g)[0], [q, k, v, w, beta, g]


def median_ms(call, runs):
    call()
    times = []
    for _ in range(runs):
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


def measure(call, with_gradients, d_o, runs, passes):
    def both():
        torch.autograd.grad(call(), with_gradients, d_o)

    line = {}
    try:
        if "forward" in passes:
            with torch.no_grad():
                line |= {"fwd_ms": median_ms(call, runs), "fwd_peak_mib": peak_mib(call)}
        if "both" in passes:
            line |= {"fwd_bwd_ms": median_ms(both, runs), "fwd_bwd_peak_mib": peak_mib(both)}
    except (RuntimeError, ValueError) as error:  # a peer that cannot run a case is a result too
        line["error"] = str(error).splitlines()[0][:200]
    return line


def print_table(lines, key):
    print(f"\n{key}, times {REFERENCE}'s")
    names = list(dict.fromkeys(line["name"] for line in lines))
    cases = list(dict.fromkeys(tuple(line["case"]) for line in lines))
    print(f"{'B, T, HQ, H, D':<26} {REFERENCE + ' ms':>14}" + "".join(f"{name:>19}" for name in names if name != REFERENCE))
    for case in cases:
        of_case = {line["name"]: line.get(key) for line in lines if tuple(line["case"]) == case}
        reference = of_case.get(REFERENCE)
        ratios = [f"{of_case[n] / reference:>19.3f}" if of_case.get(n) and reference else f"{'-':>19}" for n in names if n != REFERENCE]
        print(f"{', '.join(map(str, case)):<26} {reference or float('nan'):>14.3f}" + "".join(ratios))


def draw(lines, title, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(line["name"] for line in lines))
    cases = list(dict.fromkeys(tuple(line["case"]) for line in lines))
    keys = [key for key in ("fwd_ms", "fwd_bwd_ms", "fwd_bwd_peak_mib") if any(key in line for line in lines)]
    figure, panels = pyplot.subplots(len(keys), 1, figsize=(11, 3.2 * len(keys)), layout="constrained", squeeze=False)
    for panel, key in zip(panels[:, 0], keys):
        for i, name in enumerate(names):
            values = {tuple(line["case"]): line.get(key) for line in lines if line["name"] == name}
            heights = [values.get(case) or float("nan") for case in cases]
            bars = panel.bar([x + (i - len(names) / 2) * 0.9 / len(names) for x in range(len(cases))], heights, 0.9 / len(names), label=name)
            reference = [next((line.get(key) for line in lines if line["name"] == REFERENCE and tuple(line["case"]) == case), None) for case in cases]
            labels = [f"{h / r:.1f}" if r and h == h else "" for h, r in zip(heights, reference)]
            panel.bar_label(bars, labels, fontsize=6)
        panel.set_yscale("log")
        panel.set_ylabel({"fwd_ms": "forward, ms", "fwd_bwd_ms": "forward and backward, ms", "fwd_bwd_peak_mib": "peak memory, MiB"}[key])
        panel.set_xticks(range(len(cases)), [f"B {b}, T {t}\n{hq}/{h} heads of {d}" for b, t, hq, h, d in cases], fontsize=7)
    panels[0, 0].legend(fontsize=7, ncols=3)
    figure.suptitle(f"{title}\nnumbers on bars: times {REFERENCE}'s", fontsize=9)
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=lambda text: tuple(map(int, text.split(","))), action="append", help="B,T,HQ,H,D; may be repeated")
    parser.add_argument("--passes", nargs="+", choices=["forward", "both"], default=["forward", "both"])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder of the JSON lines and the chart")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("attention_cuda: there is no CUDA device; attention_cpu.py times a CPU")
    arguments.output.mkdir(parents=True, exist_ok=True)
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    lines = []
    with open(arguments.output / "attention_cuda.jsonl", "w") as file:
        print(json.dumps(machine), file=file, flush=True)
        for case in arguments.case or CASES:
            inputs, d_o = make_inputs(*case)
            print(json.dumps({"case": case, "relative_errors": check(inputs, d_o, "both" in arguments.passes)}), file=file, flush=True)
            for name, call, with_gradients in attentions(inputs):
                lines.append({"name": name, "case": case} | measure(call, with_gradients, d_o, arguments.runs, arguments.passes))
                print(json.dumps(lines[-1]), flush=True)
                print(json.dumps(lines[-1]), file=file, flush=True)
            del inputs, d_o
    for key in ("fwd_ms", "fwd_bwd_ms", "fwd_bwd_peak_mib"):
        if any(key in line for line in lines):
            print_table(lines, key)
    draw(lines, f"Causal attention, bfloat16, {machine['gpu']}, torch {machine['torch']}", arguments.output / "attention_cuda.png")
    print(f"\nSee {arguments.output}/attention_cuda.jsonl and {arguments.output}/attention_cuda.png")


if __name__ == "__main__":
    main()

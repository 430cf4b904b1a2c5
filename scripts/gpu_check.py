#!/usr/bin/env python3
"""Builds and tests, on a machine with a GPU, all that needs one: gpu_check.py [BUILD] [--built]

Run it by a Python that has PyTorch with CUDA and pytest. With all cores it builds the kernels, the operators, the program and their tests for this
machine's GPU (--built: BUILD has them, perhaps from another machine with the same PyTorch), then runs the table of kernel cases, the program's
and the operators' tests on the GPU, and compute-sanitizer's memcheck, synccheck and, on the portable path, racecheck over a few kernel cases. Each
part has a time limit, together ten minutes, and says what it found when it ends; whole outputs lie in BUILD/test-results/NAME.log. The last line
counts single cases, as run_tests.py's does. Exit status 0 if something ran and nothing failed.
"""

import argparse
import collections
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from run_tests import TAIL_LINES, Results, report

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ["cuda_kernels_test", "program_cuda_test", "pathattn"]
LIMITS_S = {"build": 220, "kernels": 90, "program": 50, "operators": 90, "sanitizers": 150}
NUM_SHARDS = 12  # processes that share the table of kernel cases: most of a case's time is the reference's, on one core
SANITIZED_CASES = [  # each in a process of its own, since an error ends the device's context; under a sanitizer a case takes many times as long
    "HopperPath*/K01_beta_10_tenths_t128_bfloat16",  # one tile, width 64
    "HopperPath*/P25_hq6_h3_bfloat16",  # two tiles, width 64, a gate, grouped heads
    "HopperPath*/F04_k128_v128_bfloat16",  # two tiles, width 128
    "HopperPath*/length_640_float16",  # five tiles, width 64, a gate
    "HopperPath*/length_1000_k128_bfloat16",  # eight tiles, width 128
    "PortablePath*/documents_0_1_63_64_65_f32",
]


def build_all(build):
    architecture = "{}{}".format(*torch.cuda.get_device_capability())
    options = ["-G", "Ninja", "-DPATHATTN_CUDA=ON", f"-DPATHATTN_CUDA_ARCHITECTURES={architecture}", f"-DPATHATTN_PYTHON={sys.executable}"]
    options += ["-DCMAKE_CUDA_FLAGS=-lineinfo"]  # compute-sanitizer names lines
    subprocess.run(["cmake", "-S", ROOT, "-B", build, *options], check=True)
    command = ["cmake", "--build", build, "--parallel", str(os.cpu_count()), "--target", *TARGETS]
    subprocess.run(command, check=True, timeout=LIMITS_S["build"])


class Program:
    """A test program at work, under a name of its own; it leaves its cases in `xml` and its output in `log`."""

    def __init__(self, name, command, build, **environment):
        folder = build / "test-results"
        folder.mkdir(exist_ok=True)
        self.name, self.xml, self.log = name, folder / f"{name}.xml", folder / f"{name}.log"
        self.xml.unlink(missing_ok=True)
        common = {"GTEST_OUTPUT": f"xml:{self.xml}", "PATHATTN_BUILD": str(build), "OMP_WAIT_POLICY": "passive", "PYTHONFAULTHANDLER": "1"}
        with open(self.log, "w") as log:
            environment = os.environ | common | environment
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def finish(self, deadline, results):
        try:
            status = self.process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            results.failures.append((f"{self.name} did not end in time", what_matters(self.log)))
            return
        num_before = results.passed + results.skipped
        num_failed = results.add_cases(self.xml, self.name)
        nothing_ran = num_failed == 0 and results.passed + results.skipped == num_before
        if num_failed is None or (status != 0 and num_failed == 0) or nothing_ran or sanitizer_findings(self.log):
            what = "ran no case" if nothing_ran else f"ended with status {status}"
            results.failures.append((f"{self.name} {what}", what_matters(self.log)))


def sanitizer_findings(log):
    """What compute-sanitizer reports and where (kernel, address and, where the build has them, lines), each once with how often."""
    findings, heading, first = [], "", ""
    for line in re.findall(r"^========= ?(.*)$", log.read_text(errors="replace"), re.MULTILINE):
        place = re.match(r"(?P<what>.*?)\bat (?P<kernel>.+)(?P<address>\+0x[0-9a-f]+)(?: in (?P<source>\S+:\d+))?", line)
        frame = re.search(r"Device Frame: .* in (\S+:\d+)", line)  # of the function that this one was inlined into
        if place:
            kernel = re.sub(r"\((int|bool)\)|pathattn::|cuda::|hopper::|\(anonymous namespace\)::|void ", "", place["kernel"]).split("(")[0]
            what = place["what"].strip()
            finding = f"{what or heading} at {kernel} {place['address']} {place['source'] or ''}".rstrip()
            if "between" in what:  # of a race: the accesses that follow are the other half
                first = finding
            else:
                findings.append(f"{first} {finding}" if what.startswith("and") else finding)
        elif frame and findings:
            findings[-1] += f" < {frame[1]}"
        else:
            heading = line.strip()
    return [f"{count} x {finding}" for finding, count in collections.Counter(findings).most_common()]


def what_matters(log):
    """Of a failed program's output: a sanitizer's findings, or where Python crashed, or else the end."""
    text = log.read_text(errors="replace")
    crash = text.find("Fatal Python error")
    if crash >= 0:
        return "\n".join(text[crash:].splitlines()[:TAIL_LINES])
    return "\n".join(sanitizer_findings(log)[:TAIL_LINES]) or text


def kernel_table(build):
    program = build / "cuda_kernels_test"
    for shard in range(NUM_SHARDS):
        environment = dict(GTEST_TOTAL_SHARDS=str(NUM_SHARDS), GTEST_SHARD_INDEX=str(shard))
        yield Program(f"kernels-{shard}", [program, "--gtest_brief=1"], build, **environment)


def program_tests(build):
    yield Program("program", [build / "program_cuda_test", "--gtest_brief=1"], build)


def operator_tests(build):
    for path in sorted((ROOT / "tests" / "python" / "cuda").glob("test_*.py")):
        xml = build / "test-results" / f"{path.stem}.xml"
        yield Program(path.stem, [sys.executable, "-m", "pytest", "-v", path, f"--junit-xml={xml}"], build)


def sanitized_kernels(build):
    sanitizer = shutil.which("compute-sanitizer", path=os.environ["PATH"] + ":/usr/local/cuda/bin")
    if sanitizer is None:
        print("compute-sanitizer is not installed: its checks are left out", flush=True)
        return
    for tool in ("racecheck", "synccheck", "memcheck"):
        for case in SANITIZED_CASES:
            if tool == "racecheck" and case.startswith("HopperPath"):
                continue  # does not follow mbarriers, by which these kernels hand over all they share
            command = [sanitizer, "--tool", tool, "--error-exitcode", "1", "--show-backtrace", "device", build / "cuda_kernels_test"]
            yield Program(f"{tool}-{case.replace('*/', '-')}", [*command, "--gtest_brief=1", f"--gtest_filter=*{case}"], build)


PARTS = {"kernels": kernel_table, "program": program_tests, "operators": operator_tests, "sanitizers": sanitized_kernels}


def run_part(name, build, total):
    start, results = time.monotonic(), Results()
    for program in list(PARTS[name](build)):  # all are started before one is waited for
        program.finish(start + LIMITS_S[name], results)
    print(f"\n=== {name}: {time.monotonic() - start:.0f} s")
    report(results)
    total.passed += results.passed
    total.skipped += results.skipped
    total.failures += [(failure, "") for failure, _ in results.failures]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", nargs="?", type=Path, default=ROOT / "build" / "gpu", metavar="BUILD", help="the build folder; default: build/gpu")
    parser.add_argument("--built", action="store_true", help="take BUILD as it is")
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    if not torch.cuda.is_available():
        sys.exit("gpu_check.py: no CUDA device or driver was found: see nvidia-smi")
    if not arguments.built:
        build_all(build)
    elif not all((build / target).exists() for target in TARGETS):
        sys.exit(f"gpu_check.py: {build} lacks one of {', '.join(TARGETS)}: leave out --built to build them")
    total = Results()
    for name in PARTS:
        run_part(name, build, total)
    print("\n=== all")
    return report(total)


if __name__ == "__main__":
    sys.exit(main())

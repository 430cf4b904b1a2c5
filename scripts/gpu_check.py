#!/usr/bin/env python3
"""Builds and tests, on a machine with a GPU, all that needs one: gpu_check.py [BUILD]

Run it by a Python that has PyTorch with CUDA and pytest. With all cores it builds the kernels, the operators, the program and their tests for this machine's
GPU, then runs the table of kernel cases, the program's and the operators' tests on the GPU, and compute-sanitizer's memcheck, racecheck and synccheck over
a few kernel cases. The last line counts single cases, as run_tests.py's does. Exit status 0 if something ran and nothing failed.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from run_tests import Results, report, run_pytest, tail

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ["cuda_kernels_test", "program_cuda_test", "pathattn"]
NUM_SHARDS = 12  # processes that share the table of kernel cases: most of a case's time is the reference's, on one core
SANITIZED_CASES = {  # under a sanitizer a case takes many times as long
    "memcheck": "*K12_t130*:*documents_0_1_63_64_65*:*P25_hq6*",
    "racecheck": "*K12_t130*:*documents_0_1_63_64_65_f32",
    "synccheck": "*K12_t130*:*documents_0_1_63_64_65_f32",
}
TIMEOUT_S = 150  # of a program


def build_all(build):
    architecture = "{}{}".format(*torch.cuda.get_device_capability())
    options = ["-G", "Ninja", "-DPATHATTN_CUDA=ON", f"-DPATHATTN_CUDA_ARCHITECTURES={architecture}", f"-DPATHATTN_PYTHON={sys.executable}"]
    subprocess.run(["cmake", "-S", ROOT, "-B", build, *options], check=True)
    subprocess.run(["cmake", "--build", build, "--parallel", str(os.cpu_count()), "--target", *TARGETS], check=True)


class Program:
    """A GoogleTest program at work, under a name of its own."""

    def __init__(self, name, command, build, **environment):
        self.name = name
        self.xml = build / "test-results" / f"{name}.xml"
        self.xml.parent.mkdir(exist_ok=True)
        self.xml.unlink(missing_ok=True)
        environment = os.environ | {"GTEST_OUTPUT": f"xml:{self.xml}", "OMP_WAIT_POLICY": "passive"} | environment
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def finish(self, results):
        try:
            output, _ = self.process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            results.failures.append((self.name, f"it was stopped after {TIMEOUT_S} s"))
            return
        num_failed = results.add_cases(self.xml, self.name)
        if num_failed is None or (self.process.returncode != 0 and num_failed == 0):
            results.failures.append((f"{self.name} ended with status {self.process.returncode}", tail(output)))


def run_together(programs, results):
    for program in programs:
        program.finish(results)


def kernel_table(build, results):
    program, shards = build / "cuda_kernels_test", range(NUM_SHARDS)
    settings = [dict(GTEST_TOTAL_SHARDS=str(NUM_SHARDS), GTEST_SHARD_INDEX=str(shard)) for shard in shards]
    run_together([Program(f"kernels-{shard}", [program, "--gtest_brief=1"], build, **settings[shard]) for shard in shards], results)


def sanitized_kernels(build, results):
    sanitizer = shutil.which("compute-sanitizer", path=os.environ["PATH"] + ":/usr/local/cuda/bin")
    if sanitizer is None:
        print("compute-sanitizer is not installed: its checks are skipped", flush=True)
        results.skipped += len(SANITIZED_CASES)
        return
    commands = {
        tool: [sanitizer, "--tool", tool, "--error-exitcode", "1", build / "cuda_kernels_test", "--gtest_brief=1", f"--gtest_filter={cases}"]
        for tool, cases in SANITIZED_CASES.items()
    }
    run_together([Program(tool, command, build) for tool, command in commands.items()], results)


def main():
    if not torch.cuda.is_available():
        sys.exit("gpu_check.py: no CUDA device or driver was found: see nvidia-smi")
    build = (Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "gpu").resolve()
    results = Results()
    stages = {
        "build": lambda: build_all(build),
        "kernels": lambda: kernel_table(build, results),
        "program": lambda: run_together([Program("program", [build / "program_cuda_test", "--gtest_brief=1"], build)], results),
        "operators": lambda: run_pytest(ROOT / "tests" / "python" / "cuda", build, results),
        "sanitizers": lambda: sanitized_kernels(build, results),
    }
    for name, stage in stages.items():
        start = time.monotonic()
        stage()
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    return report(results)


if __name__ == "__main__":
    sys.exit(main())

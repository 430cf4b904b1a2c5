#!/usr/bin/env python3
"""Runs the tests of build folders, and Python's, and counts single test cases: run_tests.py BUILD ... [--pytest FOLDER]

CTest runs the programs; each GoogleTest program leaves test-results/NAME.xml with its cases. A program that fails without naming a failed case
(it crashed, hung, or a sanitizer stopped it) counts as one failure under its own name. The last line reads "N passed, N failed", with ", N skipped"
if any. Exit status 0 if something ran and nothing failed.
"""

import argparse
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

TIMEOUT_S = 1800  # of one test program, the slowest sanitizer included
TAIL_LINES = 25  # shown of a failed program's output


@dataclass
class Results:
    passed: int = 0
    skipped: int = 0
    failures: list = field(default_factory=list)  # (name, what to show)

    def add_cases(self, xml, program):
        """Adds the cases of a JUnit file; returns how many failed, or None if the file is missing or cut short."""
        try:
            cases = list(ElementTree.parse(xml).getroot().iter("testcase"))
        except (OSError, ElementTree.ParseError):
            return None
        num_failed = 0
        for case in cases:
            problems = [*case.iter("failure"), *case.iter("error")]
            if problems:
                num_failed += 1
                text = "\n".join(problem.text or problem.get("message", "") for problem in problems)
                self.failures.append((f"{program}: {case.get('classname')}.{case.get('name')}", text))
            elif case.get("result") in ("skipped", "suppressed") or case.get("status") == "notrun" or case.find("skipped") is not None:
                self.skipped += 1
            else:
                self.passed += 1
        return num_failed


def tail(text):
    return "\n".join((text or "").rstrip().splitlines()[-TAIL_LINES:])


def run_ctest(build, results):
    listed = subprocess.run(["ctest", "--test-dir", build, "--show-only=json-v1"], stdout=subprocess.PIPE, text=True)
    if listed.returncode:
        results.failures.append((f"{build}: ctest", f"{build} is not a build folder with tests: run `make build` first"))
        return
    tests = {test["name"]: {p["name"]: p["value"] for p in test.get("properties", [])} for test in json.loads(listed.stdout)["tests"]}
    if not tests:
        return
    folder = build / "test-results"
    folder.mkdir(exist_ok=True)
    for stale in folder.glob("*.xml"):
        stale.unlink()
    summary = folder / "ctest.xml"
    command = ["ctest", "--test-dir", build, "--output-junit", summary.resolve(), "--timeout", str(TIMEOUT_S)]
    subprocess.run([*command, "--parallel", str(os.cpu_count()), "--no-tests=error", "--test-output-size-failed", "200000"])
    outcomes = {}
    if summary.exists():
        outcomes = {case.get("name"): case for case in ElementTree.parse(summary).getroot().iter("testcase")}
    for name, properties in tests.items():
        case = outcomes.get(name)
        succeeded = case is not None and case.get("status") == "run"
        is_gtest = any(variable.startswith("GTEST_OUTPUT=") for variable in properties.get("ENVIRONMENT", []))
        failed_cases = results.add_cases(folder / f"{name}.xml", name) if is_gtest else None
        if succeeded and failed_cases is None and not is_gtest:
            results.passed += 1
        elif failed_cases is None or (not succeeded and failed_cases == 0):
            output = tail(case.findtext("system-out")) if case is not None else "it did not run"
            results.failures.append((f"{build}: {name} ended without a result", output))


def run_pytest(folder, build, results):
    xml = build / "test-results" / "pytest.xml"
    xml.parent.mkdir(parents=True, exist_ok=True)
    xml.unlink(missing_ok=True)
    environment = os.environ | {"PATHATTN_BUILD": str(build.resolve()), "OMP_WAIT_POLICY": "passive"}  # as cmake/Testing.cmake
    status = subprocess.run([sys.executable, "-m", "pytest", "-q", folder, f"--junit-xml={xml}"], env=environment).returncode
    num_failed = results.add_cases(xml, "pytest")
    if num_failed is None or (status != 0 and num_failed == 0):
        results.failures.append((f"pytest {folder}", f"it ended with status {status} and without a result"))


def report(results):
    """Prints what failed and, on the last line, the counts; returns the exit status."""
    for name, text in results.failures:
        print(f"\nFAILED {name}\n{tail(text)}")
    skipped = f", {results.skipped} skipped" if results.skipped else ""
    print(f"\n{results.passed} passed, {len(results.failures)} failed{skipped}", flush=True)
    return 0 if results.passed and not results.failures else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="+", type=Path, metavar="BUILD", help="a build folder")
    parser.add_argument("--pytest", metavar="FOLDER", help="also run the Python tests in FOLDER, against the first build")
    arguments = parser.parse_args()

    results = Results()
    for build in arguments.builds:
        run_ctest(build, results)
    if arguments.pytest:
        run_pytest(arguments.pytest, arguments.builds[0], results)
    return report(results)


if __name__ == "__main__":
    sys.exit(main())

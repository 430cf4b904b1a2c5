"""How scripts/gpu_check.py counts programs that fail, crash, hang or run nothing, and what it shows of a sanitizer's report. Needs no GPU."""

import importlib
import time

import pytest
from conftest import ROOT

PASSED = '<testsuites><testsuite><testcase name="a" classname="T" status="run"/></testsuite></testsuites>'
FAILED = '<testsuites><testsuite><testcase name="b" classname="T" status="run"><failure message="m">far off</failure></testcase></testsuite></testsuites>'
BARRIER = """========= Barrier error detected. Divergent thread(s) in warp.
=========     at void pathattn::cuda::hopper::attend<(int)64, (bool)1>(pathattn::cuda::hopper::Call)+0x1a0 in ptx.cuh:12
=========         Device Frame: pathattn::cuda::hopper::wait_for_keys() in attend.cuh:34
=========     by thread (0,0,0) in block (0,0,0)
"""
RACE = """========= Error: Race reported between Write access at void attend<(int)64>(Call)+0x10 in a.cuh:1
=========     and Read access at void attend<(int)64>(Call)+0x20 in a.cuh:2 [104 hazards]
=========     and Read access at void attend<(int)64>(Call)+0x30 [4 hazards]
"""


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("gpu_check")


def results_of(gpu_check, folder, script, seconds=20):
    program = gpu_check.Program("name", ["bash", "-c", script], folder)
    results = gpu_check.Results()
    program.finish(time.monotonic() + seconds, results)
    return results


@pytest.mark.parametrize(
    "script, failure, text",
    [
        (f"echo '{FAILED}' > ${{GTEST_OUTPUT#xml:}}; exit 1", "name: T.b", "far off"),
        (f"echo '{PASSED}' > ${{GTEST_OUTPUT#xml:}}; echo late; exit 3", "name ended with status 3", "late"),
        ("echo before; kill -SEGV $$", "name ended with status -11", "before"),
        ("echo '<testsuites/>' > ${GTEST_OUTPUT#xml:}", "name ran no case", ""),
        ("seq 100; echo Fatal Python error: here; seq 200 300; exit 1", "name ended with status 1", "Fatal Python error: here\n200\n201"),
        (f"echo '{PASSED}' > ${{GTEST_OUTPUT#xml:}}; echo '{BARRIER}'; exit 1", "name ended with status 1", "1 x Barrier error"),
    ],
)
def test_every_failure_is_counted_and_shown(gpu_check, tmp_path, script, failure, text):
    ((name, shown),) = results_of(gpu_check, tmp_path, script).failures
    assert name == failure and shown.startswith(text)


def test_a_program_that_hangs_is_ended_with_its_children(gpu_check, tmp_path):
    results = results_of(gpu_check, tmp_path, f"echo begun; (sleep 2; touch {tmp_path}/alive) & wait", seconds=0.5)
    assert results.failures == [("name did not end in time", "begun\n")]
    time.sleep(2.2)
    assert not (tmp_path / "alive").exists()


def test_passed_cases_are_counted(gpu_check, tmp_path):
    results = results_of(gpu_check, tmp_path, f"echo '{PASSED}' > ${{GTEST_OUTPUT#xml:}}")
    assert (results.passed, results.failures) == (1, [])


def test_sanitizer_reports_are_cut_down_to_what_and_where(gpu_check, tmp_path):
    log = tmp_path / "log"
    log.write_text("========= COMPUTE-SANITIZER\n" + BARRIER + BARRIER + RACE + "========= ERROR SUMMARY: 3 errors\n")
    race = "1 x Error: Race reported between Write access at attend<64> +0x10 a.cuh:1 and Read access at attend<64>"
    assert gpu_check.sanitizer_findings(log) == [
        "2 x Barrier error detected. Divergent thread(s) in warp. at attend<64, 1> +0x1a0 ptx.cuh:12 < attend.cuh:34",
        f"{race} +0x20 a.cuh:2",
        f"{race} +0x30",
    ]

"""Where the build is: PATHATTN_BUILD, or build/release. Its Python package is the one that tests import, its program the one that they call."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("PATHATTN_BUILD", ROOT / "build/release"))
sys.path.insert(0, str(BUILD / "python"))


@pytest.fixture(scope="session")
def build():
    """The build folder, which has the pathattn program and the operators' library."""
    if not BUILD.is_dir():
        pytest.fail(f"{BUILD} is missing: run `make build`, or name a build folder in PATHATTN_BUILD")
    return BUILD


@pytest.fixture
def call(build):
    """A function that runs the pathattn program on one thread and returns the process, which must have ended with `status`."""

    def call(*arguments, status=0, **options):
        command = [build / "pathattn", "--threads", "1", *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120, **options)
        assert result.returncode == status, result.stderr
        return result

    return call

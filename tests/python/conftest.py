"""Where the build is: PATHATTN_BUILD, or build/release. Its Python package is the one that tests import."""

import os
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

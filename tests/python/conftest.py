"""Where the build is: PATHATTN_BUILD, or build/release."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def build():
    """The build folder, which has the pathattn program and the operators' library."""
    folder = Path(os.environ.get("PATHATTN_BUILD", ROOT / "build/release"))
    if not folder.is_dir():
        pytest.fail(f"{folder} is missing: run `make build`, or name a build folder in PATHATTN_BUILD")
    return folder

"""Loads the operators' shared library, which lies beside this file in a build folder as in a wheel."""

from pathlib import Path

import torch

try:
    from ._build import TORCH_VERSION
except ImportError:
    raise ImportError("pathattn is not built here: run `make build`, or `pip install . --no-build-isolation`") from None


def _release(version: str) -> str:
    return str(version).split("+")[0]  # "2.11.0+cpu" and "2.11.0+cu130" have one C++ interface


if _release(torch.__version__) != _release(TORCH_VERSION):
    raise ImportError(f"pathattn was built for PyTorch {TORCH_VERSION}, but this is PyTorch {torch.__version__}: build pathattn again")

torch.ops.load_library(Path(__file__).with_name("libpathattn_operators.so"))

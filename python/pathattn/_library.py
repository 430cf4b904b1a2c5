"""Loads the operators' shared libraries, which lie beside this file in a build folder as in a wheel: the CPU's and, where one was built, CUDA's."""

import warnings
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

_folder = Path(__file__).parent
torch.ops.load_library(_folder / "libpathattn_operators.so")

_cuda = _folder / "libpathattn_operators_cuda.so"
if _cuda.exists() and torch.version.cuda is not None:  # a PyTorch without CUDA lacks what the library links to
    try:
        torch.ops.load_library(_cuda)
    except OSError as error:
        warnings.warn(f"pathattn refuses tensors on CUDA devices, because its CUDA operators cannot be loaded: {error}", stacklevel=2)

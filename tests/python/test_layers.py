"""Includes point upwards only: every #include of the tree against cmake/layers.tsv.

A folder may include itself, what its row names, and what those may include; the longest folder name that fits a file decides.
Tests (*_test.cpp, test_*, tests/) may also use GoogleTest, base (to read golden files) and the kernels.
"""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = {".h", ".hpp", ".cpp", ".cc", ".inl", ".cu", ".cuh"}
NOT_OURS = {"build", "runs", "dist"}
PACKAGES = {"ATen": "torch", "c10": "torch", "torch": "torch"}  # first part of an include and the package it belongs to, where the two differ
EXTRA_FOR_TESTS = {"gtest", "gmock", "base", "fmt", "nlohmann", "kernels", "kernels/reference", "kernels/cpu", "kernels/cuda", "cuda"}


def read_table(path):
    rows = [line.split("\t") for line in path.read_text().splitlines()[1:]]
    return {folder: set() if allowed == "-" else set(allowed.split()) for folder, allowed in rows}


def reachable(table, folder):
    seen, waiting = set(), [folder]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(table.get(name, ()))
    return seen


def source_files(root):
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and not (folder == str(root) and name in NOT_OURS)]
        yield from (Path(folder, name).relative_to(root) for name in sorted(names) if Path(name).suffix in SUFFIXES)


def layer_of(table, path):
    return next((str(folder) for folder in Path(path).parents if str(folder) in table), None)


def violations(root, table):
    """One line for each include that the table does not allow."""
    found = []
    for path in source_files(root):
        layer = layer_of(table, path)
        if layer is None:
            found.append(f"{path}: its folder is not in cmake/layers.tsv")
            continue
        allowed = reachable(table, layer)
        if path.stem.endswith("_test") or path.stem.startswith("test_") or "tests" in path.parts:
            allowed |= EXTRA_FOR_TESTS
        text = (root / path).read_text()
        for number, line in enumerate(text.splitlines(), 1):
            include = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
            if not include:
                continue
            quote, name = include.groups()
            first = "cuda" if name.startswith("cuda") else name.split("/")[0]
            if quote == "<" and first in (name, "sys"):
                continue  # the standard library and POSIX
            target = layer_of(table, name) or PACKAGES.get(first, first)
            if target not in allowed:
                found.append(f"{path}:{number}: {layer} may not include {name} ({target})")
    return found


def test_includes_follow_the_layers():
    assert violations(ROOT, read_table(ROOT / "cmake/layers.tsv")) == []


def test_what_is_sanitized_is_free_of_torch():
    table = read_table(ROOT / "cmake/layers.tsv")
    for layer in ("kernels", "kernels/reference", "kernels/cpu", "kernels/cuda", "base", "text"):
        assert "torch" not in reachable(table, layer), layer


@pytest.mark.parametrize(
    "path, include, complaint",
    [
        ("kernels/cpu/wrong.cpp", "<torch/torch.h>", "kernels/cpu may not include torch/torch.h (torch)"),
        ("kernels/wrong.h", "<ATen/core/Tensor.h>", "kernels may not include ATen/core/Tensor.h (torch)"),
        ("kernels/wrong.h", "<hwy/highway.h>", "kernels may not include hwy/highway.h (hwy)"),
        ("kernels/cpu/wrong.h", "<cuda_runtime.h>", "kernels/cpu may not include cuda_runtime.h (cuda)"),
        ("base/wrong.h", '"model/model.h"', "base may not include model/model.h (model)"),
        ("model/wrong.cpp", '"train/trainer.h"', "model may not include train/trainer.h (train)"),
        ("base/wrong.cpp", "<gtest/gtest.h>", "base may not include gtest/gtest.h (gtest)"),
        ("base/wrong_test.cpp", '"model/model.h"', "base may not include model/model.h (model)"),
        ("base/wrong.h", '"error.h"', "base may not include error.h (error.h)"),
        ("new/wrong.h", "<vector>", "its folder is not in cmake/layers.tsv"),
    ],
)
def test_a_wrong_include_is_found(tmp_path, path, include, complaint):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(f"#include {include}\n")
    found = violations(tmp_path, read_table(ROOT / "cmake/layers.tsv"))
    assert len(found) == 1 and found[0].endswith(complaint), found


def test_right_includes_pass(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "base").mkdir()
    (tmp_path / "base/error.h").write_text("#include <fmt/format.h>\n#include <sys/mman.h>\n")
    (tmp_path / "model/model.cpp").write_text('#include <torch/torch.h>\n#include <vector>\n#include "base/error.h"\n')
    (tmp_path / "model/model_test.cpp").write_text("#include <gtest/gtest.h>\n")
    assert violations(tmp_path, read_table(ROOT / "cmake/layers.tsv")) == []

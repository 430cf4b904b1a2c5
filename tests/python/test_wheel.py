"""What a wheel installs must find its libraries wherever it is unpacked: no path of the machine that built it."""

import re
import shutil
import subprocess

import pytest


def test_installed_libraries_look_beside_themselves_alone(build, tmp_path):
    cmake, readelf = shutil.which("cmake"), shutil.which("readelf")
    if not cmake or not readelf:
        pytest.skip("cmake or readelf is missing")
    subprocess.run([cmake, "--install", build, "--component", "python", "--prefix", tmp_path], check=True, capture_output=True)
    libraries = sorted((tmp_path / "pathattn").glob("lib*.so*"))
    assert any(path.name == "libpathattn_operators.so" for path in libraries)
    for path in libraries:
        dynamic = subprocess.run([readelf, "--dynamic", "--wide", path], check=True, capture_output=True, encoding="utf-8").stdout
        run_paths = re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", dynamic)
        assert all(part == "$ORIGIN" for run_path in run_paths for part in run_path.split(":")), f"{path.name}: {run_paths}"
        assert not re.search(r"\(NEEDED\).*\[.*/", dynamic), path.name

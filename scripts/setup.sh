#!/usr/bin/env bash
# Installs what a build needs: setup.sh [PYTHON]
# Debian packages that are missing, through apt; then .venv with requirements.txt, unless PYTHON names a Python that has them already.
# Done twice, it does nothing the second time.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${1:-}

stop() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

# Package and the header it brings; the compiler says which are there, so that libraries from elsewhere count too.
headers="libhwy-dev:hwy/highway.h libcli11-dev:CLI/CLI.hpp libtomlplusplus-dev:toml++/toml.h nlohmann-json3-dev:nlohmann/json.hpp
         libfmt-dev:fmt/format.h libgtest-dev:gtest/gtest.h"

missing_packages() {
  local entry
  command -v "${CXX:-c++}" >/dev/null || echo g++
  command -v cmake >/dev/null || echo cmake
  command -v ninja >/dev/null || echo ninja-build
  for entry in $headers; do
    echo "#include <${entry#*:}>" | "${CXX:-c++}" -std=c++20 -M -x c++ - >/dev/null 2>&1 || echo "${entry%%:*}"
  done
  if [[ -z $python ]]; then
    python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    python3 -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || echo python3-dev
  fi
}

install_packages() {
  local packages=("$@") as_root=() by_hand
  by_hand="install these yourself, then run the same command again: apt-get install ${packages[*]}"
  command -v apt-get >/dev/null || stop "this machine has no apt-get, and these Debian packages (or their like) are missing: ${packages[*]}" \
    "install them with your system's package manager, then run the same command again"
  if ((EUID != 0)); then
    command -v sudo >/dev/null || stop "these packages are missing, and there is neither root nor sudo to install them" "$by_hand"
    as_root=(sudo)
  fi
  echo "setup: installing ${packages[*]}"
  as_root+=(env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0)
  "${as_root[@]}" update || stop "apt-get update failed: is the network up?" "$by_hand"
  "${as_root[@]}" install -y --no-install-recommends "${packages[@]}" >/dev/null || stop "apt-get install failed" "$by_hand"
}

make_venv() {
  local venv=$root/.venv stamp=$root/.venv/setup-stamp quiet=() wanted
  wanted="$root $(cksum <"$root/requirements.txt")"
  [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]] && return
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || stop "$(python3 --version) is too old: 3.11 or newer is needed, or PYTHON=/path/to/python that has torch"
  # An interrupted or moved .venv is made anew; a good one without a stamp is only brought up to date.
  "$venv/bin/python" -c 'import pip, sys; sys.exit(sys.prefix != sys.argv[1])' "$venv" 2>/dev/null || python3 -m venv --clear "$venv" ||
    stop "python3 -m venv failed: install python3-venv, or name a Python that has torch with PYTHON=/path/to/python"
  rm -f "$stamp"
  [[ -t 1 ]] || quiet=(-q)
  echo "setup: installing $(tr '\n' ' ' <"$root/requirements.txt")into .venv (PyTorch and its libraries are some gigabytes)"
  "$venv/bin/python" -m pip install --disable-pip-version-check "${quiet[@]}" -r "$root/requirements.txt" ||
    stop "pip could not fill .venv: is the network up, and is there 8 GB of disk?" "or name a Python that has torch already: make ... PYTHON=/path/to/python"
  echo "$root/build/release/python" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/pathattn.pth"
  echo "$wanted" >"$stamp"
}

check_python() {
  "$python" - <<'CHECK'
import importlib, sys

def load(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None

modules = {name: load(name) for name in ("torch", "numpy", "matplotlib", "pytest")}
missing = [name for name, module in modules.items() if module is None]
if missing:
    sys.exit(f"setup: {sys.executable} lacks {', '.join(missing)}: {sys.executable} -m pip install {' '.join(missing)}")
if tuple(int(part) for part in modules["torch"].__version__.split(".")[:2]) < (2, 8):
    sys.exit(f"setup: {sys.executable} has torch {modules['torch'].__version__}: 2.8 or newer is needed")
CHECK
}

mapfile -t packages < <(missing_packages)
if ((${#packages[@]})); then
  install_packages "${packages[@]}"
  mapfile -t packages < <(missing_packages)
  ((${#packages[@]} == 0)) || stop "still missing after apt-get install: ${packages[*]}"
fi
if [[ -n $python ]]; then
  [[ -x $python ]] || stop "PYTHON=$python is not a program that can be run"
  check_python
else
  make_venv
fi

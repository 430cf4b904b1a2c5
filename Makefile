# The commands that people type. CMake does the building, scripts/ the rest.
#   PYTHON=/path/to/python    use a Python that has torch already; without it .venv is made with the pinned one
#   PATHATTN_CUDA=AUTO|ON|OFF as in CMakeLists.txt
#   BUILD=build/release       the build folder; JOBS=2 how many compilers at once
PYTHON ?=
PATHATTN_CUDA ?= AUTO
BUILD ?= build/release
JOBS ?= $(shell nproc)
python := $(if $(PYTHON),$(or $(shell command -v $(PYTHON)),$(PYTHON)),$(CURDIR)/.venv/bin/python)

.DEFAULT_GOAL := help
.PHONY: help setup configure program build test bench demo demo-full format clean

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

setup:  ## install Debian packages and .venv, as far as they are missing
	@scripts/setup.sh $(if $(PYTHON),$(python))

configure: setup
	@cmake --preset release -B $(BUILD) -DPATHATTN_PYTHON="$(python)" -DPATHATTN_CUDA=$(PATHATTN_CUDA)

program: configure
	@cmake --build $(BUILD) --parallel $(JOBS) --target pathattn

build: configure  ## the pathattn program, the operators and the tests into build/release; .venv can then import pathattn
	@cmake --build $(BUILD) --parallel $(JOBS)

test: build  ## every test; the last line counts them
	@$(python) scripts/run_tests.py $(BUILD) --pytest tests

bench: build  ## time the CPU kernels against torch, on an otherwise idle machine; ends in runs/bench/
	@PATHATTN_BUILD="$(BUILD)" $(python) benchmarks/attention_cpu.py

demo: program  ## train and compare PaTH with RoPE (about 5 minutes of training on two cores); ends in runs/demo/report.html
	@$(python) scripts/demo.py $(BUILD)/pathattn runs/demo

demo-full: program  ## the same with RoPE, FoX, PaTH and PaTH-FoX, and twice the steps on text; ends in runs/demo-full/report.html
	@$(python) scripts/demo.py $(BUILD)/pathattn runs/demo-full --full

format: setup  ## clang-format all sources
	@git ls-files -z '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -0 $(or $(wildcard $(dir $(python))clang-format),clang-format) -i

clean:  ## remove build folders (runs/ and .venv stay)
	@rm -rf build

# `make demo` shows it, `make test` proves it. Each target sets up .venv itself and reuses it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(wildcard csrc/*)

.PHONY: help demo test check check-arm bench compare clean

help:
	@echo "make demo    install, fetch the default model, serve it, show a miss and a hit"
	@echo "make test    run all tests"
	@echo "make check   formatting, lint, types, import direction"
	@echo "make check-arm  kernels of 64-bit ARM, cross-compiled, in an emulator"
	@echo "make bench   measure this machine: anaphora bench (15 minutes)"
	@echo "make compare the same workloads to llama-server, vLLM and OpenVINO; writes docs/benchmarks.md"
	@echo "make clean   remove the environment and what was built"

define CHECK_PYTHON
import os, sys, sysconfig
debian = "on Debian: apt install python3-venv python3-dev g++"
if sys.version_info < (3, 11):
    sys.exit(f"Python is {sys.version.split()[0]}; Anaphora needs 3.11 or newer (make PYTHON=...)")
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    sys.exit(f"Python's headers are missing; {debian}")
endef
export CHECK_PYTHON

$(VENV)/created:
	@$(PYTHON) -c "$$CHECK_PYTHON"
	@command -v $${CXX:-g++} >/dev/null || (echo "g++ is missing; on Debian: apt install g++"; exit 1)
	@$(PYTHON) -m venv $(VENV) || \
	  (rm -rf $(VENV); echo "venv is missing; on Debian: apt install python3-venv"; exit 1)
	@touch $@

# The package itself, editable, with its compiled kernels.
$(VENV)/installed: $(VENV)/created $(SOURCES)
	@echo "installing into $(VENV); the first time takes one to two minutes"
	@$(BIN)/pip install --quiet --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(VENV)/installed
	@$(BIN)/python examples/demo.py

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Kernels of 64-bit ARM in an emulator; on Debian: apt install g++-aarch64-linux-gnu qemu-user
check-arm:
	@mkdir -p build
	CXX=aarch64-linux-gnu-g++ tests/native/build.sh build/kernels_agree_arm
	qemu-aarch64 -cpu max build/kernels_agree_arm 30
	qemu-aarch64 -cpu cortex-a72 build/kernels_agree_arm 2

bench: $(VENV)/installed
	@$(BIN)/anaphora bench

$(VENV)/installed-bench: $(VENV)/installed
	@$(BIN)/pip install --quiet --editable '.[bench]'
	@touch $@

# For example COMPARE="--venvs DIR --repeats 1"; each peer gets an environment of its own.
compare: $(VENV)/installed-bench
	@$(BIN)/python benchmarks/compare/compare.py --write $(COMPARE)

clean:
	rm -rf $(VENV) build .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

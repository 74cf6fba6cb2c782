# Needs python3 (3.11 or newer), pip and make; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FRAMEWORKS := $(VENV)/frameworks
NEWEST := $(VENV)/newest
PIP := $(BIN)/python -m pip --disable-pip-version-check
TYPED := ckptkit ckptkit_command.py $(VENV)/typing/ckptkit/cli $(VENV)/typing/ckptkit/schemas tests $(wildcard examples/*.py benchmarks/*.py docs/*.py)
TORCH := $(shell sed -n 's/^ *"\(torch==.*\)",$$/\1/p' pyproject.toml)
FOR ?= $(MAKECMDGOALS)
# The processes that tests start would compile ckptkit again each, where none may write what it compiles.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest

# Two that set up at once would damage .venv: they take turns, where there is a flock that works.
TURNS := $(shell flock -n -E 0 Makefile true 2>/dev/null && echo flock Makefile)
SET_UP = $(TURNS) $(MAKE) --no-print-directory FOR=$@

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-frameworks test-gpu bench clean base torch dev frameworks

help: ## show this
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile

demo: ## write a small sharded checkpoint and look at it; then, with torch, train, be killed, go on
	+@$(SET_UP) base
	$(BIN)/ckpt demo
	+@$(SET_UP) torch
	$(BIN)/python examples/kill_and_resume.py

test: ## set up with torch, then ruff, mypy and pytest
	+@$(SET_UP) dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)  # one process: on a busy machine its workers do not begin in time
	$(PYTEST) -n 4  # more than cores: some of the time is waiting

test-long: ## set up with torch, then the tests that take minutes each, and properties on many examples
	+@$(SET_UP) dev
	$(PYTEST) -n 2 -m "long or hypothesis" --hypothesis-profile=many

test-frameworks: ## install DeepSpeed, Megatron and others beside, and read what they write; try plugins on newest releases
	+@$(SET_UP) dev
	+@$(SET_UP) frameworks
	CKPTKIT_FRAMEWORKS=$(abspath $(FRAMEWORKS))/bin/python $(PYTEST) tests/foreign/frameworks tests/plugins/test_megatron.py tests/plugins/test_torchtitan.py tests/plugins/test_deepspeed.py
	rm -rf $(NEWEST) && $(PIP) install --no-deps --target $(NEWEST) accelerate lightning torch_checkpointing torchdata transformers
	PYTHONPATH=$(NEWEST) $(PYTEST) tests/plugins

test-gpu: ## set up with torch, then what needs a GPU, and jobs whose ranks share one
	+@$(SET_UP) dev
	CKPTKIT_TEST_DEVICE=cuda $(PYTEST) $(wildcard tests/*/test_cuda*.py) tests/parallel/ranks/test_nccl.py tests/parallel/optimizers/test_compression.py

bench: ## set up with torch, then measure side by side with peers
	+@$(SET_UP) dev
	$(BIN)/python -m benchmarks

clean: ## remove the environment, builds and caches
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

base torch dev frameworks: %: $(VENV)/%.stamp
	@:

# The stamps are older than pyproject.toml exactly when something has to be installed.
# Compiling all of torch and its neighbours takes longer than compiling what is imported.
$(VENV)/base.stamp: pyproject.toml $(VENV)/venv.stamp
	$(PIP) install --no-compile -e .
	@touch $@

# ckptkit itself is not installed again: its command may be running.
$(VENV)/torch.stamp: $(VENV)/base.stamp
	$(PIP) install --no-compile '$(TORCH)'
	@touch $@

# Collected once, what tests import is compiled once, and not by each of pytest's workers.
$(VENV)/dev.stamp: pyproject.toml $(VENV)/venv.stamp
	$(PIP) install --no-compile -e '.[dev]'
	@mkdir -p $(VENV)/typing/ckptkit
	@ln -sfn ../../../cli $(VENV)/typing/ckptkit/cli
	@ln -sfn ../../../schemas $(VENV)/typing/ckptkit/schemas
	@$(PYTEST) --collect-only -qq >/dev/null 2>&1 || true
	@touch $(VENV)/base.stamp $(VENV)/torch.stamp $@

# DeepSpeed looks for torch when it is built. Jobs of it and of torchtitan run ckptkit there.
$(VENV)/frameworks.stamp: tests/foreign/frameworks/requirements.txt $(VENV)/dev.stamp
	rm -rf $(FRAMEWORKS) && $(BIN)/python -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/pip install '$(TORCH)' setuptools wheel ninja py-cpuinfo
	DS_BUILD_OPS=0 $(FRAMEWORKS)/bin/pip install --no-build-isolation -e . -r tests/foreign/frameworks/requirements.txt
	@touch $@

# Some Debians ship venv without ensurepip: there the pip outside puts a pip inside.
# An old pip, such as that of Python 3.11, takes four times as long to find out what fits together.
$(VENV)/venv.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "ckptkit needs Python 3.11 or newer: make PYTHON=python3.11 $(FOR)" >&2; exit 1; }
	@rm -rf $(VENV)
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(VENV); else \
	  $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install pip; fi || { \
	  echo "$(PYTHON) cannot make a virtual environment: install its venv package" \
	    "(Debian, Ubuntu: apt install python3-venv), then run make again" >&2; exit 1; }
	$(PIP) install --no-compile 'pip>=25.1'
	@touch $@

# Every target sets up .venv by itself, once. Nothing else is needed but Python 3.10+, make and a C++ compiler.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip
TORCH  := torch==2.13.0
PYTEST := $(BIN)/python -m pytest

NATIVE_SOURCES := CMakeLists.txt pyproject.toml $(shell find csrc -name '*.cpp' -o -name '*.h')

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench wheel clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | column -t -s "$$(printf '\t')"

# torch and the build tools come first: then the package is built against them, without a build environment of its own.
$(VENV)/tools.done: Makefile
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet $(TORCH) numpy "scikit-build-core>=0.10" cmake ninja
	$(PIP) install --quiet pytest hypothesis ruff mypy safetensors typer rich
	touch $@

$(VENV)/package.done: $(VENV)/tools.done $(NATIVE_SOURCES)
	$(PIP) install --quiet --no-build-isolation --no-deps --editable .
	touch $@

$(VENV)/examples.done: $(VENV)/package.done examples/requirements.txt
	$(PIP) install --quiet --no-deps -r examples/requirements.txt
	touch $@

$(VENV)/bench.done: $(VENV)/examples.done benchmarks/requirements.txt
	$(PIP) install --quiet -r benchmarks/requirements.txt
	touch $@

setup: $(VENV)/package.done ## make .venv and build the package into it

demo: $(VENV)/examples.done ## quantize real networks and compare them with float
	$(BIN)/python examples/imagenet.py

test: $(VENV)/examples.done ## all tests
	$(PYTEST)

check: $(VENV)/package.done ## format, lint, types, fast tests: under a minute
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -q -m "not slow and not real"

format: $(VENV)/tools.done ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/bench.done ## measure against the peers (takes long)
	$(BIN)/python -m benchmarks

wheel: $(VENV)/tools.done ## build a wheel and try it in an empty environment
	rm -rf dist build/smoke
	$(PIP) wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	$(PYTHON) -m venv build/smoke
	build/smoke/bin/python -m pip install --quiet $(TORCH) numpy
	build/smoke/bin/python -m pip install --quiet --no-deps dist/*.whl
	cd build/smoke && bin/python -W error ../../tests/smoke.py

clean: ## remove everything that was built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

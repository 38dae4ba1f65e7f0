# Every target sets up .venv by itself, once. Nothing else is needed but Python 3.10+, make and a C++ compiler.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip
TORCH  := torch==2.13.0
TRITON := triton==3.9.0
JOBS   := $(shell getconf _NPROCESSORS_ONLN)
# A process a core, and threads that sleep while they wait for work: those of the other processes need the core.
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile
# The native tests need only a compiler and CMake, from the system or from .venv.
CMAKE  := PATH="$(CURDIR)/$(BIN):$$PATH" cmake

NATIVE_SOURCES := CMakeLists.txt pyproject.toml $(shell find csrc -name '*.cpp' -o -name '*.h')

.DEFAULT_GOAL := help
.PHONY: help setup demo voices test triton-test check format bench native-test native-test-arm wheel clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | column -t -s "$$(printf '\t')"

# torch and the build tools come first: then the package is built against them, without a build environment of its own.
$(VENV)/tools.done: Makefile
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet $(TORCH) numpy "scikit-build-core>=0.10" cmake ninja
	$(PIP) install --quiet pytest pytest-xdist hypothesis ruff mypy safetensors typer rich jinja2 onnx onnxscript onnxruntime
	$(PIP) install --quiet --no-deps $(TRITON)
	touch $@

$(VENV)/package.done: $(VENV)/tools.done $(NATIVE_SOURCES)
	@echo "building the native library: a few minutes"
	$(PIP) install --quiet --no-build-isolation --no-deps --editable .
	touch $@

$(VENV)/examples.done: $(VENV)/package.done examples/requirements.txt
	$(PIP) install --quiet --no-deps -r examples/requirements.txt
	touch $@

# The speaker encoder's test listens to synthetic voices. Without them it is skipped, and says so.
voices:
	@command -v flite >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  { apt-get install -y -qq --no-install-recommends flite >/dev/null || \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends flite >/dev/null; }; }; } || \
	  echo "no program flite (Debian: apt-get install flite): the speaker encoder's test will be skipped" >&2

$(VENV)/bench.done: $(VENV)/examples.done benchmarks/requirements.txt
	$(PIP) install --quiet -r benchmarks/requirements.txt
	touch $@

setup: $(VENV)/package.done ## make .venv and build the package into it

demo: $(VENV)/examples.done ## quantize real networks and compare them with float
	$(BIN)/python examples/imagenet.py

test: $(VENV)/examples.done voices ## all tests; those of the CUDA backend in a process of their own, where Triton interprets
	$(PYTEST) --ignore tests/cuda
	$(PYTEST) tests/cuda

triton-test: $(VENV)/examples.done ## the CUDA backend's kernels: in Triton's interpreter, or on a GPU where there is one
	$(PYTEST) tests/cuda

check: $(VENV)/package.done ## format, lint, types, a case of every fast test: under a minute
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -q --dist worksteal --sample 1 -m "not slow and not real" --ignore tests/cuda

format: $(VENV)/tools.done ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/bench.done ## measure against the peers (takes long)
	$(BIN)/python -m benchmarks

# The kernels alone, in a plain program: no torch, and every byte that they touch is watched. What is checked inline would
# make the unrolled kernels take minutes to compile; a null pointer and an object's end are AddressSanitizer's anyway.
SANITIZE := -fsanitize=address,undefined,float-cast-overflow -fno-sanitize=null,object-size -fno-sanitize-recover=all \
  --param asan-instrumentation-with-call-threshold=0 -Wno-maybe-uninitialized -Wno-uninitialized

native-test: ## the kernels' own tests, watched by AddressSanitizer and UndefinedBehaviorSanitizer
	$(CMAKE) -S . -B build/native-asan -DZEROPOINT_NATIVE_TESTS=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" -DCMAKE_CXX_FLAGS="$(SANITIZE)"
	$(CMAKE) --build build/native-asan --parallel $(JOBS)
	build/native-asan/zeropoint_kernel_tests

native-test-arm: ## the same tests built for 64-bit ARM, in an emulator (Debian: g++-aarch64-linux-gnu, qemu-user)
	$(CMAKE) -S . -B build/native-arm -DZEROPOINT_NATIVE_TESTS=ON \
	  -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake
	$(CMAKE) --build build/native-arm --parallel $(JOBS)
	qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu max build/native-arm/zeropoint_kernel_tests

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

# `make demo` and `make test` prepare what they need (.ci/environment) and use the torch that is
# there.  PYTHON names another Python, TORCH (such as 2.15.0) another release of torch, which gets an
# environment of its own; TESTS, BENCH and GPU narrow down what runs; WORKERS=0 runs the tests in one
# process.
PYTHON ?=
TORCH ?=
TESTS ?= tests
WORKERS ?= auto
BENCH ?=
DEMO ?=
GPU ?=

# What is compiled only to see that it is right: kernels without vector instructions, which take half
# as long to compile and change no schedule, on one thread, kept where the next run finds them.
LIGHT = OMP_NUM_THREADS=1 TORCHINDUCTOR_VEC_ISA_OK=0 TORCHINDUCTOR_CACHE_DIR="$(CURDIR)/.cache/inductor"

.PHONY: help demo demo-quick test test-slow test-all lint format docs bench-quick gpu build smoke-test clean

help:
	@echo "make demo         train a small GPT without a budget, at 40 % and at the minimum"
	@echo "make test         run the tests"
	@echo "make test-slow    those that take longest"
	@echo "make test-all     both, and those that repeat at length what others check in short"
	@echo "make lint         ruff and mypy"
	@echo "make format       let ruff format the code"
	@echo "make docs         the documentation as a site, in build/site"
	@echo "make bench-quick  every benchmark, small"
	@echo "make demo-quick   the demo, small"
	@echo "make gpu          what is promised for CUDA, on the GPU that is here"
	@echo "make build        sdist and wheel into dist/"
	@echo "make smoke-test   install what was built, and train with it without a compiler"
	@echo "make clean        remove what the others made, .venv included"
	@echo "TORCH=2.15.0 after any of them: with that release of torch"

demo:
	@python="$$(.ci/environment demo "$(PYTHON)" "$(TORCH)")" && "$$python" -m dtrcompile demo $(DEMO)

demo-quick:
	@python="$$(.ci/environment demo "$(PYTHON)" "$(TORCH)")" && $(LIGHT) "$$python" -m dtrcompile demo \
		--small --steps 3 --output .cache/demo-output

test: MARKS = not slow and not sweep
test-slow: MARKS = slow and not sweep
test test-slow:
	@python="$$(.ci/environment test "$(PYTHON)" "$(TORCH)")" && $(LIGHT) "$$python" -m pytest -n $(WORKERS) \
		--dist=worksteal --durations=25 -m "$(MARKS)" $(TESTS)

test-all:
	@python="$$(.ci/environment test "$(PYTHON)" "$(TORCH)")" && "$$python" -m pytest -n $(WORKERS) \
		--dist=worksteal $(TESTS)

lint:
	@python="$$(.ci/environment dev,demo "$(PYTHON)" "$(TORCH)")" && "$$python" -m ruff check . \
		&& "$$python" -m ruff format --check . && "$$python" -m mypy

format:
	@python="$$(.ci/environment dev,demo "$(PYTHON)" "$(TORCH)")" && "$$python" -m ruff check --fix . \
		&& "$$python" -m ruff format .

docs:
	@python="$$(.ci/environment docs "$(PYTHON)" "$(TORCH)")" && NO_MKDOCS_2_WARNING=1 "$$python" -m mkdocs \
		build --strict

bench-quick:
	@python="$$(.ci/environment test "$(PYTHON)" "$(TORCH)")" && $(LIGHT) TORCHINDUCTOR_COMPILE_THREADS=1 \
		"$$python" -m bench $(BENCH)

# With the Python that is there: a machine that is lent for an hour may have no network.
gpu:
	@"$(or $(PYTHON),python3)" -m bench.gpu $(GPU)

build:
	@python="$$(.ci/environment dev,demo "$(PYTHON)" "$(TORCH)")" && "$$python" -m build

smoke-test:
	@.ci/smoke-test "$(PYTHON)" "$(TORCH)"

clean:
	rm -rf .venv .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		demo-output
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

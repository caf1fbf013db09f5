# `make demo` and `make test` prepare what they need (.ci/environment) and use the torch that is
# there.  PYTHON names another Python; TESTS and BENCH narrow down what runs; WORKERS=0 runs the tests in
# one process.
PYTHON ?=
TESTS ?= tests
WORKERS ?= auto
BENCH ?= $(shell grep -l '^if __name__ == "__main__"' bench/*.py)
DEMO ?=

.PHONY: help demo test lint format bench-quick build clean

help:
	@echo "make demo         train a small GPT without a budget, at 40 % and at the minimum"
	@echo "make test         run the tests"
	@echo "make lint         ruff and mypy"
	@echo "make format       let ruff format the code"
	@echo "make bench-quick  every benchmark, small"
	@echo "make build        sdist and wheel into dist/"
	@echo "make clean        remove what the others made, .venv included"

demo:
	@python="$$(.ci/environment demo $(PYTHON))" && "$$python" -m dtrcompile demo $(DEMO)

test:
	@python="$$(.ci/environment test $(PYTHON))" && "$$python" -m pytest -n $(WORKERS) --dist=worksteal $(TESTS)

lint:
	@python="$$(.ci/environment dev,demo $(PYTHON))" && "$$python" -m ruff check . \
		&& "$$python" -m ruff format --check . && "$$python" -m mypy

format:
	@python="$$(.ci/environment dev,demo $(PYTHON))" && "$$python" -m ruff check --fix . \
		&& "$$python" -m ruff format .

bench-quick:
	@python="$$(.ci/environment test $(PYTHON))" && for script in $(BENCH); do \
		name="$$(basename "$$script" .py)"; echo "== bench.$$name --quick"; \
		"$$python" -m "bench.$$name" --quick || exit 1; \
	done

build:
	@python="$$(.ci/environment dev,demo $(PYTHON))" && "$$python" -m build

clean:
	rm -rf .venv .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		demo-output
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

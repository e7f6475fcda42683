# `make demo` and `make test` need Python 3.11+ and make, nothing else.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Everything has to have a hash that requirements/ lists. Then only torch and the package itself are left:
# tools/lock.py says why torch has none.
LOCKED := $(PIP) --require-hashes --no-deps
REST := $(PIP) --no-build-isolation -c constraints.txt
READY := $(VENV)/.ready
DEMO := $(if $(wildcard $(READY)),,$(VENV)/.demo)

.PHONY: demo test checks lint types contracts unit docs bench fuzz wheel wheel-twice clean

demo: $(DEMO)
	$(BIN)/factorpack demo

# The checks run beside the tests, which leave a core idle now and then.
test: $(READY)
	$(MAKE) --no-print-directory --jobs 2 checks unit

checks: lint types contracts

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

contracts: $(READY)
	$(BIN)/lint-imports

# Compiled files are kept whatever the environment says: tests start programs that import the package.
unit: $(READY)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

docs: $(READY)
	$(LOCKED) -r requirements/docs.txt
	$(REST) -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(READY)
	$(BIN)/python -m benchmarks.run benchmarks/experiments/speed

fuzz: $(READY)
	$(BIN)/python -m tools.fuzz --what reader --cases 1000000 --workers 0
	$(BIN)/python -m tools.fuzz --what sources,recipes,curves,checkpoints --cases 20000 --workers 0
	$(BIN)/python -m tools.fuzz --what folders,cli --cases 3000

wheel: $(READY)
	tools/wheel.sh dist $(BIN)/python

wheel-twice: $(READY)
	tools/wheel_twice.sh $(BIN)/python

$(READY): pyproject.toml constraints.txt requirements/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(LOCKED) -r requirements/dev.txt
	$(REST) -e ".[dev]"
	touch $(READY)

# Only what the demo needs; a ready development environment already has it.
$(VENV)/.demo: pyproject.toml constraints.txt requirements/demo.txt
	$(PYTHON) -m venv $(VENV)
	$(LOCKED) -r requirements/demo.txt
	$(REST) -e ".[demo]"
	touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

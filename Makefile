# Two commands on a fresh machine: `make train` and `make test`. Everything lives in .venv, but for
# Debian packages that `make test` installs as root.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
SOURCES := src tests examples benchmarks
AT_ONCE ?= 2
PYTEST := $(BIN)/python -m pytest
# Compiled once, also where Python is told to write no such files: every run that a test starts would compile all it loads.
tests = $(BIN)/python -m compileall -q src tests && $(PYTEST) -n $(AT_ONCE) --dist loadgroup --durations=15

.PHONY: train test test-all testbed-packages check format clean

train: .venv/runtime-installed ## train the digits example with two workers
	$(BIN)/manyhosts run --workers 2 examples/digits.py

test: .venv/dev-installed .venv/objects-installed .venv/plots-installed testbed-packages ## run the tests
	$(tests) -m "not slow"

test-all: .venv/dev-installed .venv/objects-installed .venv/plots-installed testbed-packages ## run the tests, the slow ones too, with examples not tried before
	$(tests) --hypothesis-profile=explore

testbed-packages: ## install the Debian packages that tests/cluster starts, where that is allowed
	@.ci/testbed-packages

check: .venv/dev-installed ## format, lint, types, floors, documents (whose blocks `make test` runs)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(PYTEST) tests/unit/test_floors.py tests/docs -m "not multiprocess"

format: .venv/dev-installed ## bring every file into the common format
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

clean: ## remove what `make` has made, but no runs
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build src/*.egg-info

# Files that say what is installed: newer than what asked for it, so that nothing is installed twice.
.venv/runtime-installed: requirements/runtime.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "manyhosts needs Python 3.11 or newer; give one with: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@torch=$$(grep '^torch==' requirements/runtime.txt | cut -d= -f3); \
	if nvidia-smi -L >/dev/null 2>&1; then echo "NVIDIA GPU found: installing torch $$torch with CUDA"; \
	else echo "no NVIDIA GPU found: installing torch $$torch as pinned, the build for CPUs where there is one"; fi; \
	echo "pip says nothing until it has downloaded all of it, which takes minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/runtime.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

.venv/dev-installed: .venv/runtime-installed requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	@touch $@

# A folder that tests of object stores put before the rest, for its botocore is another one. They skip where it is not there.
.venv/objects-installed: .venv/dev-installed requirements/objects.txt
	@rm -rf .venv/objects
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv/objects \
		-r requirements/objects.txt && touch $@ \
		|| { rm -rf .venv/objects; echo "tests of a real object store will be skipped: pip could not install what they need" >&2; }

# Likewise what draws plots: torchmetrics loads matplotlib wherever it finds it, which takes each worker a second.
.venv/plots-installed: .venv/dev-installed requirements/plots.txt
	@rm -rf .venv/plots
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv/plots \
		-r requirements/plots.txt && touch $@ \
		|| { rm -rf .venv/plots; echo "tests of plots will be skipped: pip could not install what they need" >&2; }

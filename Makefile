# Everything needs Python 3.11 or newer and nothing else; both targets set up .venv on their first run.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?= wukong
# Processes that share the tests: one a core, up to 2 GB of memory each.
JOBS ?= 2

.PHONY: whatif test check lint wheel-test clean
.DEFAULT_GOAL := whatif

# A stamp per set-up step, so that the second run skips what is done.
$(VENV)/.created:
	$(PYTHON) -c 'import sys; sys.exit("loka-sim needs Python 3.11 or newer; set PYTHON=" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

whatif: $(VENV)/.installed
	$(BIN)/loka-sim whatif $(MODEL)

# A file's tests share what they set up, so that one process runs them all; and each process computes in one thread.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The wheel, installed where there is no checkout, answers too.
wheel-test: $(VENV)/.installed-dev
	bash tests/wheel.sh $(BIN)/python

check: lint test wheel-test

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache

# Everything a fresh machine needs: Python 3.10 or newer and this file. All of it goes into .venv.
#
#   make demo     generate text with the bundled model, speculatively and plainly
#   make test     linters, types, arrows, the whole test suite
#
# PYTHON picks the interpreter, TORCH the build of PyTorch (a requirement as pip understands it); a CPU build is enough.

PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench figures clean

help:
	@sed -n '3,6s/^# *//p' Makefile

.venv/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "specla needs Python 3.10 or newer: make PYTHON=...")'
	@$(PYTHON) -m venv .venv || { echo "no venv in $(PYTHON): on Debian, apt-get install python3-venv"; exit 1; }
	@echo "installing $(TORCH) into .venv (once)"
	@$(PIP) install '$(TORCH)'
	@touch $@

.venv/.core: .venv/.torch pyproject.toml
	@echo "installing specla into .venv"
	@$(PIP) install -e .
	@touch $@

.venv/.dev: .venv/.core
	@echo "installing the tools of development into .venv"
	@$(PIP) install -e '.[dev]'
	@touch $@

setup: .venv/.dev

define DEMO_CODE
class Rectangle:
    @property
    def width(self):
        """Return the width of the rectangle."""
        return self._width

    @property
    def height(self):
        """Return the height
endef
define DEMO_PROSE
The sea was calm that morning. The old captain
endef
export DEMO_CODE DEMO_PROSE

demo: .venv/.core
	@echo "== code, by the trained drafter and by lookup (accepted drafts are green on a terminal)"; echo
	@$(BIN)/specla generate -p "$$DEMO_CODE" --max-tokens 140 --temperature 0.8 --seed 6 --compare
	@echo; echo "== fresh prose at a temperature, the hard case: the same text, and little or no gain"; echo
	@$(BIN)/specla generate -p "$$DEMO_PROSE" --max-tokens 110 --temperature 0.7 --top-p 0.9 --seed 5 --compare

lint: .venv/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest -n 2 --dist worksteal

bench: .venv/.core
	@$(BIN)/specla bench generate $(ARGS)

figures: .venv/.dev
	$(BIN)/python docs/figures/round.py
	$(BIN)/python docs/figures/rounds.py

clean:
	rm -rf .venv build dist specla.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

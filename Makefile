# One target per habit, the same for people and for CI. `make demo` and `make test` need nothing before them.

PYTHON ?= python3
VENV ?= .venv
# Optional: a further package index to take torch from, for example https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)
QUESTION ?= What is a good breakfast? Answer in one sentence.

.PHONY: help install demo serve bench test test-fast test-slow test-gpu lint types clean distclean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(STAMP) ## virtual environment with everything, in .venv

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Choral needs Python 3.11 or newer: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@echo "Installing into $(VENV); the first time this takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt $(TORCH)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: install ## one question, four samples, live: starts a server, asks, stops it
	$(BIN)/choral sample "$(QUESTION)" -n 4 --max-tokens 64 --temperature 0.5 --top-p 0.9

serve: install ## serve the embedded model on port 8000
	$(BIN)/choral serve

bench: install ## speed of a server started for it, and the engine's step over its floor; BENCH="..." adds options
	$(BIN)/choral bench --serve --floor --charts docs/performance $(BENCH)

test: install ## all tests but the slow ones and those for a GPU
	$(BIN)/python -m pytest -m "not gpu and not slow"

test-fast: install ## the tests that need no Ray
	$(BIN)/python -m pytest -m "not gpu and not slow and not ray"

test-slow: install ## the tests that take minutes
	$(BIN)/python -m pytest -m "slow and not gpu" || [ $$? -eq 5 ]  # 5: no test is marked so

test-gpu: install ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

lint: install ## style, formatting and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: install ## mypy, strict
	$(BIN)/mypy

clean: ## remove caches and build leftovers
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean ## and the virtual environment
	rm -rf $(VENV)

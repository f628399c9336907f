# The two commands of this repository are `make demo` and `make test`; both install what they need first.

VENV ?= .venv
PY := $(VENV)/bin/python
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo test pytest lint format install clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: install ## Train a small GPT on real text with 4 processes on the CPU (about 4 minutes); results in runs/demo
	@$(PY) -m lt_parallel.demo

test: lint pytest ## Check style and types, then run every quick test (about 20 minutes on 2 cores)

lint: install ## Check style and types only
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

pytest: lint
	$(PY) -m pytest

format: install ## Format the code and fix what can be fixed
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

install: ## Make .venv and install into it, unless that is done already
	@sh scripts/setup_venv.sh $(VENV)

clean: ## Remove caches and the demo's results; .venv stays
	rm -rf runs/demo runs/demo.previous dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

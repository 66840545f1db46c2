PYTHON ?= python3
REQUIREMENTS ?= -r requirements-cpu.txt
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help setup demo test test-all lint format clean

help:             ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

setup: $(STAMP)   ## Create .venv and install everything into it (on CUDA: make setup REQUIREMENTS="-e .[dev]")

$(STAMP): pyproject.toml requirements-cpu.txt packaging/fbgemm-gpu-cpu-shim/pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(REQUIREMENTS)
	$(BIN)/python -m pip check --disable-pip-version-check
	@touch $(STAMP)

demo: setup       ## Train a DLRM privately on synthetic clicks: its AUC and privacy report
	$(BIN)/python -m lightning_dpsparse fit --config recipes/dlrm_lazydp.yaml

test: setup       ## Run the test suite without what is marked slow
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-all: setup   ## Run all tests: also the same laws at larger sizes
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: setup       ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup     ## Rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:            ## Remove what runs and builds leave behind
	rm -rf .venv build *.egg-info lightning_logs .pytest_cache .mypy_cache .ruff_cache

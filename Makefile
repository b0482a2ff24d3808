# Loraplex: `make help` lists what there is to do.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := $(shell grep -E '^torch==' constraints.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := loraplex common registry router worker tools docker bench examples tests

.PHONY: help setup demo up test compose-env compose-test lint format proto docs bench bench-adapters gpu-check clean

help: ## Show this help.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 16

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python found: install Python 3.11 or 3.12, or say make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 12) else 1)' || \
		{ echo "Loraplex needs Python 3.11 or 3.12, and $(PYTHON) is $$($(PYTHON) --version): say make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "Cannot make a virtual environment: install the venv module (on Debian: apt install python3-venv)"; rm -rf $(VENV); exit 1; }

# torch comes first and alone, pinned, so that nothing else chooses another build of it.
$(VENV)/.runtime: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing Loraplex and what it needs at run time into $(VENV) (a few minutes the first time)"
	@$(PIP) install --quiet --constraint constraints.txt $(TORCH)
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[registry,router,worker,examples]'
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "Installing the test and lint tools into $(VENV)"
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

setup: $(VENV)/.dev ## Install everything into .venv.

demo: $(VENV)/.runtime ## Install, start a private cluster, and stream answers of the base and every example adapter.
	@$(BIN)/loraplex demo

up: $(VENV)/.runtime ## Run a local cluster with the example adapters until Ctrl-C.
	@trap : INT; $(BIN)/loraplex up --demo-adapters || [ $$? -eq 130 ] # Ctrl-C is how it ends, not an error

test: $(VENV)/.dev ## Install and run every test.
	@$(BIN)/python -m pytest tests/unit tests/kernels -n 2 --dist loadfile
	@$(BIN)/python -m pytest tests/integration tests/e2e

compose-env: ## Put a fresh cluster token and API key for docker compose into .env, for you only; keeps what is there.
	@$(PYTHON) docker/compose_env.py

compose-test: $(VENV)/.runtime ## Build the images, run the compose cluster, kill and scale it, where a Docker engine can be had.
	@$(BIN)/python -m tools.compose_test $(COMPOSE_TEST_ARGS)

lint: $(VENV)/.dev ## Check style, types, import rules, dependencies, protos, stubs, docs and deployment files.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/deptry .
	cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf format --diff --exit-code
	$(BIN)/python -m tools.generate_protos --check
	$(BIN)/python -m tools.document_settings --check
	$(BIN)/python -m tools.check_deployment
	@tag=$$(git describe --tags --abbrev=0 2>/dev/null || true); if [ -n "$$tag" ]; then \
		$(BIN)/buf breaking protos --against ".git#tag=$$tag,subdir=protos" || echo "(breaking changes since $$tag: advisory until 1.0)"; \
	else echo "buf breaking: no tag yet to compare with"; fi

format: $(VENV)/.dev ## Format the code and the protos.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	cd protos && ../$(BIN)/buf format --write

proto: $(VENV)/.dev ## Generate the gRPC stubs from protos/.
	$(BIN)/python -m tools.generate_protos

docs: $(VENV)/.dev ## Write docs/configuration.md from the settings classes.
	$(BIN)/python -m tools.document_settings

bench: $(VENV)/.dev ## Measure serving (some ten minutes): base, 1, 8 and 32 adapters at 1, 8 and 32 streams, sampling, unused adapters.
	$(BIN)/python -m bench.serving

bench-adapters: $(VENV)/.dev ## Measure adapters that come and go (some 25 minutes): crowded devices, cold loads, 5 000 random operations, faults.
	$(BIN)/python -m bench.tiers
	$(BIN)/python -m bench.churn
	$(BIN)/python -m bench.poison

gpu-check: $(VENV)/.dev ## Check and time the Triton kernels on a CUDA GPU (minutes); results go to bench/results/.
	$(BIN)/python -m bench.gpu_check

clean: ## Remove what was built here; caches in your home stay.
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

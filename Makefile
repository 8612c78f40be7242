# Targets: `make help` lists them.
PYTHON ?= python3
# Without a GPU the CPU build of torch: from its own index, else (no such index here) whatever `torch==2.13.0` gives.
# With one, or with another index: make setup TORCH='torch --index-url URL'
CPU_TORCH = --retries 0 --timeout 10 --index-url https://download.pytorch.org/whl/cpu torch==2.13.0
TORCH ?= $(shell command -v nvidia-smi >/dev/null && echo torch)
BIN := .venv/bin
USUAL := not sglang and not slow and not docker

.PHONY: help setup demo test test-slow test-sglang test-docker test-hosts lint fmt types laws docs pictures clean

help: ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: .venv/ready ## .venv with everything for one machine

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("agentrl needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo 'setting .venv up: torch, then agentrl and its tools; two minutes or so'
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(if $(TORCH),$(BIN)/pip install -q $(TORCH),$(BIN)/pip install -q $(CPU_TORCH) 2>/dev/null || $(BIN)/pip install -q torch==2.13.0)
	@$(BIN)/pip install -q -e '.[dev]' && touch .venv/ready

demo: setup ## the whole loop on this machine: engines, sandboxes, training, publication
	$(BIN)/agentrl run recipes/local.toml

test: setup ## everything that runs on any Linux machine
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m '$(USUAL)' tests/repo tests/laws tests/sim tests/unit
	$(BIN)/python -m pytest -q -m '$(USUAL)' tests/contract tests/live

test-slow: setup ## the tests that take minutes
	$(BIN)/python -m pytest -q -m 'slow and not sglang and not docker'

test-sglang: setup ## the engine contract against real SGLang on the CPU, in its own environment
	$(BIN)/python tests/live/sglang/setup.py && AGENTRL_SGLANG_PYTHON=.venv-sglang/bin/python $(BIN)/python -m pytest -q -m sglang

test-docker: setup ## the sandbox contract against a Docker engine of its own (root; apt-get install docker.io debootstrap busybox-static)
	tests/live/docker/images.sh "$${AGENTRL_DOCKER_CACHE:-$$HOME/.cache/agentrl-docker}" && $(BIN)/python -m pytest -q -m docker

test-hosts: setup ## runs over three machines with real sshd in network namespaces: links cut, controller killed (root; apt-get install openssh-server)
	$(BIN)/python -m pytest -q -s tests/live/test_three_hosts.py

lint: setup ## style
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

fmt: setup ## put the style right
	$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format .

types: setup ## strict types
	$(BIN)/mypy

laws: setup ## a long seeded sweep of the scheduler's laws
	$(BIN)/python -m pytest -q tests/laws

docs: setup ## refresh what the documents take from the source
	$(BIN)/python scripts/refresh_docs.py

pictures: setup ## draw the pictures of the documents anew
	$(BIN)/python scripts/tui_pictures.py && $(BIN)/python scripts/report_pictures.py

clean: ## remove what was made
	rm -rf .venv .venv-sglang build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

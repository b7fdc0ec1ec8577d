# Everything happens in .venv, made with the first Python of 3.11 or later; it is installed again only when
# pyproject.toml or constraints.txt change. Pass arguments on with ARGS: make demo ARGS="--seconds 30".

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# Libraries are compiled as they are used: all 12,000 files would take pip the better half of its time.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt
ARGS ?=

# Bytecode is kept, whatever the machine's habit: else each of hundreds of processes compiles all sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-long soak soak-plane soak-agent fuzz lint client test-wheel vllm-env test-vllm clean
.DEFAULT_GOAL := help

help: ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target text; do printf '%-12s %s\n' "$$target" "$$text"; done

demo: .venv/.run ## Run the demo: an engine, an agent with two volumes, and the advisor with its admin page.
	$(BIN)/kvadvisor demo $(ARGS)

test: .venv/.test ## Run the tests, three at a time: many of them wait; those marked long are left out.
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not long" $(ARGS)

test-long: .venv/.test ## Run all tests, the long ones too, with four times the examples; takes twice as long.
	KVADVISOR_LONG=1 $(BIN)/python -m pytest -n 3 --dist worksteal --timeout 600 $(ARGS)

soak: .venv/.test ## Kill demos thirty times at random moments and verify after each; takes minutes.
	$(BIN)/python -m tests.crash.killed_demo $(ARGS)

soak-plane: .venv/.test ## Disturb the event plane, and kill what takes part in it, at random; takes half an hour.
	KVADVISOR_FAULT_EXAMPLES=200 $(BIN)/python -m pytest --timeout 0 tests/property/test_fault_proxy*.py $(ARGS)
	$(BIN)/python -m tests.crash.killed_plane

soak-agent: .venv/.test ## Cut an agent's life short at every change of its volumes; takes a quarter of an hour.
	KVADVISOR_EVERY_CHANGE=1 $(BIN)/python -m pytest --timeout 0 tests/crash/test_every_change_cut.py tests/crash/test_clients_killed.py tests/crash/test_object_volume_after_kill.py $(ARGS)

fuzz: .venv/.fuzz ## Fuzz every decoder for a minute each; ARGS names targets and --seconds.
	$(BIN)/python -m tests.fuzz.run $(ARGS)

lint: .venv/.test ## Check style, types and the rooms' import arrows.
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

client: .venv/.test ## Generate the typed client of the REST API and build its wheel in dist.
	rm -rf build/client && mkdir -p build/client
	$(BIN)/python tests/api/openapi_document.py build/client/openapi.json
	$(BIN)/openapi-python-client generate --path build/client/openapi.json --config deploy/client.yaml --meta setup --output-path build/client/package --fail-on-warning
	$(BIN)/python -m build --quiet --wheel --outdir dist build/client/package

test-wheel: .venv/.test ## Build the wheel, install it in a fresh environment and run the demo from it.
	.ci/test-wheel $(BIN)/python

vllm-env: ## Make .venv-vllm, with vLLM's CPU build and this project; 4 GB and some minutes.
	"$(PYTHON)" tests/vllm/make_env.py .venv-vllm

test-vllm: ## Run the tests with a real vLLM, in the environment that vllm-env made; takes ten minutes.
	@test -x .venv-vllm/bin/python || { echo "There is no .venv-vllm: run make vllm-env first."; exit 1; }
	@test .venv-vllm/made -nt pyproject.toml || { echo "pyproject.toml is newer than .venv-vllm: run make vllm-env again, which adds what is missing."; exit 1; }
	.venv-vllm/bin/python -m pytest tests/vllm $(ARGS)

clean: ## Remove .venv and everything built.
	rm -rf .venv dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" && "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvadvisor needs Python 3.11 or later: install it, or name it with make PYTHON=/path/to/python3.11"; exit 1; }
	"$(PYTHON)" -m venv .venv

.venv/.run: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing kvadvisor into .venv; the first time takes a minute or two, most of it PyTorch."
	@$(PIP) -e .
	@echo "Compiling the index's kernels; once, half a minute, or two minutes on a busy machine."
	@$(BIN)/kvadvisor warm
	@touch $@

.venv/.test: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing kvadvisor and its tests into .venv; the first time takes a minute or two, most of it PyTorch."
	@$(PIP) -e '.[test,lint]'
	@echo "Compiling all kernels and tests; once, about a minute."
	@# Tests here, rather than in each worker of the first run; what is wrong with one, that run says.
	@$(BIN)/python -m pytest --collect-only --quiet > /dev/null 2>&1 & $(BIN)/kvadvisor warm --replays && { wait $$! || true; }
	@touch .venv/.run $@

.venv/.fuzz: .venv/.test
	@$(PIP) -e '.[fuzz]'
	@touch $@

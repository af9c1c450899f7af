# `make demo` and `make test` work on a fresh machine: they make .venv first, once.

VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.cakegen-ready
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-rest test-all test-long lint format check export mutate bench gpu-test emulate-full docs wheel clean

help: ## Show the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(READY) ## Make the environment

$(READY): pyproject.toml tools/setup.sh tools/lock.txt
	@tools/setup.sh $(VENV)
	@touch $@

DEMO ?=

demo: $(READY) ## Plan, compile, run and compare a layer: on a GPU, else emulated; DEMO=--full for all the rest
	@$(BIN)/cakegen demo $(DEMO)

PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

test: lint check ## Lint, types, the generated tree, and tests of every code path that need no GPU
	@$(PYTEST) -m "not gpu and not long and not thorough"

test-rest: $(READY) ## What `make test-all` runs beside `make test`: the same paths with all keys, values and schedules
	@$(PYTEST) -m "thorough and not gpu and not long"

test-all: test ## `make test`, then `make test-rest`
	@$(MAKE) --no-print-directory test-rest

test-long: $(READY) ## What takes hours and no GPU, for a release: all recorded values, 100,000 mutations a format
	@$(PYTEST) -m "long and not gpu" --timeout 0

lint: $(READY) ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(READY) ## Rewrite Python files and the kernels' headers in the project's layout
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i templates/kernels/*.cuh

check: $(READY) ## The generated tree is what its exports and templates say
	@$(BIN)/cakegen export --check

export: $(READY) ## Write the generated tree
	@$(BIN)/cakegen export

MUTATE ?= --jobs $(JOBS)

mutate: $(READY) ## Break the small model's programs on purpose and count what the emulator notices; an hour, resumable
	@$(BIN)/cakegen mutate --programs benchmarks/mutation/programs.txt \
		--explained benchmarks/mutation/explained.json $(MUTATE)

BENCH ?= --rows main

bench: $(READY) ## Measure on this machine's GPU; BENCH="--rows decode" and other options of `cakegen bench`
	@$(BIN)/cakegen bench $(BENCH)

gpu-test: $(READY) ## The tests that launch; need a supported GPU
	@$(BIN)/python -m pytest -q -m gpu tests/gpu

SWEEP := $(BIN)/python tests/support/emulator/sweep.py

emulate-full: $(READY) ## What the tables of emulated programs lack: about six hours of one core for all
	@$(SWEEP) benchmarks/emulator/tiny.tsv --jobs $(JOBS) --edges --seeds 5
	@$(SWEEP) benchmarks/emulator/full.tsv --jobs $(JOBS) --export kimi_k3_latent_moe --seeds 0 --match decode:
	@$(SWEEP) benchmarks/emulator/full_prefill.tsv --jobs $(JOBS) --export kimi_k3_latent_moe --seeds 0 \
		--match '^(front|tail)' --parts
	@$(SWEEP) benchmarks/emulator/tiny_sm90.tsv --jobs $(JOBS) --arch sm_90a --edges --seeds 5
	@$(SWEEP) benchmarks/emulator/full_sm90.tsv --jobs $(JOBS) --arch sm_90a --export kimi_k3_latent_moe \
		--match decode: --seeds 5 --split

DOCS_READY := $(VENV)/.cakegen-docs-ready

$(DOCS_READY): $(READY) tools/lock-docs.txt
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check \
		--require-hashes --requirement tools/lock-docs.txt
	@touch $@

docs: $(DOCS_READY) ## Build build/site from README.md, docs/ and docstrings; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "written: build/site/index.html"

wheel: $(READY) ## Build dist/*.whl and the source distribution
	@$(BIN)/python -m build --no-isolation --outdir dist

clean: ## Remove the environment and what the tools left
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .mypy_cache .hypothesis

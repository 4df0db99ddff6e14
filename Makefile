# `make help` lists the targets. Python and its packages: tools/environment.py says which are used and installs what is
# missing.
PYTHON ?= python3
ARGS ?=
JOBS ?= 2
GPU_JOBS ?= 0
RUN = $(PYTHON) tools/environment.py
QUIET = $(if $(filter 1,$(V)),,@)

PROOFS = $(addprefix prove-, crash flips io memory interrupts ranks races soak)
.PHONY: help build demo quick test test-slow test-all test-gpu sanitize $(PROOFS) lint format check-cuda docs wheel wheels env clean distclean
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## *' '/^[a-z-]+:.*##/ { printf "%-12s %s\n", $$1, $$2 }' Makefile
	@printf "%-12s %s\n" "prove-NAME" "a proof of docs/reliability.md, 15 minutes on 2 cores; NAME: $(PROOFS:prove-%=%)"

build:  ## compile what changed of the extension, in place, and install that editable (V=1: whole commands)
	$(QUIET)$(RUN) --extras build -- setup.py $(if $(QUIET),--quiet) build_ext --inplace
	$(QUIET)$(RUN) --extras build --editable

demo: build  ## teach a Llama to answer within less memory than its states take (examples/finetune_llm.py)
	$(RUN) --extras build,examples --editable -- examples/finetune_llm.py --demo $(ARGS)

PYTEST = OMP_NUM_THREADS=$(or $(OMP_NUM_THREADS),1) $(RUN) --extras build,test -- -m pytest -n $(JOBS) --dist worksteal

QUICK = tests/test_bits.py tests/chunk tests/config $(addprefix tests/checkpoint/test_, blocks.py codec.py \
  engine_checkpoints.py resume.py shards.py) $(addprefix tests/engine/test_, engine.py equality.py step_state.py) \
  $(addprefix tests/plan/test_, placement.py plan_choice.py planner.py simulator.py)

quick: build  ## equality of numbers, checkpoints, planner, configuration: a minute, after each edit
	$(PYTEST) -m "not gpu and not slow" $(QUICK) $(ARGS)

test: build  ## the tests that need no GPU, but slow ones, two at a time (JOBS=1 ARGS="tests/optim -k adam")
	$(PYTEST) -m "not gpu and not slow" $(ARGS)

test-slow: build  ## the slow ones alone (ARGS="tests/examples": a part)
	$(PYTEST) -m "not gpu and slow" $(ARGS)

test-all: build  ## both
	$(PYTEST) $(ARGS)

test-gpu: build  ## the tests that need one, or several, GPUs (GPU_JOBS=4: four at a time)
	$(RUN) --extras build,test -- -m pytest -m "gpu and not alone" -n $(GPU_JOBS) --dist worksteal $(ARGS)
	$(RUN) --extras build,test -- -m pytest -m "gpu and alone" $(ARGS)

sanitize:  ## the core's tests under ASan and UBSan, then under TSan (tools/sanitize.py; some 15 minutes)
	$(RUN) --extras build,test -- tools/sanitize.py --jobs $(JOBS) $(ARGS)

$(PROOFS): prove-%: build
	$(RUN) --extras build,test -- -m proofs $* $(ARGS)

CXX_FILES = $(shell find csrc tools proofs -name '*.h' -o -name '*.cpp' -o -name '*.inl' -o -name '*.cu')

lint:  ## ruff, clang-format, the layers of csrc and patrickstar, and the language of comments and pages
	$(RUN) --extras lint -- -m ruff check .
	$(RUN) --extras lint -- -m ruff format --check .
	$(RUN) --extras lint -- -c 'from clang_format import clang_format; clang_format()' --dry-run -Werror $(CXX_FILES)
	$(PYTHON) tools/check_layers.py
	$(PYTHON) tools/check_imports.py
	$(PYTHON) tools/check_language.py

format:  ## let ruff and clang-format format the files
	$(RUN) --extras lint -- -m ruff format .
	$(RUN) --extras lint -- -c 'from clang_format import clang_format; clang_format()' -i $(CXX_FILES)

check-cuda:  ## compile and link the CUDA part without a GPU or a CUDA PyTorch (downloads 0.8 GB once, into .cache)
	$(RUN) --extras build -- tools/check_cuda.py

docs: build  ## docs/ as HTML, into build/docs
	$(RUN) --extras docs --apart docs -- -m sphinx --fail-on-warning --keep-going --quiet docs build/docs
	@echo build/docs/index.html

wheel:  ## build, check and try a wheel for the PyTorch that is here, into dist/ (ARGS="--torch 2.6.0 2.13.0")
	$(RUN) --extras build,wheel -- tools/wheel.py $(ARGS)

wheels:  ## CPU and CUDA wheels for all supported versions of PyTorch, into dist/ (downloads 9 GB once, into .cache)
	$(RUN) --extras build,wheel -- tools/wheel.py --matrix --second $(ARGS)

env:  ## what this machine offers, what is missing, what mends it
	$(RUN) -- -m patrickstar.env

clean:  ## what was built
	rm -rf build dist docs/_pictures demo-output gpt2-output clue-output llm-output long-context-output *.egg-info patrickstar/*.so .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean  ## that, the virtual environment and the downloads
	rm -rf .venv .cache

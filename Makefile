# `make help` lists the targets. Every target sets up what it needs in .venv; nothing is installed outside it.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= results/runs
TRACE ?=
# As it was typed, blanks and dollars too; commands read it from the environment.
override TRACE := $(value TRACE)
export TRACE
CONFIG ?=
SET ?=
WHOLE_TRACE = case "$$TRACE" in /*|'~'*) trace=$$TRACE;; *) trace=$$PWD/$$TRACE;; esac
SETS := $(foreach item,$(SET),--set '$(item)')
# Other settings go to another folder, so that no table or report has two worlds under one name.
SET_NAME := $(if $(SET),-$(shell printf '%s' '$(SET)' | tr -cs 'A-Za-z0-9._=' '-' | cut -c1-120))
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(PYTHON) is $$($(PYTHON) -V 2>&1), expected Python 3.11 or newer; set PYTHON=" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e .
	@touch $@

$(VENV)/.gpu: $(VENV)/.base
	$(BIN)/python -m pip install -q -e '.[gpu]'
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install -q -e '.[dev]'
	@touch $@

setup: $(VENV)/.base ## install what simulating needs (no torch)

simulate: $(VENV)/.base ## compare the four policies in the simulator (TRACE=path replays a trace, CONFIG=sweep.yaml another sweep)
ifneq ($(TRACE),)
	@name=$$(basename -- "$$TRACE"); $(WHOLE_TRACE); set -x; \
	$(BIN)/python -m sim sweep $(or $(CONFIG),sim/configs/trace.yaml) --set "workload.path=$$trace" $(SETS) --out "$(OUT)/trace-$${name%.*}$(SET_NAME)"
else
	$(BIN)/python -m sim sweep $(or $(CONFIG),sim/configs/sweep.yaml) $(SETS) --out $(OUT)/$(basename $(notdir $(or $(CONFIG),simulate)))$(SET_NAME)
endif

SLO ?=
capacity: $(VENV)/.base ## the highest rate at which objectives hold (TRACE=path SLO=ttft_ms=500,itl_ms=20,share=0.99; CONFIG= another run or sweep)
ifneq ($(TRACE),)
	@name=$$(basename -- "$$TRACE"); $(WHOLE_TRACE); set -x; \
	$(BIN)/python -m sim capacity $(or $(CONFIG),sim/configs/capacity.yaml) --set "workload.path=$$trace" $(SETS) $(if $(SLO),--slo '$(SLO)') --out "$(OUT)/capacity-$${name%.*}$(SET_NAME)"
else
	@[ -n "$(CONFIG)" ] || { echo "make capacity: expected TRACE=path or CONFIG=path" >&2; exit 2; }
	$(BIN)/python -m sim capacity $(CONFIG) $(SETS) $(if $(SLO),--slo '$(SLO)') --out $(OUT)/capacity-$(basename $(notdir $(CONFIG)))$(SET_NAME)
endif

# A file with a `grid` is a sweep, any other a single run.
GPU_CONFIG := $(or $(CONFIG),executor/configs/serving.yaml)
gpu-run: $(VENV)/.gpu ## run the four policies with real kernels on a GPU (CONFIG= another run or sweep, DEVICE=cpu without one)
	$(BIN)/python -m executor $$(grep -q '^grid:' $(GPU_CONFIG) && echo sweep || echo run) $(GPU_CONFIG) --device $(or $(DEVICE),cuda) $(SETS)

profile: $(VENV)/.gpu ## measure what batches cost on a GPU, for the simulator to fit (PROFILE= file, MODEL=, QUICK=1, DEVICE=cpu)
	$(BIN)/python -m executor profile --model $(or $(MODEL),ouro-1.4b) --device $(or $(DEVICE),cuda) $(if $(QUICK),--quick) --out $(or $(PROFILE),$(OUT)/profile.csv)

# The runs are this machine's GPU's where there is one, else those kept of GPU=; MEASURED= names others. The simulator is GPU='s.
GPU ?= h200
REPEATS ?= 3
MEASURED ?=
compare: $(VENV)/.base ## hold the simulator against a GPU's runs, measured here or kept in results/reference (GPU=, MEASURED=)
	@[ -n "$(MEASURED)" ] || ! nvidia-smi -L > /dev/null 2>&1 || $(MAKE) --no-print-directory measure
	@rm -rf $(OUT)/compare/sim
	@measured="$(or $(MEASURED),$$(nvidia-smi -L > /dev/null 2>&1 && echo $(OUT)/compare/gpu || echo results/reference/$(GPU)/recorded))"; \
	$(BIN)/python -m sim predict "$$measured" --device $(GPU) --out $(OUT)/compare/sim || [ $$? = 1 ] || exit 2; \
	$(BIN)/python -m results compare $(OUT)/compare/sim "$$measured" --out $(OUT)/compare

measure: $(VENV)/.gpu ## the runs of `make compare` on a GPU, resumable (REPEATS=, TRACE=AzureLLMInferenceTrace_conv.csv adds its part)
	$(BIN)/python -m executor sweep executor/configs/compare-serving.yaml executor/configs/compare-prefill.yaml executor/configs/compare-pressure.yaml $(SETS) --repeats $(REPEATS) --out $(OUT)/compare/gpu
ifneq ($(TRACE),)
	@$(WHOLE_TRACE); set -x; \
	$(BIN)/python -m executor sweep executor/configs/compare-azure.yaml --set "workload.path=$$trace" --repeats $(REPEATS) --out $(OUT)/compare/gpu
else
	@echo "left out: the Azure trace, TRACE= does not name it" >&2
endif

bench-gpu: $(VENV)/.gpu ## this executor beside a plain eager loop on one GPU
	$(BIN)/python -m executor peer-bench

bench: $(VENV)/.base ## simulated iterations per second, start-up time, memory
	$(BIN)/python -m sim bench

test: $(VENV)/.dev ## run all tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/.dev ## check style and types; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## remove the environment and all run outputs
	rm -rf $(VENV) results/runs *.egg-info

.PHONY: help setup simulate capacity gpu-run profile compare measure bench-gpu bench test lint clean

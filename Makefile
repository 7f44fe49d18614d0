# `make help` lists the targets. ARGS='model=gemma3_1b ...' goes on to the program.
PYTHON ?= python3
# Where nvidia-smi finds no device, or not the driver that it was built for, it says so in place of a version.
DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | sed -n '1s/^\([0-9]*\)\..*/\1/p')
CUDA := $(if $(DRIVER),$(shell test $(DRIVER) -ge 580 && echo cuda13 || echo cuda12))
REQUIREMENTS := requirements.txt $(CUDA:%=requirements/%.txt)
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --timeout 60
# The files of requirements/ name every package: nothing is left to resolve. Python compiles what is imported, at its first import.
INSTALL_LOCKED := $(INSTALL) --no-deps --no-compile

.PHONY: train test test-fast test-all lint bench faults chaos soak fuzz audit docs site parity lock newest clean help
train: .venv/installed ## trains the default job, or what ARGS say
	$(BIN)/python run_training.py $(ARGS)

# Three workers on two cores: some tests wait (for Slurm, for a heartbeat that does not come).
PYTEST := $(BIN)/python -m pytest -n 3 --dist worksteal
test: .venv/installed-tests ## the tests, without the nightly cases
	$(PYTEST) $(ARGS)

# The files of tests/fast.txt take less than 7 s each.
test-fast: .venv/installed-tests ## units alone, in at most 90 s
	$(PYTEST) @tests/fast.txt $(ARGS)

test-all: .venv/installed-tests ## the tests, with the nightly cases: about twice as long
	$(PYTEST) --nightly $(ARGS)

lint: .venv/installed-tests ## ruff, mypy, licences of the packages
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy -n auto && $(BIN)/python -m tools.licences

audit: .venv/installed ## known weaknesses of the locked packages, by PyPI's database (needs the network)
	$(BIN)/python -m venv .venv/audit && .venv/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	.venv/audit/bin/python -m pip_audit --strict --no-deps --disable-pip -r requirements.txt

bench: .venv/installed ## times of a step
	PYTHONPATH=tests $(BIN)/python -m benchmarks.step

faults: .venv/installed ## what a run does when a process dies, hangs or loses its disk
	PYTHONPATH=tests $(BIN)/python -m benchmarks.faults $(ARGS)

chaos: .venv/installed ## runs that are killed at random moments and resume
	PYTHONPATH=tests $(BIN)/python -m benchmarks.chaos $(ARGS)

soak: .venv/installed ## 300 starts and ends of everything, with their exit codes; ARGS="count=30" starts fewer
	PYTHONPATH=tests $(BIN)/python -m benchmarks.soak $(ARGS)

fuzz: .venv/installed-tests ## damaged bytes, 10,000 of each kind, then random commands; ARGS="seed=1 minutes=60"
	TUNIX_FUZZ=10000 $(BIN)/python -m pytest tests/test_outside.py
	PYTHONPATH=tests $(BIN)/python -m benchmarks.fuzz $(ARGS)

docs: .venv/installed ## writes docs/config.md, the tables of models, families and foreign names, docs/licences.md
	$(BIN)/python -m tools.config_reference
	$(BIN)/python -m tools.foreign_names
	$(BIN)/python -m tools.model_table
	$(BIN)/python -m tools.family_blocks
	$(BIN)/python -m tools.licences

site: .venv/installed ## the pages, the tutorial and the API as a site in build/site; every link is checked
	$(INSTALL) -r requirements/site.txt
	$(BIN)/python -m mkdocs build --strict

parity: ## the tiny models of tests/models/parity again; TRANSFORMERS_PYTHON has torch and transformers
	$(or $(TRANSFORMERS_PYTHON),$(PYTHON)) tests/models/parity/make.py
	$(or $(TRANSFORMERS_PYTHON),$(PYTHON)) tests/models/parity/make_mtp.py
	$(or $(TRANSFORMERS_PYTHON),$(PYTHON)) tests/support/images.py

MAKE_VENV = $(PYTHON) -c 'import sys; sys.exit("tunix needs Python >= 3.11, $(PYTHON) is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)' \
	&& $(PYTHON) -m venv .venv
.venv/installed: $(REQUIREMENTS)
	@$(MAKE_VENV)
	$(INSTALL_LOCKED) $(REQUIREMENTS:%=-r %)
	@touch $@

# requirements/tests.txt has all of requirements.txt, too: this install serves `make train` as well.
# Two pips at a time, each with a quarter of the packages: one pip uses one core.
.venv/installed-tests: $(REQUIREMENTS) requirements/tests.txt
	@$(MAKE_VENV)
	@awk '/^[a-zA-Z]/ { print > (".venv/part" NR % 4 ".txt") }' requirements/tests.txt
	printf '%s\n' 0 1 2 3 | xargs -P 2 -I{} $(INSTALL_LOCKED) -r .venv/part{}.txt
	$(CUDA:%=$(INSTALL_LOCKED) -r requirements/%.txt)
	@touch .venv/installed $@

# The files of the extras are constrained by that of the tests: users of an extra get the versions that were tested.
COMPILE := uv pip compile --quiet --universal --python-version 3.11
COMPILE_TESTED := $(COMPILE) -c requirements/tests.txt pyproject.toml
lock: ## exact versions for Linux and macOS and every Python >= 3.11, by uv (https://docs.astral.sh/uv)
	$(COMPILE) --extra dev pyproject.toml -o requirements.txt
	$(COMPILE) --extra tests -c requirements.txt pyproject.toml -o requirements/tests.txt
	$(COMPILE_TESTED) --extra hf -o requirements/hf.txt
	$(COMPILE_TESTED) --extra site -o requirements/site.txt
	$(COMPILE_TESTED) --extra profile -o requirements/profile.txt
	$(COMPILE_TESTED) --extra wandb --extra mlflow --extra mlflow_server -o requirements/sinks.txt
	$(COMPILE_TESTED) --extra buckets --extra servers -o requirements/buckets.txt
	$(COMPILE_TESTED) --extra lm_eval -o requirements/lm-eval.txt
	$(COMPILE_TESTED) --extra serve -o requirements/serve.txt
	$(COMPILE_TESTED) --extra reasoning -o requirements/reasoning.txt
	$(COMPILE_TESTED) --extra ray -o requirements/ray.txt
	$(COMPILE_TESTED) --extra cuda12 -o requirements/cuda12.txt
	$(COMPILE_TESTED) --extra cuda13 -o requirements/cuda13.txt

# docs/install.md has the last result.
NEWEST := tests/sharding tests/models/test_models.py tests/models/test_parity.py tests/training/test_losses.py \
	tests/training/test_step.py tests/training/test_optim.py tests/inference/test_rollout.py tests/run/test_checkpoint.py
newest: ## the newest release of every dependency in place of the locked one, and the short tests
	$(PYTHON) -m venv --clear build/newest
	build/newest/bin/python -m pip install --quiet --disable-pip-version-check '.[dev]'
	build/newest/bin/python -m pip list
	build/newest/bin/python -m pytest -n 2 $(NEWEST) $(ARGS)

clean: ## removes the environment, the caches and what was built
	rm -rf .venv .cache build *.egg-info

help: ## lists the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

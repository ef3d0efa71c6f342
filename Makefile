# Everything runs in .venv. It is created on first use, and updated when pyproject.toml or constraints.txt changes.
# Python compiles the modules that are imported, and keeps them; pip would compile all 15,000 files.
export PYTHONDONTWRITEBYTECODE =
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests run in parallel processes: one thread each, so that they do not compete for the cores.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
WORKERS ?= 2

.PHONY: demo demo-flower test test-slow lint docs release-check clean

demo: $(VENV)/.demo
	$(BIN)/hierfl demo --out demo-out

# Four hospitals on Flower's SuperLink and SuperNodes, on this machine, with TLS and node authentication.
demo-flower: $(STAMP)
	$(ONE_THREAD) $(BIN)/python examples/flower_hospitals/deploy.py --out demo-flower-out

test: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q --durations=10

# The tests that take minutes. Their results are kept in tests/SLOW.md.
test-slow: $(STAMP)
	$(ONE_THREAD) HIERFL_SLOW=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q -m slow --junitxml .slow.xml; \
	status=$$?; $(BIN)/python -m tests.slow_results .slow.xml; exit $$status

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, in site/: without a network, once its tools are installed. A warning fails it. The code of changed pages is run again.
docs: $(VENV)/.docs
	$(ONE_THREAD) $(BIN)/python docs/tools/outputs.py
	$(ONE_THREAD) NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/mkdocs build

# What a release must hold, with the wheel and the sdist in fresh environments.
release-check: $(STAMP)
	.ci/release-check "$(CURDIR)/$(BIN)/python"

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[docs]"
	touch $@

$(STAMP): $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[dev]"
	touch $@

# What the demo needs: no extra.
$(VENV)/.demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hierfl needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e .
	touch $@

clean:
	rm -rf $(VENV) .slow.xml .cache build dist site demo-out demo-flower-out hierfl.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

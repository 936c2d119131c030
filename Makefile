# Everything runs in .venv-VERSION, made on first use. Choose a Python with PYTHON=python3.12.
PYTHON ?= python3
version := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
venv := .venv-$(version)
bin := $(venv)/bin
args ?=

.PHONY: serve test check format experiment clean

serve: $(venv)/installed  ## fetch the default model and serve it on 127.0.0.1:8000; args="..." for more
	$(bin)/python -m jbatch.serve $(args)

test: $(venv)/installed-dev  ## run the tests; args="-k name" for some
	$(bin)/python -m pytest $(args)

check: $(venv)/installed-dev  ## style, format, types, import rules
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/lint-imports

format: $(venv)/installed-dev  ## put the code in its standard form
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

experiment: $(venv)/installed-dev  ## run an experiment: name=throughput args="--quick"
	$(bin)/python -m experiments.$(name) $(args)

clean:  ## remove the virtual environments and caches
	rm -rf .venv-* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info

# Debian's python3 may come without ensurepip: virtualenv, fetched with pip, brings its own.
define make-venv
@$(PYTHON) -m venv $(venv) 2>/dev/null || { \
	$(PYTHON) -m pip install --quiet --target $(venv)-tools virtualenv && \
	PYTHONPATH=$(venv)-tools $(PYTHON) -m virtualenv --quiet --clear $(venv); }
endef

$(venv)/installed: pyproject.toml
	$(make-venv)
	$(bin)/python -m pip install --quiet --editable .
	@touch $@

$(venv)/installed-dev: pyproject.toml
	$(make-venv)
	$(bin)/python -m pip install --quiet --editable '.[dev]'
	@touch $(venv)/installed $@

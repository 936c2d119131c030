# Everything runs in .venv-VERSION, made on first use. Choose a Python with PYTHON=python3.12.
PYTHON ?= python3
version := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
venv := .venv-$(version)
bin := $(venv)/bin
args ?=

.PHONY: serve test check format clean

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

clean:  ## remove the virtual environments and caches
	rm -rf .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

$(venv)/installed: pyproject.toml
	$(PYTHON) -m venv $(venv)
	$(bin)/python -m pip install --quiet --editable .
	touch $@

$(venv)/installed-dev: pyproject.toml
	$(PYTHON) -m venv $(venv)
	$(bin)/python -m pip install --quiet --editable '.[dev]'
	touch $(venv)/installed $@

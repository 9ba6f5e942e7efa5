# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin

.PHONY: demo test lint types unit coverage clean

demo: $(VENV)/demo.stamp
	$(RUN)/optimisers demo

test: lint types unit

lint: $(VENV)/test.stamp
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .

types: $(VENV)/test.stamp
	$(RUN)/pyright

unit: $(VENV)/test.stamp
	OPENBLAS_NUM_THREADS=1 $(RUN)/pytest -n 2 --cov --cov-report=term

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --upgrade pip

$(VENV)/demo.stamp: pyproject.toml | $(VENV)/bin/pip
	$(RUN)/pip install --quiet --editable ".[demo]"
	touch $@

$(VENV)/test.stamp: pyproject.toml $(VENV)/demo.stamp
	$(RUN)/pip install --quiet --group test
	touch $@

clean:
	rm -rf $(VENV) .coverage* .hypothesis .pytest_cache .ruff_cache

# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
COMPARE := .venv-compare
OLDEST := .venv-oldest

BROWSERS := chromium chromium-browser google-chrome google-chrome-stable

.PHONY: demo test lint types unit docs browser bench compare oldest soak fuzz clean

demo: $(VENV)/demo.stamp
	$(RUN)/optimisers demo

test: lint types unit

lint: $(VENV)/test.stamp
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .

types: $(VENV)/test.stamp
	$(RUN)/pyright

unit: $(VENV)/test.stamp browser
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

# The site, in site/: read it with `python -m http.server -d site`. The tests build it as well.
docs: $(VENV)/test.stamp
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict --quiet

# What a notebook shows is tested in a real browser.
browser:
	@for name in $(BROWSERS); do command -v $$name > /dev/null && exit 0; done; \
	if [ "$$(id -u)" != 0 ]; then as=sudo; fi; \
	if command -v apt-get > /dev/null && command -v $${as:-env} > /dev/null; then \
		$$as apt-get update -qq && $$as env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium && exit 0; \
	fi; \
	echo "the tests need a browser: install Chromium or Chrome, so that one of these is on the PATH: $(BROWSERS)" >&2; exit 1

# Every figure of README.md and docs/benchmarks.md, measured again: on a quiet machine, in less than 20 minutes.
bench: $(VENV)/test.stamp
	$(RUN)/python -m benchmarks

# With the oldest versions of all that the library needs; what they say of each other's deprecations is passed over.
oldest: $(OLDEST)/oldest.stamp
	$(OLDEST)/bin/python -m pytest -q -n 2 -W ignore::DeprecationWarning -p no:cacheprovider \
		tests/test_import.py tests/test_trees.py tests/test_ties.py tests/test_state.py tests/test_freezing.py tests/test_rules.py \
		tests/test_backends.py tests/test_groups.py tests/test_report.py tests/test_cli.py tests/test_files.py tests/test_jax.py

$(OLDEST)/oldest.stamp: pyproject.toml tests/oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet --upgrade pip
	$(OLDEST)/bin/pip install --quiet --constraint tests/oldest.txt --editable ".[demo]" --group test
	touch $@

# 100,000 steps with surgery in between, against plain arithmetic; and a minute of fuzzing for each target.
soak: $(VENV)/test.stamp
	$(RUN)/python -m tests.soak 100000

fuzz: $(VENV)/test.stamp
	for target in path selector names file document command; do $(RUN)/python -m tests.fuzz $$target -max_total_time=60 || exit 1; done

# Other libraries, in an environment of their own.
compare: $(COMPARE)/compare.stamp
	$(COMPARE)/bin/python -m compare

$(COMPARE)/compare.stamp: pyproject.toml compare/requirements.txt
	$(PYTHON) -m venv $(COMPARE)
	$(COMPARE)/bin/pip install --quiet --upgrade pip
	$(COMPARE)/bin/pip install --quiet --requirement compare/requirements.txt --editable .
	touch $@

clean:
	rm -rf $(VENV) $(COMPARE) $(OLDEST) .coverage* .hypothesis .pytest_cache .ruff_cache site

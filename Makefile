# Uses .venv where `make install` made one, and otherwise the Python that is on the path.
PYTHON := $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)

.PHONY: install check test lint types docs run bench gpu-check clean

install:  ## a virtual environment in .venv, with what development needs
	test -d .venv || python3 -m venv .venv
	.venv/bin/python -m pip install -e '.[dev]'

check: lint types test  ## all that must pass before a change is merged

test:
	$(PYTHON) -m pytest

lint:
	$(PYTHON) -m ruff check .

types:
	$(PYTHON) -m mypy

docs:  ## the site, into site/, without network; needs the extra .[docs]; `mkdocs serve` shows it
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

run:
	$(PYTHON) -m cct.cli run recipes/compo.yaml

bench:  ## speed beside peers, into docs/performance.md; needs the extra .[bench]
	$(PYTHON) -m benchmarks --write docs/performance.md

gpu-check:  ## on a GPU, a few minutes: results held to the CPU's, speed, a whole run; needs no vLLM
	$(PYTHON) -m benchmarks gpu scan concentration sharing large --json gpu-check.json --write docs/performance.md

clean:  ## caches and build leftovers; runs/ and the warm starts in ~/.cache/cct stay
	rm -rf build site .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find cct tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

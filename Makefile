# make install | train | test | test-slow | lint | clean. PYTHON: the interpreter that .venv is made with.
PYTHON ?= python3
PIP := .venv/bin/python -m pip --disable-pip-version-check --quiet --quiet

.PHONY: install train test test-slow lint clean

install: .venv/.installed

# First all pins as they are, then what they leave open (torch's CUDA libraries): to resolve everything takes a minute more.
.venv/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) install --no-deps --requirement requirements.lock
	$(PIP) install --requirement requirements.lock
	$(PIP) install --no-deps --editable .
	touch $@

train: install
	.venv/bin/python -m jobs.train

test: install
	.venv/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-slow: install
	.venv/bin/python -m pytest -m slow

lint: install
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

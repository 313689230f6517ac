# make demo   set up, then measure the first claim on this machine and print the verdict (four to twelve minutes)
# make test   set up, then run all tests
# make lint   set up, then ruff, mypy and the import rules
# make bench  set up, then the latencies that users feel (medians of five)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OFFLINE := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1

.PHONY: demo test lint bench readme clean

demo: $(READY)
	$(OFFLINE) $(BIN)/coresident run demo

test: $(READY)
	$(OFFLINE) $(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python tests/bench.py

readme: $(READY)
	$(BIN)/python docs/tables.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "coresident needs Python 3.11 or newer: set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "this Python has no venv: install it (Debian: apt-get install python3-venv)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# make run    set everything up, run the main job on the embedded world, write report.html
# make test   set everything up, check style and types, run all tests but the long ones
# make test-long   tens of thousands of random cases and all committed reports made again, on top of `make test`
# make docs   build the documentation into build/site
# make check-size   sizes of results/ and docs/report.html, lines of the command line, the bench and the report
# make report rebuild docs/report.html and the tables of docs/ from the committed runs; the other reports go to build/
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= cpu
WORKERS ?= 2
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PROTOFED := $(BIN)/python -m protofed.cli.main

.PHONY: run test test-long check check-size unit docs report clean

run: $(READY)
	$(BIN)/python -m protofed.cli.main demo --out runs/demo --report report.html

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --durations=25 -m "not long"

test-long: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) -m long

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow and not long" tests/unit tests/properties

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "wrote build/site: open build/site/index.html"

report: $(READY)
	@mkdir -p build
	$(PROTOFED) report results/overall -o docs/report.html --grid experiments/overall.toml --tuned results/tune --tuned results/tune/yelp
	$(PROTOFED) report results/overall -o results/overall.csv
	$(PROTOFED) report results/more -o build/more_logs.html --grid experiments/overall.toml --tuned results/tune/yelp
	$(PROTOFED) report results/more -o results/more.csv
	$(PROTOFED) report results/paper_size -o build/paper_size.html --grid experiments/paper-size.toml --tuned results/tune --tuned results/tune/yelp
	$(PROTOFED) report results/paper_size -o results/paper_size.csv
	$(PROTOFED) report results/sensitivity -o build/sensitivity.html
	$(PROTOFED) report results/flagship -o build/flagship.html
	$(PROTOFED) report results/flagship -o results/flagship.csv
	$(BIN)/python scripts/results_page.py
	$(BIN)/python scripts/method_pages.py

check-size:
	@$(BIN)/python scripts/sizes.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(READY): pyproject.toml requirements/lock.txt scripts/torch.sh
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is missing; install Python 3.11 or newer (Debian: apt-get install python3 python3-venv)" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed, found $$($(PYTHON) --version)" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "error: the venv module is missing; on Debian or Ubuntu run: apt-get install python3-venv" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	TORCH=$(TORCH) PIP="$(BIN)/python -m pip" sh scripts/torch.sh
	$(BIN)/python -m pip install --quiet -c requirements/lock.txt -e '.[report,dev,docs,federated]'
	touch $(READY)

# What a newcomer and CI run. Everything happens in a virtual environment, .venv,
# which is made when it is first needed.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help demo drill test test-long lint fmt kills power-cuts trips bench loss-bench shape golden fuzz campaign clean

help: ## Name the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## Train a small model, kill it in the middle of a save, resume to the last digit
	@$(BIN)/python examples/demo/run.py

drill: $(READY) ## Kill and damage a real job in nine ways, and see where the runbook ends each time
	@$(BIN)/python examples/drill/run.py

test: lint ## Everything that CI runs: lint, types, tests
	@echo "== tests (the first run also writes checkpoints with real torch, half a minute)"
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal

test-long: $(READY) ## The tests that `make test` leaves out because they take long
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal -m long

lint: $(READY) ## Style and types
	@echo "== ruff"
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check .
	@echo "== mypy"
	@$(BIN)/mypy --no-error-summary

fmt: $(READY) ## Put the code in form
	@$(BIN)/ruff check -q --fix .
	@$(BIN)/ruff format .

kills: $(READY) ## Kill a training job 50 times at random; its losses must stay those of an unbroken run
	@$(BIN)/python tests/campaign/kills.py

power-cuts: $(READY) ## Cut the power at every step of all that is written (root, Linux, half an hour)
	@$(BIN)/python tests/campaign/power_cuts.py

trips: $(READY) ## Send thousands of random steps there and back, cut anew or in another format (ten minutes)
	@$(BIN)/python tests/campaign/round_trips.py

shape: $(READY) ## Measure the shape of the tree: size, parameters, hops, retired words
	@$(BIN)/python tools/shape.py

bench: $(READY) ## Measure against peers, and print the ratios
	@for script in bench/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

loss-bench: $(READY) ## Which rule sees which fault of a resume, and how often does it cry wolf
	@$(BIN)/python bench/loss_rules.py --all

fuzz: $(READY) ## Fuzz everything that reads the bytes of a checkpoint, a minute for each
	@$(BIN)/python -m pip install -qq -c constraints.txt --group fuzz
	@$(BIN)/python tests/fuzz/fuzz.py

golden: $(READY) ## Freeze anew what the commands answer for every sound, damaged and odd root
	@$(BIN)/python tests/golden/table.py

campaign: $(READY) ## Break checkpoints in thirty thousand ways, and count what is missed (half an hour)
	@$(BIN)/python -m pytest -q tests/fixtures
	@$(BIN)/python tests/campaign/campaign.py
	@$(BIN)/python tests/campaign/soak.py

clean: ## Remove all that make has made
	rm -rf .venv .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build demo dist

# pip of Python 3.10 and 3.11 knows no dependency groups: 25.1 was the first that does.
$(READY): pyproject.toml constraints.txt tools/install_torch.py
	@$(PYTHON) -c 'import sys; sys.exit("error: Python 3.10 or newer is needed; next: make PYTHON=python3.12" if sys.version_info < (3, 10) else 0)'
	@echo "== setting up .venv (once, a few minutes)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --upgrade 'pip>=25.1'
	@$(BIN)/python tools/install_torch.py
	@echo "installing ckptctl with all extras, and what its tests need"
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[all]' --group test
	@touch $@

# What contributors and CI run. Everything runs in a virtual environment, .venv,
# which is created on first use.

PYTHON ?= python3
BIN := .venv/bin
BASE := .venv/.base
READY := .venv/.ready

# Every worker and every process of a test would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo drill check test test-long platforms gpu lint fmt generate mutants kills power-cuts slow-work trips bench loss-bench shape modules golden fuzz properties dist pictures docs docs-serve campaign clean
# The second step of CI leaves out `long`.
SLOW := slow or long
TESTS := $(BIN)/python -m pytest -q -n auto --dist worksteal
FAST := tests/inspection tests/formats tests/guards/test_layers.py tests/guards/test_vocabulary.py \
	tests/guards/test_documented.py tests/records tests/failures tests/goodput

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(BASE) ## Train a small model, kill it during a save, and resume to the last digit of the loss
	@$(BIN)/python examples/demo/run.py

drill: $(READY) ## Hang, kill and damage a job on two nodes; it must resume to the last digit of the loss
	@$(BIN)/python examples/drill/run.py

check: lint ## Lint, types and fast tests, in two minutes: before every commit
	@echo "== fast tests"
	@$(TESTS) -m 'not slow and not long and not torch and not server' $(FAST)

test: style ## Lint, types and the tests that take no more than a second or two each
	@echo "== tests (the first run also writes checkpoints with real torch, 20 s)"
	@$(TESTS) --dist loadfile --no-loadscope-reorder -m 'not slow and not long'

test-long: $(READY) ## The tests that `make test` leaves out because they are slow
	@$(TESTS) -m '$(SLOW)'

platforms: $(READY) ## Run tests on every Python and torch that is claimed and at hand
	@$(BIN)/python tools/platforms.py --write

gpu: $(READY) ## The tests on a CUDA device, skipped where there is none, and load and save beside torch
	@$(BIN)/python -m pytest -q -m gpu tests/train/test_devices.py
	@$(BIN)/python bench/run.py devices --write

.PHONY: frameworks
frameworks: $(READY) ## Install the frameworks for the tests of the integrations; some with FRAMEWORKS="NAME..."
	@$(BIN)/python tools/install_frameworks.py $(FRAMEWORKS)

.PHONY: compatibility
compatibility: $(READY) ## Write docs/compatibility.md: what the tests of the integrations have shown
	@$(BIN)/python tools/compatibility.py

.PHONY: style
style: $(READY)
	@echo "== ruff"
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check .

lint: style ## Check style and types
	@echo "== mypy"
	@$(BIN)/mypy --no-error-summary

fmt: $(READY) ## Format the code
	@$(BIN)/ruff check -q --fix .
	@$(BIN)/ruff format .

generate: $(READY) ## Write the generated files again; `make test` checks that they are current
	@$(BIN)/python tools/failure_rules.py
	@$(BIN)/python tools/framework_tables.py
	@$(BIN)/python tools/reference.py
	@$(BIN)/python tools/man_page.py

mutants: $(READY) ## Change one thing at a time in the modules that decide, and see whether a test fails
	@$(BIN)/python tools/mutants.py --write

kills: $(READY) ## Kill a training job 50 times at random; its losses must equal those of an undisturbed run
	@$(BIN)/python tests/campaign/kills.py

slow-work: $(READY) ## Train slow but sound jobs for half an hour; none may be ended as a hang
	@$(BIN)/python tests/campaign/slow_work.py

power-cuts: $(READY) ## Simulate a power cut at every write of every command (root, Linux, hours)
	@$(BIN)/python tests/campaign/power_cuts.py

trips: $(READY) ## Reshard or convert thousands of random steps, and back (ten minutes)
	@$(BIN)/python tests/campaign/round_trips.py

modules: $(READY) ## Print every module with the first line of its docstring
	@$(BIN)/python tools/reference.py --modules

shape: $(READY) ## Measure the shape of the tree: size, parameters, hops, retired words
	@$(BIN)/python tools/shape.py

bench: $(READY) ## Measure against peers, and write the tables of bench/results.md (20 minutes)
	@$(BIN)/python bench/run.py --write

loss-bench: $(READY) ## Measure which faults of a resume each loss rule detects, and its false alarms
	@$(BIN)/python bench/loss_rules.py --all
	@$(BIN)/python bench/loss_rules.py --late fixtures/loss-late-resumes.json.xz

fuzz: $(READY) ## Fuzz everything that reads the bytes of a checkpoint, logs and own files, a minute for each
	@$(BIN)/python -m pip install -qq -c constraints.txt --group fuzz
	@$(BIN)/python tests/fuzz/outside_texts.py --seconds 480
	@$(BIN)/python tests/fuzz/fuzz.py

properties: $(READY) ## Run the property tests with new examples, ten times (ten minutes)
	@for round in 1 2 3 4 5 6 7 8 9 10; do $(TESTS) --hypothesis-profile chance -m hypothesis || exit; done

golden: $(READY) ## Record again what the commands answer for every sound, damaged and odd root
	@$(BIN)/python tests/golden/table.py

dist: $(READY) ## Build wheel, source archive, ckptctl.pyz, its components and checksums into dist/
	@$(BIN)/python tools/dist.py

.PHONY: release-pins
release-pins: $(READY) ## Resolve the files that releases are built from again, with their hashes
	@$(BIN)/python tools/release_pins.py

pictures: $(READY) ## Draw the pictures of the documents from what the commands print
	@$(BIN)/python tools/pictures.py

docs: $(READY) ## Build the documentation as a site into build/site; a dead link is an error
	@$(BIN)/python -m pip install -qq -c constraints.txt --group docs
	@$(BIN)/sphinx-build -q -W --keep-going -b html -d build/doctrees -c docs/site . build/site
	@echo "build/site/index.html"

docs-serve: docs ## Build the site and serve it on http://127.0.0.1:8000
	@$(BIN)/python -m http.server -b 127.0.0.1 -d build/site 8000

campaign: $(READY) ## Damage checkpoints in thirty thousand ways, and count what is missed (half an hour)
	@$(BIN)/python tests/campaign/campaign.py
	@$(BIN)/python tests/campaign/soak.py

clean: ## Remove everything that make created
	rm -rf .venv .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build demo dist drill
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip of Python 3.11 knows no dependency groups: 25.1 was the first that does.
$(BASE): pyproject.toml constraints.txt tools/install_torch.py
	@$(PYTHON) -c 'import sys; sys.exit("error: Python 3.11 or newer is needed; next: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@echo "== setting up .venv: a minute or two, once"
	@echo "   1 of 3: pip"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --upgrade 'pip>=25.1'
	@echo "   2 of 3: torch, some 200 MB"
	@$(BIN)/python tools/install_torch.py
	@echo "   3 of 3: ckptctl and what it needs"
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[torch]'
	@touch $@

$(READY): $(BASE)
	@echo "== installing all extras, and what the tests need: a minute, once"
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[all]' --group test
	@touch $@

# The environment is remade when the project's requirements change.
PYTHON ?= python3
BIN := .venv/bin
# Bytecode is kept, also where the environment says otherwise: every worker, and every
# command and site that a test starts, would compile all modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install demo test test-all test-exhaustive mutants bench soak theory results methods docs clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[dev]'
	@# What the demo compiles is kept, so that it is waited for here and not there.
	-cd "$$(mktemp -d)" && "$(CURDIR)/$(BIN)/python" \
	  "$(CURDIR)/examples/tune_regularization.py" >/dev/null 2>&1
	touch $@

demo: install
	$(BIN)/python examples/tune_regularization.py

# What one waits for: at least one test of everything, and those that the planted mistakes
# of benchmarks/mutants.toml name.
test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright src examples & types=$$!; \
	FEDBILEVEL_CHECK_SHAPES=1 $(BIN)/pytest -n 2 --dist loadfile $(LISTINGS) && \
	wait $$types
	$(BIN)/pytest -n 2 --dist loadfile $(addprefix --ignore=, $(LISTINGS))

# Where every listing is run beside its transcription, every annotated shape and type is
# checked at every call.
LISTINGS := $(wildcard tests/test_transcription*.py)

# All the others, and the types of tests. The longest files come first, or one core waits
# for the other in the end.
LONGEST := $(addprefix tests/test_, rows.py flower.py known_answers.py fuzz.py wire.py \
  served_models.py)

test-all: install
	$(BIN)/pyright tests benchmarks & types=$$!; \
	$(BIN)/pytest -m 'slow and not exhaustive' -n 2 --dist loadfile \
	  --no-loadscope-reorder $(LONGEST) tests && \
	wait $$types

# For every method, and for very many inputs, what is proven for some above: before a
# release.
test-exhaustive: install
	$(BIN)/pytest -m exhaustive -n 2 --dist loadfile

# Plants mistakes one at a time, those of a list and random ones: do the tests notice? To
# choose tests for the latter, all are run once, and the lines that each runs recorded.
LINES := .pytest_cache/lines

mutants: install
	$(BIN)/python benchmarks/mutants.py
	rm -rf $(LINES) && mkdir -p $(LINES)
	-LINES_OF_TESTS=$(LINES) PYTHONPATH=benchmarks $(BIN)/pytest -p tests_of_lines \
	  -m 'not exhaustive' -n 2 --dist loadfile
	$(BIN)/python benchmarks/mutants.py --random 120 --lines $(LINES)

# The table of methods and what they cost, from the algorithms themselves.
methods: install
	$(BIN)/python docs/methods.py
	$(BIN)/python docs/costs.py

# The site, in `site`; every link in it is checked.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: install
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python -m benchmarks.federation

soak: install
	$(BIN)/python -m benchmarks.soak masked

theory: install
	$(BIN)/python benchmarks/theory.py runs/theory

results: install
	$(BIN)/python -m benchmarks.results

clean:
	rm -rf .venv

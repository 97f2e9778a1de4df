# The environment is remade when the project's requirements change.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test slow bench soak theory results clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/python examples/tune_regularization.py

test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pytest -n 2 --dist loadgroup

# What would take `make test` beyond twenty minutes on two cores.
slow: install
	$(BIN)/pytest -m slow -n 2 --dist loadgroup

bench: install
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/federation.py

soak: install
	$(BIN)/python benchmarks/soak.py

theory: install
	$(BIN)/python benchmarks/theory.py runs/theory

results: install
	$(BIN)/python benchmarks/results.py
	$(BIN)/python benchmarks/architecture.py

clean:
	rm -rf .venv

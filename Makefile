# make train | make test: from a fresh clone to the result; each sets up what it needs.
PYTHON ?= python3
VENV   ?= .venv
RUN    ?= runs/quickstart
PROMPT ?= It is a truth universally acknowledged, that
BIN    := $(VENV)/bin

.PHONY: train test test-gpu test-compat lint setup clean

train: setup     ## prepare the books, train the quickstart (or go on with it), print a sample
	$(BIN)/python train.py $(if $(wildcard $(RUN)/config.json),$(RUN),configs/quickstart.py --run.dir $(RUN))
	$(BIN)/python sample.py $(RUN) --prompt "$(PROMPT)"

test: setup lint ## every test that needs no GPU
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-gpu: setup  ## the kernel tests on the GPU at hand
	$(BIN)/python -m pytest -m "gpu and not slow"

# triton 3.6's interpreter breaks with numpy 2.4 (any loop with a run-time bound)
test-compat:     ## the kernels under the oldest triton we support, in an environment of its own
	$(MAKE) setup VENV=.venv-compat
	.venv-compat/bin/pip install 'triton==3.6.0' 'numpy<2.4'
	.venv-compat/bin/python -m pytest tests/test_forward.py tests/test_backward.py tests/test_tiles.py tests/test_compile.py \
	  tests/test_hopper.py tests/test_step_kernels.py tests/test_loss.py tests/test_optimizer.py

lint: setup
	$(BIN)/ruff check .

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: nanolong needs Python >= 3.11, this is $$($(PYTHON) -V); try make PYTHON=python3.11"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "error: python3 -m venv failed; on Debian and Ubuntu: apt install python3-venv"; exit 2; }
	$(BIN)/pip install --disable-pip-version-check -e '.[train,dev]'
	@touch $@

clean:           ## the environments and the prepared data; runs/ stays
	rm -rf .venv .venv-compat data/shards

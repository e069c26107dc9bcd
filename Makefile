# Two commands for a newcomer: `make demo` and `make test`. Both need python3 and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# With that python, two files of tests at a time; those of the GPU, which would fill its memory for each other, one by one.
define run-tests
	$(1) -m pytest --numprocesses 2 --dist loadfile --ignore tests/cuda
	$(1) -m pytest tests/cuda
endef

.PHONY: demo test test-cuda torture lint types contract check bench bench-tutorial test-oldest clean

demo: $(INSTALLED)
	$(BIN)/memfeed demo $(if $(IMAGES),--images $(IMAGES))

test: $(INSTALLED)
	$(call run-tests,$(BIN)/python)

# What needs an NVIDIA GPU: streams, races, graphs, the end of memory, the kernel.
test-cuda: $(INSTALLED)
	$(BIN)/python -m pytest tests/cuda

# Kills at random moments, and long runs. MINUTES for all scenarios together; TORTURE="--only kill_build --seed 7".
MINUTES ?= 10
torture: $(INSTALLED)
	$(BIN)/python tests/run_torture.py --minutes $(MINUTES) $(TORTURE)

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[vision,plots,dev]'
	touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

contract: $(INSTALLED)
	$(BIN)/lint-imports

check: lint types contract test

# Needs a quiet machine. Writes JSON with the machine in it to benchmarks/results/, and the charts of docs/ from that.
bench: $(INSTALLED)
	$(BIN)/python benchmarks/convert.py
	$(BIN)/python benchmarks/columnar.py
	$(BIN)/python benchmarks/verify.py
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/cold.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/tutorial.py
	$(BIN)/python benchmarks/transforms.py
	$(BIN)/python benchmarks/weight.py
	$(BIN)/python benchmarks/device.py
	$(BIN)/python benchmarks/to_device.py
	if [ -e .venv-peers/.installed ]; then $(PEERS_BIN)/python benchmarks/others.py; fi
	$(BIN)/python benchmarks/report.py

# The oldest torch and tensordict that pyproject.toml allows, in an environment of their own.
test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --upgrade pip
	.venv-oldest/bin/python -m pip install --quiet 'torch==2.6.0' 'torchvision==0.21.0' 'tensordict==0.8.0' 'numpy<2.3' --editable '.[vision,plots,dev]'
	$(call run-tests,.venv-oldest/bin/python)

# Other loading libraries, for benchmarks/peers, in an environment of their own: they hold back numpy. FFCV is compiled,
# against Debian's OpenCV and libjpeg-turbo; apt-get runs only where these are not there yet.
PEERS_BIN := .venv-peers/bin
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)

.PHONY: peers bench-others
peers: .venv-peers/.installed

# memfeed and all of them, in turns: six minutes, 10 GB on the disk while it runs.
bench-others: peers
	$(PEERS_BIN)/python benchmarks/others.py

.venv-peers/.installed: pyproject.toml
	command -v g++ >/dev/null && command -v pkg-config >/dev/null && pkg-config --exists opencv4 libturbojpeg || \
		{ $(SUDO) apt-get update -q && $(SUDO) apt-get install -y -q g++ pkg-config libopencv-dev libturbojpeg0-dev; }
	$(PYTHON) -m venv .venv-peers
	$(PEERS_BIN)/python -m pip install --quiet --upgrade pip
	$(PEERS_BIN)/python -m pip install --quiet --editable '.[vision,plots,peers]' pytest
	touch $@

clean:
	rm -rf $(VENV) .venv-oldest

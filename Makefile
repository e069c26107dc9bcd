# Start with `make demo` and `make test`. Both need only python3.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Run the tests with the given python. First those that need a GPU, one at a time, because each fills its memory; without a
# GPU they are skipped. Then all others, three files at a time, because many of them wait, and so that the last line counts
# the tests that ran.
# Bytecode is kept even where the environment says no: the tests start some 200 processes.
define run-tests
	PYTHONDONTWRITEBYTECODE= $(1) -m pytest tests/cuda
	PYTHONDONTWRITEBYTECODE= $(1) -m pytest $(DISTRIBUTED) --numprocesses 3 --ignore tests/cuda
endef

# All tests of a file run in one process. A process that crashes is not replaced: pytest-xdist 3.8 would then wait for ever.
DISTRIBUTED := --dist loadfile --max-worker-restart 0

.PHONY: demo test test-long test-cuda torture lint types contract rooms inputs check bench test-oldest clean

demo: $(INSTALLED)
	$(BIN)/memfeed demo $(if $(IMAGES),--images $(IMAGES))

test: $(INSTALLED)
	$(call run-tests,$(BIN)/python)

# The tests that take longest: examples that run a trainer in several processes, benchmarks in their short form, and what
# tests/short_form.py leaves out of make test. Each takes less than 120 s; stacks of one that hangs are printed later than
# in make test, because to print stacks of a process that is busy can end it.
test-long: $(INSTALLED)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m long $(DISTRIBUTED) --numprocesses 2 -o faulthandler_timeout=400

# Only the tests that need an NVIDIA GPU.
test-cuda: $(INSTALLED)
	$(BIN)/python -m pytest tests/cuda

# The tests of the GPU path that need no GPU: a simulated device, and kernels that are interpreted and compiled. Their sum
# of CPU seconds is printed; in make test it stays below 90.
GPU_PATH := tests/transfer tests/loading/test_loader_on_simulated_cuda.py tests/loading/test_host_labels.py \
	tests/loading/test_plain_devices.py tests/transforms/test_kernel.py tests/transforms/test_resample_batch.py \
	tests/transforms/test_counts_on_simulated_cuda.py tests/testing/test_transfer_contract.py \
	tests/test_device_benchmark.py tests/test_benchmarks.py::test_the_compiled_kernel_stores_16_bytes_at_once
.PHONY: test-gpu-path
test-gpu-path: $(INSTALLED)
	PYTHONDONTWRITEBYTECODE= PYTHONPATH=tools $(BIN)/python -m pytest -p cpu_seconds $(GPU_PATH)

# Each feature that needs an extra: without any extra its error has the line that installs it, with this one alone it works.
# Builds the wheel once, and makes an environment for each extra. Takes minutes, and 2 GB while it runs.
.PHONY: test-extras
test-extras: $(INSTALLED)
	MEMFEED_TEST_EXTRAS=1 $(BIN)/python -m pytest -m long tests/test_extras_alone.py

# Long runs that kill processes at random moments. MINUTES is the time of all scenarios together. To run one scenario:
# TORTURE="--only kill_build --seed 7".
MINUTES ?= 10
torture: $(INSTALLED)
	$(BIN)/python tests/run_torture.py --minutes $(MINUTES) $(TORTURE)

# The verdict of `memfeed bench` on six programs, beside whole epochs of each: for a machine that does nothing else.
.PHONY: verdict
verdict: $(INSTALLED)
	MEMFEED_QUIET=1 $(BIN)/python -m pytest -m long tests/verdict/test_six_programs.py

# Conversions on a Ray cluster of four nodes on this machine, with nodes and heads killed: also what make test leaves out.
.PHONY: ray-torture
ray-torture: $(INSTALLED)
	RAY_TORTURE=1 $(BIN)/python -m pytest tests/convert/test_ray_cluster.py tests/test_benchmarks.py -k "ray"

# One process that trains for long, with loaders of every setting: every row is checked, and memory, maps, threads and
# open files must not grow.
.PHONY: soak
soak: $(INSTALLED)
	$(BIN)/python tests/run_torture.py --only soak --minutes $(MINUTES)

# 1,000 faults of a network and an object store of each kind, while stores are read, pushed and pulled.
FAULTS ?= 1000
.PHONY: remote-faults test-s3rver
remote-faults: $(INSTALLED)
	MEMFEED_REMOTE_FAULTS=$(FAULTS) MEMFEED_REMOTE_FAULTS_JSON=benchmarks/results/remote-faults.json $(BIN)/python -m pytest -m "long or not long" tests/remote/test_remote_faults.py

# The tests of stores at an address against a second S3 server, of npm.
test-s3rver: $(INSTALLED)
	npm install --silent --no-save --prefix $(VENV)/s3rver s3rver@3.7.1
	MEMFEED_S3RVER=$(VENV)/s3rver/node_modules/.bin/s3rver $(BIN)/python -m pytest tests/remote

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[vision,plots,dev,trainers,remote,ray]'
	$(BIN)/python -m pip install --quiet --no-deps torchrl  # with its dependencies it would bring an older tensordict
	touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

contract: $(INSTALLED)
	$(BIN)/lint-imports

# Draw the rooms of src/memfeed and the imports between them: docs/rooms.svg.
rooms: $(INSTALLED)
	$(BIN)/python docs/draw_rooms.py

# Cache an example of each input and write what came out: the tables of docs/inputs.md.
inputs: $(INSTALLED)
	$(BIN)/python docs/draw_inputs.py

# Train from datasets as people write them and write what came out: the table of docs/splitting.md.
.PHONY: idioms
idioms: $(INSTALLED)
	$(BIN)/python docs/draw_idioms.py

# Load 40 kinds of samples in 30 ways by DataLoader and by Loader and write what differs: the tables of docs/trainers.md.
.PHONY: differences
differences: $(INSTALLED)
	$(BIN)/python docs/draw_differences.py

# Draw each transform before and after: docs/gallery.md and its pictures.
.PHONY: gallery
gallery: $(INSTALLED)
	$(BIN)/python docs/draw_gallery.py

# Build the site of docs/ to build/site. A warning is an error.
.PHONY: docs
docs: $(INSTALLED) gallery
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/python -m sphinx -W --keep-going -q -d build/doctrees docs build/site
	$(BIN)/python docs/draw_site.py build/site build/pictures

check: lint types contract test test-long

# Run all benchmarks on a machine that does nothing else. Each writes its times and the machine to benchmarks/results/;
# from these files report.py writes docs/benchmarks.md, its details and its charts.
bench: $(INSTALLED)
	$(BIN)/python benchmarks/convert.py
	$(BIN)/python benchmarks/columnar.py
	$(BIN)/python benchmarks/windows.py
	$(BIN)/python benchmarks/sequences.py
	$(BIN)/python benchmarks/verify.py
	$(BIN)/python benchmarks/first_epoch.py
	if [ -e .venv-suites/.installed ]; then .venv-suites/bin/python benchmarks/memoize.py; else $(BIN)/python benchmarks/memoize.py; fi
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/busy.py
	$(BIN)/python benchmarks/cold.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/fleet.py
	$(BIN)/python benchmarks/ray_conversion.py
	$(BIN)/python benchmarks/curves.py
	$(BIN)/python benchmarks/tutorial.py
	$(BIN)/python benchmarks/transforms.py
	$(BIN)/python benchmarks/weight.py
	$(BIN)/python benchmarks/rounding.py
	$(BIN)/python benchmarks/coded_rows.py
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/device.py
	$(BIN)/python benchmarks/to_device.py
	if [ -e .venv-peers/.installed ]; then $(PEERS_BIN)/python benchmarks/others.py; fi
	if [ -e .venv-peers/.installed ]; then $(PEERS_BIN)/python benchmarks/augment.py; fi
	if [ -e .venv-peers/.installed ]; then $(PEERS_BIN)/python benchmarks/forms.py; fi
	if [ -e .venv-peers/.installed ]; then $(PEERS_BIN)/python benchmarks/remote.py; else $(BIN)/python benchmarks/remote.py; fi
	if [ -e .venv-peers/.installed ]; then $(PEERS_BIN)/python benchmarks/imports.py; else $(BIN)/python benchmarks/imports.py; fi
	$(BIN)/python benchmarks/report.py

# All tests with the oldest torch and tensordict that pyproject.toml allows, in an environment of their own.
test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --upgrade pip
	.venv-oldest/bin/python -m pip install --quiet 'torch==2.6.0' 'torchvision==0.21.0' 'tensordict==0.8.0' 'numpy<2.3' --editable '.[vision,plots,dev,remote]'
	$(call run-tests,.venv-oldest/bin/python)

# All tests on a Python for which not all libraries have wheels yet (3.14t, 3.15). Most tests of a missing one are skipped;
# those of coded fields fail.
.PHONY: test-wheels
test-wheels:
	$(PYTHON) -m venv .venv-wheels
	.venv-wheels/bin/python tools/install_wheels.py
	$(call run-tests,.venv-wheels/bin/python)

# Add a machine to an elastic run of torchrun, and lose one: every row of an epoch counts once. Takes a minute or two.
.PHONY: elastic
elastic: $(INSTALLED)
	$(BIN)/python tests/run_elastic.py

# Run the tests that twelve projects have for loaders, with Loader in the place of DataLoader: tools/peers_suites.py. The
# sources are kept in CHECKOUTS; a line says which repositories have to be cloned there. SUITES="skorch ignite" are a part.
.PHONY: peers-tests
CHECKOUTS ?= .venv-suites/checkouts
peers-tests: .venv-suites/.installed
	.venv-suites/bin/python tools/peers_tests.py --checkouts $(CHECKOUTS) --json benchmarks/results/peers-tests.json \
		$(if $(SUITES),--suites $(SUITES)) $(PEERS)
	.venv-suites/bin/python tools/peers_report.py

# An environment of its own, which finds torch and memfeed in the first one.
.venv-suites/.installed: $(INSTALLED)
	$(BIN)/python -m venv .venv-suites
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$(.venv-suites/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/first.pth
	.venv-suites/bin/python -m pip install --quiet accelerate expecttest lightning nibabel opacus parameterized \
		pyre-extensions pytorch-ignite scikit-learn 'setuptools<81' skorch speechbrain tensorboard torchdata torch_geometric
	.venv-suites/bin/python -m pip install --quiet --no-deps monai torchtnt  # monai forbids newer versions of torch
	touch $@

# Install the other loading libraries of benchmarks/peers in an environment of their own, because they need an older numpy.
# FFCV is compiled against OpenCV and libjpeg-turbo of Debian; apt-get installs these if they are missing.
PEERS_BIN := .venv-peers/bin
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)

.PHONY: peers bench-others
peers: .venv-peers/.installed

# Compare memfeed with these libraries. Takes six minutes, and 10 GB of disk space while it runs.
bench-others: peers
	$(PEERS_BIN)/python benchmarks/others.py

.venv-peers/.installed: pyproject.toml
	command -v g++ >/dev/null && command -v pkg-config >/dev/null && pkg-config --exists opencv4 libturbojpeg || \
		{ $(SUDO) apt-get update -q && $(SUDO) apt-get install -y -q g++ pkg-config libopencv-dev libturbojpeg0-dev; }
	$(PYTHON) -m venv .venv-peers
	$(PEERS_BIN)/python -m pip install --quiet --upgrade pip
	$(PEERS_BIN)/python -m pip install --quiet --editable '.[vision,plots,peers,codecs]' pytest scikit-learn
	touch $@

clean:
	rm -rf $(VENV) .venv-oldest .venv-suites .venv-wheels

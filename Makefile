# The commands of a developer and of CI: `make help` explains each target.

PYTHON ?= python3.11
PRESET ?= atari
ARGS ?=

# Debian packages that have to be there; everything else is a pinned wheel, or a pinned package of npm.
DEBIAN_PACKAGES := python3.11 python3.11-venv libstdc++6
# Those of clients/node, which only tests need: without them, its tests are skipped.
DEBIAN_PACKAGES_OF_CLIENTS := nodejs npm

# Where there is an NVIDIA GPU, TensorFlow comes with its CUDA libraries. GPU= leaves them out.
GPU ?= $(wildcard /dev/nvidiactl)
LOCKS := requirements-dev.lock $(if $(GPU),requirements-gpu.lock)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
CLIENT := clients/node
CLIENT_STAMP := $(CLIENT)/node_modules/.set-up
PROTO := protos/impala/v1/learner.proto
STUBS := $(addprefix protos/impala/v1/learner_pb2,.py .pyi _grpc.py)

# $(call generate_stubs,DIRECTORY)
generate_stubs = $(BIN)/python -m grpc_tools.protoc -I. --python_out=$(1) --pyi_out=$(1) \
	--grpc_python_out=$(1) $(PROTO)

# $(call lock,FILE,EXTRAS,CONSTRAINTS)
lock = $(BIN)/uv pip compile --quiet --generate-hashes --no-header --python-version 3.11 \
	--custom-compile-command 'make lock' --output-file $(1) $(2) pyproject.toml

# Three at a time on two cores: half of the tests wait for processes that they have started.
TEST := $(BIN)/python -m pytest -m "not slow" --numprocesses 3 --dist worksteal --durations 30

.DEFAULT_GOAL := help
.PHONY: help setup clients protos train test test-slow soak image-test manifests check dist bench results \
	docs docs-serve lock clean

## setup: make .venv with everything that the lock files pin, and the impala command
setup: $(STAMP) protos

$(STAMP): $(LOCKS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || \
		{ echo "$(PYTHON) is not a Python 3.11. On Debian: apt-get install $(DEBIAN_PACKAGES)." \
		"If it is elsewhere: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "$(PYTHON) cannot make virtual environments." \
		"On Debian: apt-get install $(DEBIAN_PACKAGES)." >&2; exit 1; }
	@echo "Installing $(LOCKS) into $(VENV); this takes a minute or two."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		--only-binary :all: $(addprefix --requirement ,$(LOCKS))
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--no-build-isolation --editable .
	@touch $@

## clients: install what the actor in clients/node needs, if there are Node and npm
clients:
	@if ! node -e 'process.exitCode = Number(parseInt(process.versions.node) < 18)' 2>/dev/null || \
		! command -v npm >/dev/null; then \
		echo "There is no Node of version 18 or later with npm: the tests of $(CLIENT) will be" \
		"skipped. On Debian: apt-get install $(DEBIAN_PACKAGES_OF_CLIENTS)." >&2; \
	else $(MAKE) --no-print-directory $(CLIENT_STAMP) || \
		echo "The packages of $(CLIENT) cannot be installed: its tests will be skipped." >&2; fi

$(CLIENT_STAMP): $(CLIENT)/package-lock.json
	@echo "Installing the packages of $(CLIENT)."
	@cd $(CLIENT) && timeout 120 npm ci --silent --no-audit --no-fund
	@touch $@

## protos: generate the Python stubs of the wire (they are committed; `make check` compares)
protos: $(STUBS)

$(STUBS) &: $(PROTO) $(STAMP)
	$(call generate_stubs,.)
	touch $(STUBS)

## train: train PRESET (atari), for example: make train PRESET=catch ARGS="--logdir runs/mine"
train: setup
	$(BIN)/impala train $(PRESET) $(ARGS)

## test: run the tests, without the slow ones
test: setup clients
	$(TEST) $(ARGS)

## test-slow: run the tests that take minutes
test-slow: setup clients
	$(BIN)/python -m pytest -m slow -s $(ARGS)

## soak: break a running fleet for half an hour and account for every unroll
soak: setup
	PYTHONPATH=tests $(BIN)/python -m chaos.soak $(ARGS)

## image-test: build both images and run them as the local overlay says; needs root on Debian
image-test: setup
	$(BIN)/python deploy/image_test.py $(ARGS)

## manifests: check what the overlays render to; ARGS=DIRECTORY checks an overlay of your own
manifests: setup
	$(BIN)/python -m deploy.lint $(ARGS)

## check: what CI runs: format, lint, types, fresh stubs, pages of results, tests
# Without `setup`, whose `protos` would hide that the committed stubs are stale.
check: $(STAMP) clients
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	@fresh=$$(mktemp -d) && trap 'rm -r "$$fresh"' EXIT && $(call generate_stubs,"$$fresh") && \
	for stub in $(STUBS); do diff -u "$$stub" "$$fresh/$$stub" || \
		{ echo "$$stub is stale: run make protos and commit it." >&2; exit 1; }; done
	$(BIN)/python -m ledger check
	$(TEST) $(ARGS)

## dist: build the source distribution, and the wheel from it, in dist/
dist: setup
	rm -rf dist
	$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")'
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --no-build-isolation \
		--wheel-dir dist dist/*.tar.gz

## bench: measure this machine: training, ingest and replay; ARGS="actor gpu profile peers": others
bench: setup
	$(BIN)/python -m benchmarks $(ARGS)

## results: render the pages of results; ARGS="run catch" runs what has no record yet, ARGS=list lists
results: setup
	$(BIN)/python -m ledger $(or $(ARGS),render)

## docs: build the documentation as a site in build/site; docs-serve shows it at http://127.0.0.1:8000
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --config-file site/mkdocs.yml

docs-serve: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --config-file site/mkdocs.yml

## lock: pin the newest versions that pyproject.toml allows
lock: $(STAMP)
	$(call lock,requirements-dev.lock,--extra dev --extra docs --extra minatar --extra box2d --extra mujoco --extra minigrid --extra minari --extra onnx --extra tune --extra mlflow --extra wandb --upgrade)
	$(call lock,requirements.lock,--constraint requirements-dev.lock)
	$(call lock,requirements-gpu.lock,--extra gpu --constraint requirements-dev.lock)

## clean: delete .venv, build outputs and caches; runs/ stays
clean:
	rm -rf $(VENV) $(CLIENT)/node_modules build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

## help: explain the targets
help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST) | sed 's/: /\t/' | expand -t 12

# make train | make test | make test-all | make test-fast | make test-gpu | make test-kube | make test-versions |
# make lint | make compile | make bench | make bench-gpu | make bench-gpu-bundle.
# Each but test-versions and the last two sets up .venv first, `make train` without what only contributors need; the second time that
# takes no time.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10 python; do \
	"$$p" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo "$$p" && break; done)
PY := .venv/bin/python
# For bench-gpu: the first Python that has torch.
GPU_PYTHON ?= $(shell for p in python3 .venv/bin/python python; do \
	"$$p" -c 'import sys, importlib.util as u; sys.exit(u.find_spec("torch") is None)' 2>/dev/null && echo "$$p" && break; done)
# A stamp's name holds what the environment depends on: this folder, the pins and the interpreter. What trains needs half
# of the packages: the tests, the benchmarks' peers and the tools of contributors come when they are first needed.
HASH := $(shell { pwd; cat pyproject.toml constraints.txt; "$(PYTHON)" -V; } 2>/dev/null | cksum | cut -d' ' -f1)
CORE := .venv/core-$(HASH)
STAMP := .venv/installed-$(HASH)

.PHONY: train test test-all test-fast test-gpu test-kube test-versions lint bench bench-gpu bench-gpu-bundle docs site setup compile clean

train: $(CORE)
	@$(PY) examples/train_shakespeare.py $(ARGS)

# A file each at a time: tests of one file share runs and ranks. In the order of the folders, because cluster/ has the
# longest files. Three workers on two cores: many tests wait, for a time limit or for Ray.
# The package is compiled once: where the environment forbids that, each of a thousand processes would do it.
PYTEST := PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# Run the recipe $(1) with lint beside it, which is printed at the end; fail if one of both does.
define beside_lint
@linted=$$(mktemp); $(MAKE) --no-print-directory lint > "$$linted" 2>&1 & lint=$$!; \
	$(1); tested=$$?; \
	wait $$lint; lint=$$?; cat "$$linted"; rm -f "$$linted"; [ $$tested = 0 ] && exit $$lint || exit $$tested
endef

# For every change: each promise at least once, but for those whose test is marked `full`.
test: setup
	$(call beside_lint,$(PYTEST) -m "not full" $(ARGS))

# Before a release, and after a change of recovery or placement: each promise in every mode and with every signal.
test-all: setup
	$(call beside_lint,$(PYTEST) $(ARGS))

# For the inner loop, in two minutes: the unit tests, and on real ranks the golden numbers and the guards of the loop.
test-fast: setup
	@$(PYTEST) -m "not slow and not full" tests/unit $(addprefix tests/ranks/test_,golden.py guards.py) $(ARGS)

# On this machine's GPU; two ranks share it if it is the only one.
test-gpu: setup
	@NANORAY_TEST_GPU=1 $(PY) -m pytest tests/gpu $(ARGS)

# On the cluster that KUBECONFIG names, with the image that NANORAY_IMAGE names: kubectl and KubeRay must be there. The
# cluster needs no internet. Half an hour or more.
test-kube: setup
	@NANORAY_TEST_KUBE=1 $(PY) -m pytest tests/cluster/test_kube_live.py $(ARGS)

# With another torch, Ray or Python, in an environment under build/versions: a download of gigabytes.
#   make test-versions TORCH=2.14.1 RAY=2.60.0 ARGS=tests/ranks/test_own.py
#   make test-versions TORCH=2.13.0 RAY=2.60.0 PYTHON=python3.13 ARGS=tests/unit
# The lowest versions that pyproject.toml allows:
TORCH ?= 2.11.0
RAY ?= 2.50.0
OTHER := build/versions/$(notdir $(PYTHON))-torch-$(TORCH)-ray-$(RAY)
test-versions:
	@"$(PYTHON)" -m venv $(OTHER)
	@$(OTHER)/bin/python -m pip install --quiet "torch==$(TORCH)" "ray[default]==$(RAY)" -e ".[test]" ruff types-PyYAML
	@PYTHONDONTWRITEBYTECODE= nice $(OTHER)/bin/python -m pytest -q -m "not full" $(or $(ARGS),tests/ranks)

lint: setup
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

bench: setup
	@$(PY) -m nanoray.bench $(or $(ARGS),--help)

# Check and time this machine's GPU in ten minutes: kernels, the ladder of a step, seconds to a loss, two ranks, tests.
# Nothing is installed: it takes a Python that has torch, and from build/gpu-day (bench-gpu-bundle) what that Python lacks.
# ARGS="--device cpu" tries it out. Writes docs/results/gpu-*.json.
bench-gpu:
	@test -n "$(GPU_PYTHON)" || { echo "bench-gpu: no python3 here has torch; make bench-gpu GPU_PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(GPU_PYTHON)" -m tests.gpu.day $(ARGS)

# Where pip works, for a GPU machine without a package index: what may be missing there, as build/gpu-day.tar.
bench-gpu-bundle:
	@"$(PYTHON)" -m tests.gpu.bundle $(ARGS)

# The generated pages of docs/, and with `make site` all of it as a website in build/site, which opens without a server.
docs: setup
	@$(PY) -m nanoray.machine.metrics > docs/metrics.md
	@$(PY) -m nanoray.cli > docs/flags.md
	@$(PY) -m nanoray train --schema > nanoray/config/run.schema.json
	@$(PY) -m nanoray.errors > docs/errors.md
	@$(PY) docs/api.py > docs/api.md
	@PYTHONPATH=. $(PY) docs/rooms.py > docs/rooms.md
	@$(PY) -m tests.harness.figures

site: docs
	@$(PY) docs/site/build.py

setup: $(STAMP)

# For an environment whose users may not write into it.
compile: setup
	@$(COMPILE)

# Not compiled: of the packages' twenty thousand files only those that are imported are worth it, at their first import.
# Where the environment forbids that (PYTHONDONTWRITEBYTECODE, as many images set it), each process of each run would
# compile torch and Ray anew: one short run here may do it for all.
# uv downloads and unpacks many packages at once, in a third of pip's time. Where it is not installed pip brings it into .venv;
# where there is none, or uv fails, and with `make UV=`, pip installs.
OWN_UV := .venv/bin/uv
UV = $(or $(shell command -v uv 2>/dev/null),$(OWN_UV))
PIP = $(PY) -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
VENV = $(if $(filter-out $(OWN_UV),$(UV)),rm -rf .venv && "$(UV)" venv --quiet --seed --python "$(PYTHON)" .venv,"$(PYTHON)" -m venv --clear .venv)
GET_UV = $(if $(filter $(OWN_UV),$(UV)),$(PIP) uv || echo "without uv: pip installs all",:)
# uv does not read pip's configuration: the indexes and folders of wheels that it names, as flags of uv.
INDEXES := import ast, subprocess, sys; \
	pip = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True); \
	rows = [line.partition("=") for line in pip.stdout.splitlines()]; \
	named = [(key.split(".")[-1], ast.literal_eval(value)) for key, _, value in rows]; \
	print(*[f"--{key}={url}" for key, value in named for url in value.split() if key in ("index-url", "extra-index-url", "find-links")])
UV_PIP = [ -x "$(UV)" ] && "$(UV)" pip install --quiet --python $(PY) --index-strategy unsafe-best-match \
	$$($(PY) -c '$(INDEXES)') -c constraints.txt
INSTALL = { $(UV_PIP) $(1); } || $(PIP) $(1)
FIRST_RUN = --dataset stdlib --workers 1 --max_steps 2 --global_batch_size 1 --micro_batch_size 1 --eval_samples 1
COMPILE = echo "compiling what a run imports, by a run of two steps ..."; runs=$$(mktemp -d); \
	PYTHONDONTWRITEBYTECODE= timeout 300 $(PY) -m nanoray.launch $(FIRST_RUN) --data_dir "$$runs" --out_dir "$$runs" \
		> "$$runs/output" 2>&1 || tail -n 1 "$$runs/output"; \
	rm -rf "$$runs"
$(CORE):
	@test -n "$(PYTHON)" || { echo "nanoray needs Python 3.10 to 3.13 on the PATH; or: make $(MAKECMDGOALS) PYTHON=/path/to/python"; exit 1; }
	@echo "setting up .venv with $$("$(PYTHON)" -V) (once; minutes on a slow line) ..."
	@$(VENV)
	@$(GET_UV)
	@$(call INSTALL,setuptools)
	@$(call INSTALL,--no-build-isolation -e .)
	@if [ -n "$$PYTHONDONTWRITEBYTECODE" ]; then $(COMPILE); fi
	@touch $@
$(STAMP): $(CORE)
	@$(call INSTALL,--no-build-isolation -e ".[dev]")
	@touch $@

clean:
	rm -rf .venv build nanoray.egg-info .mypy_cache .ruff_cache .pytest_cache

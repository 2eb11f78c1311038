# Every target does its own set-up. `make demo` and `make test` are all that a new machine needs.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# PyTorch's, on the machine with the device; and what that machine has, where wheels are fetched for it.
DEVICE_PYTHON  ?= python3
WHEELS_PYTHON  ?= 3.12
WHEELS_MACHINE ?= x86_64
WHEELS_TORCH   ?=
# Where `make demo-ascend` writes what it saw.
STORY   ?= build/npu_story.json
# How long `make soak` runs.
MINUTES ?= 120
# For every Python and machine that the package is for; what is pinned stays so until it is told to go (-U).
PIN    := --universal --python-version 3.11 --generate-hashes --no-header --quiet

.PHONY: help demo demo-ascend test fast no-engine engine test-compat test-soak test-device test-compiled lint format docs pictures site bench situations device device-wheels soak soak-proxy requirements sbom version release tools peers clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk 'BEGIN {FS = ":.*## "} {printf "  make %-12s %s\n", $$1, $$2}'

$(READY): pyproject.toml worker_ext/pyproject.toml tests/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Highwater needs Python 3.11 or newer; try: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@echo 'Installing what the commands need into $(VENV): some minutes, once'
	@(while sleep 8; do echo '  installing'; done) & trap "kill $$!" EXIT INT TERM; \
	$(PYTHON) -m venv $(VENV) && $(BIN)/pip install --quiet --upgrade 'pip>=25.1' && \
	$(BIN)/pip install --quiet --constraint tests/constraints.txt --editable worker_ext --editable . --group dev
	@touch $@

demo: $(READY) ## A real vLLM engine that is watched, then the story told on one that may be acted on
	$(BIN)/highwater demo

demo-ascend: $(READY) ## The story on a simulated NPU, under the real vllm-ascend and torch_npu; needs a C compiler
	$(BIN)/python -m bench.npu_story --results $(STORY)

# A file's tests go to one process, and so do those of one engine. One process more than cores: tests of servers wait for
# much of their time. Compiled tests are kept from run to run: rewriting their asserts takes longer than many of them.
# In the order that tests/conftest.py gives them, not by the number of a group's tests: the longest have few.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -q --dist loadgroup --no-loadscope-reorder \
  --numprocesses $$(($$(getconf _NPROCESSORS_ONLN) + 1))
# Every test in these folders needs a real engine.
ENGINES := tests/growth tests/engine tests/own_engine

test: no-engine engine ## Every test but those that are run by name alone (test-...)

fast: $(READY) ## Units, HTTP on real ports and the chart, without what takes long: two minutes on two idle cores
	$(PYTEST) -m "not slow" --hypothesis-profile=fast tests/unit tests/http tests/helm

no-engine: $(READY) tools peers ## All that need no engine, a browser and a Prometheus among them; the floor of branch coverage
	$(PYTEST) -m "not engine" $(ENGINES:%=--ignore=%) --cov --cov-report= --durations=15

engine: $(READY) tools peers ## Those that need a real vLLM, which is installed first, outside the tree; a simulated NPU among them
	$(BIN)/highwater demo --prepare
	$(PYTEST) -m engine $(ENGINES) --durations=15

test-compat: $(READY) peers ## By name: vLLM 0.12.0, 0.23.0 and 0.27.0 under traffic, the build for CUDA (28 GB), and other proxies
	HIGHWATER_COMPAT_RESULTS=docs/compat.json TEST_STORM_SECONDS=$${TEST_STORM_SECONDS:-12} $(BIN)/pytest -m compat tests
	$(BIN)/python -m tests.compat.page docs/compat.json

# Growth's figures are of a whole machine's processes and of /dev/shm: no other engine runs beside its own.
test-soak: $(READY) peers ## By name: more leaks in real engines, hostile clients, and whatever else takes many minutes
	$(BIN)/highwater demo --prepare
	$(PYTEST) -m "soak and not compat" tests --ignore tests/growth
	$(PYTEST) -m soak tests/growth

test-device: $(READY) peers ## By name: the device kit on a CPU, and the real torch_npu and vllm-ascend in a process on a simulated NPU
	$(BIN)/highwater demo --prepare
	$(PYTEST) -m device tests

test-compiled: $(READY) peers ## By name: the data plane as mypyc compiles it, from outside and in the image; needs a C compiler
	TEST_COMPILED=1 $(PYTEST) -m "compiled or not compiled" tests/faithful tests/docker tests/unit/test_wheel.py

lint: $(READY) ## Lint, format check, types, and which folder imports which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(READY) ## Format, and mend what lint can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY) ## Write the tables in docs/, the dashboards and the chart's schema anew
	$(BIN)/python docs/tables.py
	$(BIN)/python -m helm.source

pictures: $(READY) tools ## What README and docs show, drawn anew: the page in a browser, Grafana's boards from a real Prometheus
	$(BIN)/python -m tests.browser.screenshot
	$(BIN)/python -m tests.observability.pictures

site: $(READY) ## The documentation site, build/site: no network needed; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo 'The site is in build/site: open build/site/index.html'

bench: $(READY) peers ## The figures in docs/figures.md, measured again on this machine
	$(BIN)/highwater demo --prepare
	$(BIN)/python -m bench

situations: $(READY) ## The policy in every situation of docs/policy-situations.md, and the forecast in docs/growth.md
	$(BIN)/python -m tests.situations
	$(BIN)/python -m tests.situations.forecast

device: ## What Highwater says of a device, checked on this machine's, and docs/devices.md (DEVICE_PYTHON has PyTorch)
	status=0; PYTHONPATH=app:worker_ext:. $(DEVICE_PYTHON) -m bench.device all || status=$$?; \
	PYTHONPATH=app:worker_ext:. $(DEVICE_PYTHON) -m bench.device page; exit $$status

device-wheels: $(READY) ## What `make device` needs beside PyTorch, for a machine without network; WHEELS_TORCH=2.11.0: vLLM too
	$(BIN)/python -m bench.device wheels --python $(WHEELS_PYTHON) --machine $(WHEELS_MACHINE) --torch "$(WHEELS_TORCH)"

soak: $(READY) ## A real engine with mixed images, text and videos through the sidecar for MINUTES: docs/figures.md
	$(BIN)/highwater demo --prepare
	$(BIN)/python -m bench.engine_soak --minutes $(MINUTES)

soak-proxy: $(READY) ## Half an hour of hostile clients beside ordinary ones: docs/figures.md, measured again
	$(BIN)/python -m tests.security.soak --minutes 30

requirements: $(READY) ## Pin anew what the sidecar's image is made of, with hashes, and what the tests run with
	$(BIN)/uv pip compile pyproject.toml $(PIN) --no-emit-package vllm-highwater-worker -o docker/requirements.txt
	$(BIN)/uv pip compile docker/build-requirements.in $(PIN) -c docker/requirements.txt -o docker/build-requirements.txt
	$(BIN)/uv pip compile pyproject.toml --group dev --universal --python-version 3.11 --no-header --no-annotate --quiet \
	  --no-emit-package vllm-highwater-worker -c docker/requirements.txt -c docker/build-requirements.txt -o tests/constraints.txt

version: $(READY) ## Print the version, or write it to every place that states it: make version V=1.2.3
	@$(BIN)/python -m release.version $(V)

release: $(READY) ## The files of a release, the same bytes from the same commit: dist/release; publishes nothing
	$(BIN)/python -m release.build --out dist/release
	$(BIN)/twine check --strict dist/release/*.whl dist/release/vllm_*.tar.gz

sbom: $(READY) ## What the sidecar is made of, from an environment installed by hash: dist/sbom.cdx.json (CycloneDX)
	rm -rf build/sbom && mkdir -p dist && $(PYTHON) -m venv build/sbom
	build/sbom/bin/pip install --quiet --no-compile --require-hashes -r docker/requirements.txt
	$(BIN)/pip --python build/sbom/bin/python uninstall --quiet --yes setuptools pip
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --mc-type application --output-reproducible \
	  --validate -o dist/sbom.cdx.json build/sbom/bin/python

# promtool and prometheus judge our metrics and alerts, Alertmanager passes one on. Debian has them in two packages.
tools: ## Prometheus, Alertmanager, systemd-analyze and Chromium, installed where they are missing (Debian)
	@command -v promtool >/dev/null && command -v prometheus >/dev/null && \
	command -v prometheus-alertmanager >/dev/null || { \
	  echo 'installing prometheus (for promtool) and prometheus-alertmanager'; \
	  SUDO=$$( [ "$$(id -u)" = 0 ] || echo sudo ); \
	  $$SUDO apt-get -qq update && $$SUDO apt-get -qq install -y --no-install-recommends \
	    prometheus prometheus-alertmanager >/dev/null; }
	@command -v systemd-analyze >/dev/null || { \
	  echo 'installing systemd (for systemd-analyze)'; \
	  SUDO=$$( [ "$$(id -u)" = 0 ] || echo sudo ); \
	  $$SUDO apt-get -qq update && $$SUDO apt-get -qq install -y --no-install-recommends systemd >/dev/null; }
	@command -v chromium >/dev/null || { \
	  echo 'installing chromium (for the dashboard)'; \
	  SUDO=$$( [ "$$(id -u)" = 0 ] || echo sudo ); \
	  $$SUDO apt-get -qq update && $$SUDO apt-get -qq install -y --no-install-recommends chromium >/dev/null; }

# The data plane is measured beside nginx, by two small C programs. Without nginx the benchmark says so and goes on.
peers: ## nginx and a C compiler, likewise: what the data plane is measured beside
	@PATH="$$PATH:/usr/sbin"; command -v nginx >/dev/null && command -v cc >/dev/null || { \
	  echo 'installing nginx and gcc (for the data plane benchmark)'; \
	  SUDO=$$( [ "$$(id -u)" = 0 ] || echo sudo ); \
	  $$SUDO apt-get -qq update && \
	  $$SUDO apt-get -qq install -y --no-install-recommends nginx-light gcc libc6-dev >/dev/null || true; }

clean: ## Remove what the targets above made in this tree (the engine's environment stays in the cache)
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis

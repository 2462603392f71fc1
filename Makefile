# Everything a clone needs: `make serve` answers, `make test` proves. See CONTRIBUTING.md.
VENV   ?= .venv
PYTHON ?= python3
TORCH  ?= torch==2.13.0
DEVICE ?= auto
PORT   ?= 8000
MODEL  ?=
ARGS   ?=
CHROMIUM ?=
SOAK        ?= 100000
REQUESTS    ?= 50000
SEED        ?= 1
FUZZ_DEVICE ?= null
CLIENT ?=
BIN    := $(VENV)/bin

# Processes that tests run in side by side. A worker of pytest takes about 1 GiB.
JOBS   ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ "$$n" -gt 4 ] && echo 4 || echo "$$n")
# Cheapest first. Folders that do not exist yet are left out.
TESTS  := $(wildcard tests/unit tests/contract tests/runtime backends/*/tests plugins/*/tests tests/api tests/reliability tests/e2e tests/gpu)

export VENV PYTHON TORCH

.PHONY: help install serve test test-full test-tpu test-spirv test-ui test-clients fuzz soak bench wheels lint clean

help:
	@echo "make install     make $(VENV) with everything that tests need; does nothing when nothing changed"
	@echo "make serve       serve a small chat model: [MODEL=name|folder|file.gguf] [DEVICE=auto] [PORT=8000] [ARGS=\"--max-model-len 2048\"]"
	@echo "make test        all tests but the long ones; about 9 minutes on two cores"
	@echo "make test-full   all tests"
	@echo "make test-tpu    what of the tpu backend can be tested without a TPU, in an environment of its own; writes docs/tpu.md"
	@echo "make test-spirv  the Triton kernels compiled to SPIR-V for an Intel GPU that is not here, in an environment of its own"
	@echo "make test-ui     the page at / in a headless Chromium, which must be here: [CHROMIUM=/path/to/chromium]"
	@echo "make fuzz        50,000 mutated requests to a server: [REQUESTS=50000] [SEED=1] [FUZZ_DEVICE=null]; writes docs/reliability/fuzz.<device>.json"
	@echo "make test-clients other people's clients, each from an environment of its own; writes docs/clients: [CLIENT=\"openai anthropic\"]"
	@echo "make soak        100,000 short requests to a server of the null device: [SOAK=100000]; writes docs/reliability/soak.json"
	@echo "make bench       throughput and latency of the small chat model on this machine"
	@echo "make wheels      a wheel of each distribution in dist/, that of the cpu backend with its kernels"
	@echo "make lint        ruff and mypy"

install:
	@tools/install.sh test

serve:
	@tools/install.sh run
	@model="$(MODEL)"; name=; \
	[ -n "$$model" ] || { model=$$($(BIN)/python tools/make_models.py --gguf-only smollm2) || exit 1; name="--served-model-name smollm2"; }; \
	exec $(BIN)/oarlock serve "$$model" $$name --device "$(DEVICE)" --port "$(PORT)" $(ARGS)

# Side by side what can be, then what measures time or uses all cores. Whole files go to one process, for they share what they load.
define pytest
@status=0; \
$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not alone" $(1) $(TESTS) || status=$$?; \
$(BIN)/python -m pytest -m alone $(1) $(TESTS) || status=$$?; exit $$status
endef

test: install
	$(call pytest)

test-full: install
	$(call pytest,--full)

# An environment of its own: JAX, libtpu and torchax take more than a gigabyte. No TPU is needed; see backends/tpu/README.md.
test-tpu:
	@tools/install_tpu.sh
	@.venv-tpu/bin/python -m pytest -p no:cacheprovider -o timeout=1200 backends/tpu/tests
	@.venv-tpu/bin/python tools/tpu_report.py --kit --compile

# The browser's driver has an environment of its own; the browser is the system's.
test-spirv: install
	@tools/compile_for_xpu.sh --quick

test-ui: install
	@CHROMIUM="$(CHROMIUM)" tools/test_ui.sh

# See docs/reliability.md. About three minutes on the null device.
fuzz: install
	@$(BIN)/python tests/reliability/fuzz.py --requests $(REQUESTS) --seed $(SEED) --device $(FUZZ_DEVICE) --out docs/reliability/fuzz.$(FUZZ_DEVICE).json

# Each client has an environment with nothing but the client, and a report in docs/clients.
test-clients: install
	@tools/test_clients.sh $(CLIENT)

soak: install
	@$(BIN)/python tests/reliability/soak.py --requests $(SOAK) --out docs/reliability/soak.json

bench: install
	@model="$(MODEL)"; [ -n "$$model" ] || model=$$($(BIN)/python tools/make_models.py --gguf-only smollm2) || exit 1; \
	$(BIN)/oarlock bench latency --model "$$model" --device "$(DEVICE)" && \
	$(BIN)/oarlock bench throughput --model "$$model" --device "$(DEVICE)"

wheels: install
	@tools/make_wheels.sh dist

lint: install
	@$(BIN)/ruff check . && $(BIN)/mypy

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis

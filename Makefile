# Every target sets up what it needs, once, in $(VENV): `make demo` and `make test` work on a fresh clone.
# `make test TORCH=2.15.0`, and any other target: in an environment of its own, .venv-2.15.0, with that torch in the place of the one that constraints.txt
# pins, whose CPU build is small. Others come as the build for CUDA, of several gigabytes, which runs on a CPU, too.
TORCH ?=
VENV ?= .venv$(TORCH:%=-%)
BIN := $(VENV)/bin
CREATED_STAMP := $(VENV)/.created
BASE_STAMP := $(VENV)/.installed
STAMP := $(BASE_STAMP) $(VENV)/.native-installed
DOCS_STAMP := $(VENV)/.docs-installed
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
# The first of these that is there and new enough; the packages ask for 3.11 or newer and pip refuses an older one.
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(if $(shell $(p) -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo y),$(p))))
JOBS ?= $(shell nproc)
MAKEFLAGS += -j2 # the C library is compiled while pip installs the rest

C_SOURCES := $(wildcard runtime/native/*/*.[ch] runtime/native/*/*.inc)

.PHONY: demo check test test-all native wheels arm browser bench coverage models fuzz fuzz-native sanitize-native endurance hosts force-fields rebuild-matrix cross gpu docs lint venv clean _cross

demo: $(STAMP)
	@$(BIN)/aot-backward doctor
	@mkdir -p build
	@echo; echo "== Export: a convolutional network, its gradients and its whole training step become one file"
	@$(BIN)/aot-backward export examples/digits/export.py:entries -o build/digits.pt2
	@echo; echo "== Train on handwritten digits from that file, beside eager: nothing is traced, nothing is compiled"
	@$(BIN)/python examples/digits/load.py build/digits.pt2
	@echo; echo "== Verify: digests, then outputs, gradients and updated parameters against eager's"
	@$(BIN)/aot-backward verify build/digits.pt2
	@echo; echo "== Look at it: guards, memory, forward and backward side by side, as one page for a browser"
	@$(BIN)/aot-backward inspect build/digits.pt2 --html build/digits.html
	@echo "open file://$(CURDIR)/build/digits.html"

# Whole files go to one worker, so that what a file compiles is compiled once; it is kept in ~/.cache/aot-backward-tests for the next run.
# TESTS=tests/project/test_torch_api.py: only these.
PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile
test: $(STAMP)
	@$(PYTEST) $(TESTS)

# A minute, and nothing is exported: packages as files, tapes, the C library, the command line around scripts, and what may import what.
CHECK := $(addprefix tests/package/test_,devices.py golden.py missing_entries.py references.py state_file.py) \
  $(addprefix tests/passes/test_,tape.py scripts.py) $(addprefix tests/native/test_,calls.py null_arguments.py packages.py signatures.py state_files.py) \
  $(addprefix tests/project/test_,house.py torch_api.py)
check: $(STAMP)
	@CXX=/no/compiler $(PYTEST) $(CHECK)

# With the tests that are marked `slow`: pages and tools that run for minutes, and what other tests try in fewer forms.
test-all: $(STAMP)
	@$(PYTEST) -m "" $(TESTS)

# The C library, by gcc alone, and its tests.
# TARGET=aarch64-macos: only the standalone backend, compiled and linked by zig, and not run (docs/how-to/other-systems.md).
native: $(STAMP)
ifdef TARGET
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check ziglang
	@mkdir -p build/native-$(TARGET)
	@$(BIN)/python -m ziglang cc -target $(TARGET) -shared -O3 -std=c11 -D_GNU_SOURCE -fexceptions -ffp-contract=fast -w \
	  -Iexporters/aot_backward_exporters/toolchain/wasm_include -o build/native-$(TARGET)/libaotb_core.dylib runtime/native/core/*.c
	@ls -l build/native-$(TARGET)
else
	@$(MAKE) --no-print-directory -C runtime/native BUILD=$(CURDIR)/build/native
	@$(BIN)/python -m pytest tests/native -n 2 -m ""
endif

bench: $(STAMP)
	@$(BIN)/python -m tests.tools.benchmarks $(if $(QUICK),--quick)

# Half an hour on two cores. `make coverage MINUTES=20` runs a piece of it; the next call goes on where that one ended. WAY=record: as recorded passes, WAY=onnx: as ONNX graphs.
coverage: $(STAMP)
	@$(BIN)/python -m tests.tools.coverage --minutes $(or $(MINUTES),100) --way $(or $(WAY),export) --docs docs/benchmarks/coverage$(WAY:%=-%)

# Half an hour for the table of models, which goes on where it was broken off, and a quarter for the ways ahead of time; torch 2.15 has one way more.
models: $(STAMP)
	@$(BIN)/python -m tests.tools.model_table --docs docs/models
	@$(BIN)/python -m tests.tools.ahead_of_time --docs docs/benchmarks/ahead-of-time

# Twenty minutes on one core: spoilt packages, training states and signatures. What an earlier run has tried is not tried again.
fuzz: $(STAMP)
	@$(BIN)/python -m tests.tools.fuzz --count 110000 --docs docs/benchmarks/fuzzing

# tests/native with AddressSanitizer and UndefinedBehaviorSanitizer in the libraries and in the Python extension, but for three tests that measure
# memory or limit it. A report ends the run. Four minutes.
SANITIZERS := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
sanitize-native: $(STAMP)
	@rm -rf build/sanitized
	@CFLAGS="$(SANITIZERS)" $(BIN)/python -m pip install --quiet --no-compile --no-deps --disable-pip-version-check --target build/sanitized ./runtime/native
	@CFLAGS="$(SANITIZERS)" PYTHONPATH=build/sanitized ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so.6)" \
	  $(BIN)/python -m pytest -s tests/native -m "" -k "not too_little_memory and not again_and_again and not memory_stays_flat"

# The same through the C library, under sanitizers: a million in an hour and a half on one core.
fuzz-native: $(STAMP)
	@$(BIN)/python -m tests.tools.fuzz.native --docs docs/benchmarks/fuzzing-native

# A quarter of an hour on one core: a million calls of each kind, loads, bindings, changing structures; fails where memory, descriptors or folders grow.
endurance: $(STAMP)
	@$(BIN)/python -m tests.tools.endurance --docs docs/benchmarks/$$(date +%F)-endurance

# A force field in ASE, OpenMM and LAMMPS, and optimal control in CasADi: speed, drift, and forces against eager. Two minutes; `make venv` installs all.
hosts: $(STAMP)
	@$(BIN)/python -m tests.tools.hosts --docs docs/benchmarks/$$(date +%F)-hosts

# Wheels of the runtimes, and of aot_backward_native for aarch64, too, by Debian's g++-aarch64-linux-gnu where it is installed. They go to dist/.
DIST := dist
CROSS := aarch64-linux-gnu-gcc
wheels: $(STAMP)
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w $(DIST) ./runtime ./runtime/native
	@if command -v $(CROSS) > /dev/null; then _PYTHON_HOST_PLATFORM=linux-aarch64 CC=$(CROSS) $(BIN)/python -m pip wheel --quiet --disable-pip-version-check \
	  --no-deps -w $(DIST) $(foreach setting,SYSTEM_NAME=Linux SYSTEM_PROCESSOR=aarch64 C_COMPILER=$(CROSS),-Ccmake.define.CMAKE_$(setting)) ./runtime/native; fi
	@ls $(DIST)

# Code for aarch64 in an emulator: each entry on both machines, also by PyTorch's runtime there, each operator, training by the wheel, an export,
# refusals. Debian's g++-aarch64-linux-gnu and qemu-user; as root it adds the architecture arm64 to dpkg, to fetch Python. It fetches PyTorch's wheel
# for aarch64 (430 MB). Ten minutes.
arm: $(STAMP)
	@$(BIN)/python -m tests.tools.arm --docs docs/benchmarks/$$(date +%F)-arm

# examples/browser in Node.js and in Chromium, beside eager and the C library; steps as ONNX graphs in onnxruntime for JavaScript. Debian's emscripten,
# nodejs with npm, and chromium. Three minutes.
browser: $(STAMP)
	@$(BIN)/python -m tests.tools.browser --docs docs/benchmarks/$$(date +%F)-browser

# Public force fields against the TorchScript by which their libraries deploy them, their training steps against eager, and the pages about MACE. Two
# environments, a gigabyte each, because MACE and NequIP need different versions of e3nn; 40 minutes.
FORCE_FIELDS := --docs docs/benchmarks/$$(date +%F)-forcefields --only
force-fields: $(STAMP)
	@for name in mace nequip; do $(MAKE) --no-print-directory venv VENV=$(VENV)-$$name || exit; done
	@$(VENV)-mace/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt mace-torch schnetpack torch_geometric torchani
	@$(VENV)-mace/bin/python -m pip install --quiet --disable-pip-version-check --no-deps schnetpack==2.1.1  # it asks for an older sympy than torch
	@$(VENV)-nequip/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt nequip
	@$(VENV)-mace/bin/python -m tests.tools.hosts.force_fields $(FORCE_FIELDS) "MACE,SchNet (schnetpack),PaiNN (schnetpack),SchNet (torch_geometric)"
	@$(VENV)-nequip/bin/python -m tests.tools.hosts.force_fields $(FORCE_FIELDS) NequIP
	@$(VENV)-mace/bin/python -m pytest -q -m "" tests/forcefields \
	  $(foreach page,mace train-mace,"tests/project/test_docs.py::test_every_command_and_program_of_a_page_works[docs/how-to/$(page).md]")
	@$(VENV)-nequip/bin/python -m pytest -q -m "" tests/forcefields -k nequip

# Packages made under each of several versions of torch and rebuilt under each other one: an environment for each, a build for CUDA of several gigabytes,
# and 20 minutes. By default the oldest version and the newest, beside the one that constraints.txt pins.
OTHER_TORCH ?= 2.11.0 2.15.0
rebuild-matrix: $(STAMP)
	@for version in $(OTHER_TORCH); do $(MAKE) --no-print-directory venv TORCH=$$version || exit; done
	@$(BIN)/python -m tests.tools.rebuild_matrix --other $(OTHER_TORCH:%=.venv-%/bin/python) --docs docs/benchmarks/$$(date +%F)-rebuild

# Code for GPUs where there is none: torch's build for CUDA, several gigabytes, and 15 minutes. Without TORCH, which constraints.txt pins for a CPU: 2.11.0.
cross:
	@$(MAKE) --no-print-directory _cross TORCH=$(or $(TORCH),2.11.0)
_cross: $(STAMP)
	@$(BIN)/python -m tests.tools.cross --docs docs/benchmarks/$$(date +%F)-cross

# On a machine with a GPU, with its own Python: a supported torch for CUDA, click and rich must be there; nothing is installed. Each part takes minutes.
GPU_PYTHON ?= python3
gpu:
	@PYTHONPATH=.:runtime:exporters $(GPU_PYTHON) -m tests.tools.gpu --docs $(or $(DOCS),docs/benchmarks/$$(date +%F)-gpu)

# The pages of docs/ as a site. A link, an anchor or a public name that leads nowhere is an error; nothing is fetched, neither here nor by a reader.
docs: $(DOCS_STAMP) $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "open build/site/index.html"

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run -Werror $(C_SOURCES)
	@$(BIN)/python -m tests.tools.plain_words

venv: $(STAMP)

# The pip of Python 3.11 takes 40 s for all packages, this one 30.
$(CREATED_STAMP): constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer with venv: apt-get install python3 python3-venv, or make PYTHON=…" >&2; exit 1; }
	@command -v g++ >/dev/null || { echo "error: no C++ compiler: apt-get install g++" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),@{ grep -vE '^(torch|sympy)==' constraints.txt; echo torch==$(TORCH); } > $(CONSTRAINTS))
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) --upgrade pip
	@touch $@

# Without --no-compile pip writes the bytecode of every module of every package: a minute of processor time beside 50 s for all else.
$(BASE_STAMP): $(CREATED_STAMP) pyproject.toml runtime/pyproject.toml
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c $(CONSTRAINTS) -e ./runtime -e '.[test]'
	@touch $@

# The C library as a wheel, in the environment: exports are tried without PyTorch, and the tests of its Python run.
$(VENV)/.native-installed: $(CREATED_STAMP) runtime/native/pyproject.toml runtime/native/CMakeLists.txt $(C_SOURCES) $(wildcard runtime/native/python/*/*)
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c $(CONSTRAINTS) ./runtime/native
	@touch $@

$(DOCS_STAMP): $(BASE_STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[docs]'
	@touch $@

clean:
	rm -rf build dist $(VENV)

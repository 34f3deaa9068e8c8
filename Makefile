# Everything goes through `make install`, which makes .venv once and again only when its inputs change.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
RESULTS := results/report
# `make report REPORT=reports/report.md` is what publishes: nothing that git tracks is touched unless asked.
REPORT ?= results/report.md
# All adapters and ZeRO stages on two ranks; on four what two cannot show, and each framework's deepest stage. Through
# Accelerate the deepest alone, on two: the report is to take less than four minutes on two cores (`make roster` has the
# rest). Its workload is synchronous.
REPORTED := not (post-local-sgd or tp4 or pp4 or accelerate and (dp4 or zero1 or zero2) or dp4 and deepspeed and (zero1 or zero2))

.PHONY: help install report conformance test lint types docs architectures bench clean

help:
	@echo "make report   run the suites on this machine's CPU (world sizes 2 and 4), leave results/report.md (or REPORT=)"
	@echo "make conformance   every clause for every adapter: reports/conformance.md"
	@echo "make test     test Meshmark itself"
	@echo "make tables   published tables beside what the planner computes; make validate: its errors, with goals"
	@echo "make convergence   algorithms against their papers' rates, and to a target: reports/convergence.md"
	@echo "make power    engines broken on purpose must be caught, correct runs must pass: reports/power.md"
	@echo "make chaos    faults by the hundred while suites run: reports/chaos.md; make fuzz: odd inputs for longer"
	@echo "make cluster-test   the suites under a real SLURM, and under its faults: reports/cluster.md (root)"
	@echo "make size     gpt2-124m is judged within 10 minutes and 12 GiB, under every adapter (SIZED=ddp,fsdp2)"
	@echo "make bench    performance claims: launch, overhead, report, plan, growth with ranks"
	@echo "make gpu      run on this machine's GPU with its own python (PYTHON=...), in pieces (gpu.mk), leave GPU_OUT"
	@echo "make gate     what meshmark ab decides by planted slow-downs, beside busy loops: reports/gate.md"
	@echo "make roster   every adapter, variants too, by capability: reports/roster.md"
	@echo "make horovod  build Horovod into the environment, for the adapters that need it: minutes, a C++ compiler and CMake"
	@echo "make architectures   models of Hugging Face Transformers under four frameworks: reports/architectures.md"
	@echo "make coatnet  as a CoAtNet grows: data parallelism, ZeRO, offload or a pipeline: reports/coatnet.md"
	@echo "make lint types docs clean"

install: $(VENV)/.installed

# torch goes first, pinned: other packages would otherwise bring another build of it. deepspeed and fairscale look for
# the installed torch while they build. megatron-core would bring packages that it does not need for its layers.
# DeepSpeed's Adam for offloaded states is C++, compiled here once; where that fails, the adapters that need it skip.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch numpy setuptools wheel ninja py-cpuinfo
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e ".[deepspeed,accelerate,fairscale,lightning-fabric,transformers,html,dev]"
	$(BIN)/pip install -q -c constraints.txt --no-deps megatron-core
	-$(BIN)/python -m meshmark.adapters.deepspeed.operators cpu_adam
	touch $@

# The report is written whether or not a case fails; the exit code says which.
report: install
	rm -f $(RESULTS)/records.jsonl
	$(BIN)/python -m pytest suites --world 2,4 --steps 5 -k "$(REPORTED)" --results $(RESULTS); status=$$?; \
	$(BIN)/meshmark report $(RESULTS) -o $(REPORT) && exit $$status

# Every clause of every adapter, each scenario a launch; written whether or not a clause fails.
conformance: install
	rm -f results/conformance/records.jsonl
	$(BIN)/python -m pytest suites/test_conformance.py --results results/conformance; status=$$?; \
	$(BIN)/meshmark report results/conformance -o reports/conformance.md && exit $$status

# Three files at once, also on two cores: a launch is partly waiting, and more make ranks wait for one another. The longest come first (tests/conftest.py), which
# xdist would reorder. pytest-benchmark, which no test of Meshmark uses, warns of several at once. A hundred processes
# that kept no bytecode would each compile Meshmark anew.
test: install
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -p no:benchmark

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# What `meshmark ab` decides by planted slow-downs, beside two busy loops: reports/gate.md. Goes on from the pairs that
# results/gate-pairs.jsonl holds; 100 runs of unchanged code take some 35 minutes.
.PHONY: gate
gate: install  # GATE_MINUTES=35 measures anew what reports/gate.md shows
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.gate --minutes $(or $(GATE_MINUTES),5)

include plan.mk power.mk chaos.mk roster.mk gpu.mk cluster.mk size.mk horovod.mk coatnet.mk

# The site, of which a warning is an error; mkdocs and its theme are installed for it alone.
docs: install
	$(BIN)/pip install -q -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Every config of examples/transformers under four frameworks, within some 6 minutes on two cores.
architectures: install
	$(BIN)/python -m studies.architectures

bench: install
	status=0; for name in launch overhead report plan scale; do $(BIN)/python -m benchmarks.$$name || status=1; done; exit $$status

clean:
	rm -rf $(VENV) results build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# Every adapter, core and roster, on 2, 4 and 8 ranks and in every precision; how fast the roster is; the roster broken
# on purpose; every clause for what the core's conformance page has not got; and other workloads than a GPT. Leaves
# reports/roster.md, cut off or not: the page says what was not run. Records stay in results/roster: `make roster` on
# the same commit, without changes, runs the rest, and `make roster-page` makes the page of what there is. The page is
# written last, for it is such a change: `git checkout reports` before the rest. Included by the Makefile.
.PHONY: roster roster-page
ROSTER := results/roster
# Nothing is begun after so long of every clause, and of each other workload; one of every adapter comes first.
CLAUSES_TIME ?= 15m
WORKLOAD_TIME ?= 90s
# What takes four ranks, crossed or in groups of two; others take two.
WIDE := fsdp1-hybrid,fsdp2-hsdp,fsdp2-reshard2,tp-fsdp2,fabric-tp-fsdp2,pipeline-tp,pipeline-fsdp2,megatron-gpt-zero1,megatron-gpt-overlap,megatron-gpt-recommended,deepspeed-autotp,accelerate-hsdp,deepspeed-hpz
ROSTER_NAMES = $$($(BIN)/python -c 'from meshmark.adapters import ROSTER; print(",".join(n for n in ROSTER if n not in "$(WIDE)".split(",")))')
ROSTER_RUN = --results $(ROSTER) --resume
# Of what trains by the same DeepSpeed, on four ranks and of clauses the deepest stage.
DEEPSPEEDS := deepspeed-offload or deepspeed-recommended or deepspeed-checkpointing or deepspeed-ulysses or accelerate-deepspeed
SPARED := ($(DEEPSPEEDS)) and (zero1 or zero2) and (dp4 or cp4 or test_conformance)
# Without recomputation these are others under another name.
RECOMPUTING := deepspeed-checkpointing,fairscale-checkpoint-offload
SPARED += or (deepspeed-checkpointing or fairscale-checkpoint-offload) and not (recompute_full or test_conformance)
ROSTER_RUN += -k "not ($(SPARED))"
ROSTER_SUITES = $(BIN)/python -m pytest suites/test_equivalence.py suites/test_memory.py suites/test_communication.py \
	--adapters '*' --workload gpt-mini $(ROSTER_RUN)
ROSTER_CLAUSES = $(BIN)/python -m pytest suites/test_conformance.py --max-time $(CLAUSES_TIME) $(ROSTER_RUN)
# What takes eight ranks: tensor parallelism, a pipeline and replicas, with and without shards.
CROSSED := megatron-gpt*,pipeline-tp,pipeline-fsdp2
EIGHT := dp2.tp2.pp2.1f1b.mb2,dp2.tp2.pp2.1f1b.zero1.mb2,dp2.tp2.pp2.1f1b.zero3.mb2
# Wide enough for ZeRO-Infinity to write files. Its operators, and Horovod, are not built by `make install`: without
# them their runs skip every case, which --allow-skipped lets pass.
SWAPPED := layers=1,hidden=512,heads=4,vocab=256,seq_len=32
# What does not train synchronously, and an algorithm of each.
ALGORITHMS := post-local-sgd,diloco,fed-avg,downpour,decentralised,compressed,ddp-compressed,pipedream
OTHERWISE := $(addprefix gpt-mini-sgd-,local-sgd2 diloco2 fed-avg2 downpour-p1f1 dsgd-ring error-feedback-top-k10 compressed-bf16 pipedream)
# What builds by the knobs of --tuning.
TUNED := ddp,ddp-static,fsdp2,fsdp2-noreshard,fsdp2-offload,fsdp2-recommended
roster: install
	trap '$(BIN)/python -m benchmarks.roster $(ROSTER) --no-mutants' EXIT; trap 'exit 130' INT TERM; status=0; \
	$(ROSTER_SUITES) --world 2,4 || status=$$?; \
	$(ROSTER_SUITES) --adapters deepspeed-autotp --layouts dp2.tp2.zero2.mb2,dp2.tp2.zero3.mb2 || status=$$?; \
	$(ROSTER_SUITES) --world 2,4 --adapters 'gpipe,pipeline*,megatron-gpt*,deepspeed-pipeline' \
		--model layers=8,hidden=32,heads=4,vocab=256,seq_len=32 || status=$$?; \
	$(ROSTER_SUITES) --adapters '$(CROSSED)' --layouts $(EIGHT) || status=$$?; \
	$(ROSTER_SUITES) --world 2 --precision bf16,fp16 || status=$$?; \
	$(ROSTER_SUITES) --adapters $(RECOMPUTING) \
		--layouts dp2.zero1.mb2.recompute_full,dp2.zero2.mb2.recompute_full,dp2.zero3.mb2.recompute_full || status=$$?; \
	$(ROSTER_SUITES) --world 2 --adapters deepspeed-infinity --model $(SWAPPED) --time-limit 600 \
		--allow-skipped || status=$$?; \
	$(ROSTER_SUITES) --world 2 --adapters horovod-fp16 --workload gpt-mini-sgd-compressed-fp16 \
		--allow-skipped || status=$$?; \
	for name in $(OTHERWISE); do $(ROSTER_SUITES) --world 2,4 --adapters $(ALGORITHMS) --workload $$name || status=$$?; done; \
	for name in bert-mini gpt-moe-mini llama-tiny vit-digits resnet-digits coatnet-digits coatnet-digits-bn amoebanet-digits; do \
		$(ROSTER_SUITES) --world 2 --workload $$name --max-time $(WORKLOAD_TIME) || status=$$?; done; \
	$(ROSTER_SUITES) --world 2 --adapters $(TUNED) --tuning compile,fused,chunked --time-limit 1200 || status=$$?; \
	$(BIN)/python -m pytest suites/test_throughput.py --world 2 --workload gpt-mini --timing-budget 0.5 \
		--adapters "$(ROSTER_NAMES)" $(ROSTER_RUN) || status=$$?; \
	$(BIN)/python -m benchmarks.roster $(ROSTER) -o $(ROSTER)/page.md || status=$$?; \
	$(ROSTER_CLAUSES) --world 4 --adapters $(WIDE) || status=$$?; \
	$(ROSTER_CLAUSES) --adapters "$(ROSTER_NAMES)" || status=$$?; \
	exit $$status
roster-page: install
	$(BIN)/python -m benchmarks.roster $(ROSTER) --no-mutants

# Every adapter, core and roster, on 2 and 4 ranks and in every precision; every clause for what the core's conformance
# page has not got; how fast the roster is; and the roster broken on purpose. Leaves reports/roster.md. Records stay in
# results/roster: after a break, `make roster-page` makes the page of what there is, and `make roster` on the same clean
# commit runs the rest. Included by the Makefile.
.PHONY: roster roster-page
ROSTER := results/roster
ROSTER_NAMES = $$($(BIN)/python -c 'from meshmark.adapters import ROSTER; print(",".join(ROSTER))')
ROSTER_RUN = --results $(ROSTER) --resume
ROSTER_SUITES = $(BIN)/python -m pytest suites/test_equivalence.py suites/test_memory.py suites/test_communication.py \
	--adapters '*' --workload gpt-mini $(ROSTER_RUN)
# What takes eight ranks: tensor parallelism, a pipeline and replicas, with and without shards.
CROSSED := megatron-gpt*,pipeline-tp,pipeline-fsdp2
EIGHT := dp2.tp2.pp2.1f1b.mb2,dp2.tp2.pp2.1f1b.zero1.mb2,dp2.tp2.pp2.1f1b.zero3.mb2
roster: install
	status=0; \
	$(ROSTER_SUITES) --world 2,4 || status=$$?; \
	$(ROSTER_SUITES) --world 2,4 --adapters 'gpipe,pipeline*,megatron-gpt*,deepspeed-pipeline' \
		--model layers=8,hidden=32,heads=4,vocab=256,seq_len=32 || status=$$?; \
	$(ROSTER_SUITES) --adapters '$(CROSSED)' --layouts $(EIGHT) || status=$$?; \
	$(ROSTER_SUITES) --world 2 --precision bf16,fp16 || status=$$?; \
	$(BIN)/python -m pytest suites/test_throughput.py --world 2 --workload gpt-mini --timing-budget 0.5 \
		--adapters "$(ROSTER_NAMES)" $(ROSTER_RUN) || status=$$?; \
	$(BIN)/python -m pytest suites/test_conformance.py --adapters "$(ROSTER_NAMES)" $(ROSTER_RUN) || status=$$?; \
	$(BIN)/python -m benchmarks.roster $(ROSTER) && exit $$status
roster-page: install
	$(BIN)/python -m benchmarks.roster $(ROSTER) --no-mutants

# Every adapter, core and roster, on 2 and 4 ranks and in every precision; every clause for what the core's conformance
# page has not got; and the roster broken on purpose. Leaves reports/roster.md. Included by the Makefile.
.PHONY: roster
ROSTER := results/roster
ROSTER_SUITES = $(BIN)/python -m pytest suites/test_equivalence.py suites/test_memory.py suites/test_communication.py \
	--adapters '*' --workload gpt-mini --results $(ROSTER)
roster: install
	rm -f $(ROSTER)/records.jsonl; status=0; \
	$(ROSTER_SUITES) --world 2,4 || status=$$?; \
	$(ROSTER_SUITES) --world 2,4 --adapters 'gpipe,pipeline*' \
		--model layers=8,hidden=32,heads=4,vocab=256,seq_len=32 || status=$$?; \
	$(ROSTER_SUITES) --world 2 --precision bf16,fp16 || status=$$?; \
	$(BIN)/python -m pytest suites/test_conformance.py --results $(ROSTER) \
		--adapters "$$($(BIN)/python -c 'from meshmark.adapters import ROSTER; print(",".join(ROSTER))')" || status=$$?; \
	$(BIN)/python -m benchmarks.roster $(ROSTER) && exit $$status

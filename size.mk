# Judging at the size that people run: gpt2-124m on two CPU ranks, batch 4 x 128, held to 10 minutes a case and 12 GiB in
# all, and mutants that must fail there too. Some minutes of noise and one or two a case on 2 quiet cores; SIZED= chooses
# adapters, by default the report's, and the page is of all that were run. Included by the Makefile.
.PHONY: size
SIZED ?=
size: install
	$(BIN)/python -m benchmarks.size $(if $(SIZED),--adapters '$(SIZED)') --output reports/size.md

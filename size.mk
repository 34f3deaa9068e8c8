# Judging at the size that people run: gpt2-124m on two CPU ranks, batch 4 x 128, held to 10 minutes an adapter and 12 GiB
# in all. Some five minutes of noise and one or two an adapter on 2 quiet cores; SIZED= chooses adapters, by default the
# report's. Included by the Makefile.
.PHONY: size
SIZED ?=
size: install
	$(BIN)/python -m benchmarks.size $(if $(SIZED),--adapters '$(SIZED)')

# As a CoAtNet grows: memory, messages and times of PyTorch's own layouts on 2, 4 and 8 ranks, and what is planned for 64
# GPUs. Leaves reports/coatnet.md and its figure, within some 8 minutes on two quiet cores. Records stay in
# results/coatnet: on the same commit without changes, what is there is not run again. Included by the Makefile.
.PHONY: coatnet
coatnet: install
	$(BIN)/python -m studies.coatnet

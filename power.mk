# The power to fail: every engine that is broken on purpose must be caught, no correct run may alarm. Leaves
# reports/power.md; 18 minutes on 2 quiet cores. Included by the Makefile.
.PHONY: power
power: install
	$(BIN)/python -m benchmarks.power

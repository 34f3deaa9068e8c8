# The power to fail: every engine that is broken on purpose must be caught, no correct run may alarm. Leaves
# reports/power.md, which says how long it took. Cut off, on a clean commit it goes on where it was. Included by the Makefile.
.PHONY: power power-page
power: install
	status=0; EVERY_DEFECT=1 $(BIN)/python -m pytest -q -p no:benchmark tests/test_downpour.py || status=$$?; \
	$(BIN)/python -m benchmarks.power && exit $$status

# The page once more, from results/power/measured.json.gz, which the last `make power` has left; in seconds.
power-page: install
	$(BIN)/python -m benchmarks.power --page

# How often correct runs fail: adds problems of other seeds to results/false-alarms for an hour on 2 quiet cores (or
# MINUTES=; of bf16 alone: K=bf16), as often as it is called, and leaves what every verdict quotes in meshmark/judge/false_alarms.json. A run
# takes 15 ms of a core where many are computed at once.
.PHONY: power-long
MINUTES ?= 60
power-long: install
	$(BIN)/python -m benchmarks.false_alarms --minutes $(MINUTES) $(if $(K),-k $(K))

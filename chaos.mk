# The suites while ranks, servers, pytest, disks, nodes and links are killed, stopped, filled and cut: 500 faults, under
# 15 minutes on 2 quiet cores. Leaves reports/chaos.md. As root also disks, nodes and links. Included by the Makefile.
.PHONY: chaos fuzz
chaos: install
	$(BIN)/python -m benchmarks.chaos

# What `make test` tries in 20 seconds, for longer and with other seeds.
fuzz: install
	FUZZ_EXAMPLES=2000 $(BIN)/python -m pytest -q -n 2 -p no:benchmark tests/test_fuzz.py

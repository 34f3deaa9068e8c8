# The planner's reports; included by the Makefile, whose `install` and `BIN` they use.
.PHONY: tables twins validate dry-runs
# Fails where a table is further off than studies/tables_goals.py lets it be (TITLE: VALUE bound BOUND held|BROKEN).
tables: install
	$(BIN)/python -m studies.tables

# Scaled-down twins of published tables, measured here into baselines/twins/: nine minutes on two quiet cores, up to two
# more on busy ones. Fails where one cannot be measured whole, and as `tables` does.
twins: install
	$(BIN)/python -m benchmarks.twins
	$(BIN)/python -m studies.tables

# Fails where the planner does worse than README says. Ends with a line a bound (NAME VALUE bound BOUND held|BROKEN), a
# line a goal (NAME VALUE goal GOAL met|missed) and their numbers.
validate: install
	$(BIN)/python -m studies.validate

# How algorithms converge where theory is exact, and to a target, on all cores; reports/convergence.md. Fails
# where a claim does not hold; a claim alone: pytest studies/convergence/test_claims.py -k.
.PHONY: convergence throttled
convergence: install
	OMP_NUM_THREADS=1 $(BIN)/python -m studies.convergence

# Steps of algorithms on throttled links between networks of this machine, for root: baselines/throttled.csv, which
# `make convergence` holds its computed map against.
throttled: install
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.throttled

# Theory at 1,024 and 16,384 ranks, each seen from single ranks under PyTorch's fake process group; reports/dry-runs.md.
dry-runs: install
	$(BIN)/python -m studies.dry_runs

# The planner's reports; included by the Makefile, whose `install` and `BIN` they use.
.PHONY: tables twins validate
tables: install
	$(BIN)/python -m studies.tables

# Scaled-down twins of published tables, measured here into baselines/twins/: nine minutes on two quiet cores, up to two
# more on busy ones.
twins: install
	$(BIN)/python -m benchmarks.twins
	$(BIN)/python -m studies.tables

# Ends with one line a goal: NAME VALUE goal GOAL met|missed.
validate: install
	$(BIN)/python -m studies.validate

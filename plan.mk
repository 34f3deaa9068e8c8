# The planner's reports; included by the Makefile, whose `install` and `BIN` they use.
.PHONY: tables validate
tables: install
	$(BIN)/python -m meshmark.plan.tables

# Ends with one line a goal: NAME VALUE goal GOAL met|missed.
validate: install
	$(BIN)/python -m meshmark.plan.validate

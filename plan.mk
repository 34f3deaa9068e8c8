# The planner's reports; included by the Makefile.
PYTHON ?= python

.PHONY: tables validate
tables:  ## regenerate reports/tables.md
	$(PYTHON) -m meshmark.plan.tables
validate:  ## regenerate reports/validation.md; ends with one line per goal
	$(PYTHON) -m meshmark.plan.validate

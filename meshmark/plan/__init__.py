"""Predicts what the suites measure. Imports no torch and no framework."""

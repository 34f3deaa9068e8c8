"""Evidence: published tables, twins, validation, fits. Runs from a checkout; nothing imports it.
What `baselines/` holds of papers and machines is set beside what the planner says, and leaves the pages of `reports/`;
rates are fitted here and read by `meshmark/plan`. `architecture` writes the page docs/architecture.md.
"""

"""Evidence: published tables, twins, validation, fits. Runs from a checkout; nothing imports it.

Studies compare the published and measured tables of `baselines/` with the planner, and write pages of `reports/`. Rates
are fitted here and read by `meshmark/plan`. `architecture` and `adapter_list` write docs/architecture.md and
docs/adapters.md.
"""

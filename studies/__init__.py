"""Evidence: published tables, twins, validation, fits. Runs from a checkout; nothing imports it."""

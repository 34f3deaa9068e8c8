"""Engines broken on purpose, by wrapping real adapters: what Meshmark must catch, or survive."""

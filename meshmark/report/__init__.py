"""Markdown reports from records alone."""

"""Elastic averaging SGD for Meshmark."""

"""Meshmark: benchmark and conformance suite for distributed training."""

__version__ = "0.1.0"

"""Puts the checkout first on the path (a package named `adapters` exists on PyPI) and loads Meshmark's plugin."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["meshmark.plugin"]

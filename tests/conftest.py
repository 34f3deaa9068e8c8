"""What holds of Meshmark's own tests alone: the suites' users bring adapters, frameworks and plugins that may warn."""

import os

import pytest

for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
    os.environ.pop(name, None)  # the runs of pytest that tests start are on their own: pytest-benchmark asks for these


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")

"""What holds of Meshmark's own tests alone: the suites' users bring adapters, frameworks and plugins that may warn."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")

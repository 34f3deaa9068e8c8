"""What holds of Meshmark's own tests, and not of the suites, whose users bring adapters and frameworks that may warn."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")

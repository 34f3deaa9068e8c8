"""Digests tell installed code apart that has the same version."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path

import pytest

from meshmark import environment
from meshmark.environment import PACKAGES


def install(site: Path, factor: str) -> Path:
    """Install `scaler 1.0` as pip does."""
    module = site / "scaler" / "__init__.py"
    module.parent.mkdir(parents=True, exist_ok=True)
    module.write_text(f"FACTOR = {factor}\n")
    info = site / "scaler-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scaler\nVersion: 1.0\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(module.read_bytes()).digest()).rstrip(b"=").decode()
    size = module.stat().st_size
    record = info / "RECORD"
    record.write_text(f"scaler/__init__.py,sha256={digest},{size}\nscaler-1.0.dist-info/RECORD,,\n")
    return module


def digest() -> str:
    environment._digest.cache_clear()
    return environment.code_digest(["scaler"])


def test_a_reinstalled_or_edited_distribution_has_another_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = digest()
    monkeypatch.syspath_prepend(tmp_path)
    module = install(tmp_path, "1.0")
    first = digest()
    install(tmp_path, "1.0")
    assert digest() == first, "the same code once more"
    install(tmp_path, "2.0")
    second = digest()
    module.write_text("FACTOR = 3.0\n")
    later = (tmp_path / "scaler-1.0.dist-info" / "RECORD").stat().st_mtime_ns + 10**9
    os.utime(module, ns=(later, later))
    assert len({absent, first, second, digest()}) == 4


def test_packages_of_this_environment_have_a_digest() -> None:
    assert environment.code_digest(PACKAGES) != environment.code_digest([])
    assert environment.distributions_of("torch") == ["torch"]
    assert environment.distributions_of("nowhere") == []

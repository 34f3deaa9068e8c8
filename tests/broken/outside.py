"""DDP whose adapter comes to grief outside of any rank: in the process that launches, judges and records."""

from __future__ import annotations

from meshmark.adapters.ddp import DDP
from meshmark.spec.case import Case


class NoEnvironment(DDP):
    """Before the launch: its case is recorded as unfinished, and the next one runs."""

    @classmethod
    def environment(cls, device: str) -> dict[str, str]:
        raise LookupError("planted in the environment")


class NoRefusal(DDP):
    """Before it is known whether the case is run."""

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        raise LookupError("planted in the refusal")

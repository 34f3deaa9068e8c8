"""A case that runs for as long as a file exists, so that what strikes a job strikes it there."""

from __future__ import annotations

import os
import time
from pathlib import Path

from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.ddp import DDP
from meshmark.spec.case import Case

GATE = "MESHMARK_CLUSTER_GATE"
"""Variable with that file, beside which each rank leaves one of its own when it begins to wait."""


class Waits(DDP):
    """`ddp`, once the file is gone."""

    def build(self, case: Case, context: RankContext) -> Engine:
        gate = Path(os.environ[GATE])
        gate.with_name(f"waits-{context.rank}").touch()
        while gate.exists():
            time.sleep(0.1)
        return super().build(case, context)

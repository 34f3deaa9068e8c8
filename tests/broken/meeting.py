"""Defects that show where two variations meet, and in neither of them alone."""

from __future__ import annotations

from pathlib import Path

from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.ddp import DDP, DDPEngine
from meshmark.spec.case import Case


class LosesTheSecondGroup(Adapter):
    """DDP, of whose checkpoints the moments of the first group alone are loaded."""

    capabilities = DDP.capabilities
    recipe = DDP.recipe

    def build(self, case: Case, context: RankContext) -> Engine:
        class Losing(DDPEngine):
            def load(self, folder: Path) -> None:
                super().load(folder)
                for group in self.optimizer.param_groups[1:]:
                    for parameter in group["params"]:
                        self.optimizer.state[parameter]["exp_avg"].zero_()

        class Lost(DDP):
            engine = Losing

        return Lost().build(case, context)

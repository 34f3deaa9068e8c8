"""Two defects at once: neither may hide the other from the verdict, nor from the diagnosis both."""

from __future__ import annotations

from tests.broken import gradients as g
from tests.broken import updates as u


class UnevenAtDoubleRate(g.MeanOfRanks, u.DoubleRate): ...


class ScaledUnclipped(g.SlightScale, u.NoClipping): ...


class DropsRowsAndDecay(g.DropsLast, u.NoWeightDecay): ...


class CountsMaskedWithOtherBetas(g.CountsMasked, u.OtherBetas): ...


class StaleInBf16(g.StaleGradients, u.Bf16Weights): ...

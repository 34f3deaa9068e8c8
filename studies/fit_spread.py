"""How far runs are from what is predicted of them: the interval that every prediction carries.

Of runs that the rates are not fitted to and that were in the repository before the rates were split by stack; of
megatron-core, of which there are no others, each model by rates fitted to the other two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from meshmark.plan.rates import NCCL, Rates, SpreadRates
from meshmark.theory.grid import Column
from studies.fit_nemo import fit_megatron_core, nemo_errors
from studies.fit_sweep import fit_sweep, measured_sweep, predict_seconds
from studies.published import Published, bloom_sweep, korthikanti_table5, megatron_table2, torchtitan_rows
from studies.validate_fsdp import FITTED_MODELS, mpt_rows, mpt_time_ratios

_SHARES = 0.05, 0.95
_VERSIONS = 1.083
"""No interval is narrower: the same models on the same machine took 8.3 % less a year later, by newer kernels
(Korthikanti et al. table 5, by rates fitted to Megatron SC21's table 1)."""
_STUDENT = {3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015}
"""By number of sources, the 95 % quantile of Student's t with one degree of freedom less."""


def spread_of(sources: Iterable[Sequence[float] | Column]) -> SpreadRates:
    """Return the spread of measured over predicted step times. Each source counts as much as any other.

    Where there are three sources or more it is no narrower than what a further source is expected in, by Student's t
    over the sources' means: rows of one source are alike, so that many rows of few sources say little.
    """
    parts = [np.asarray(source) for source in sources]
    values = np.concatenate(parts)
    weights = np.concatenate([np.full(len(part), 1.0 / len(part)) for part in parts])
    order = np.argsort(values)
    reached = (np.cumsum(weights[order]) - weights[order] / 2.0) / weights.sum()
    low, high = np.interp(_SHARES, reached, values[order])
    if len(parts) in _STUDENT:
        means = np.array([np.log(part).mean() for part in parts])
        width = _STUDENT[len(parts)] * means.std(ddof=1) * np.sqrt(1.0 + 1.0 / len(parts))
        low, high = min(low, np.exp(means.mean() - width)), max(high, np.exp(means.mean() + width))
    return SpreadRates(faster=min(1.0 / _VERSIONS, float(low)), slower=max(_VERSIONS, float(high)))


def spread_composer(given: Rates, gpu_name: str) -> SpreadRates:
    """Return the spread of the sizes that are held out."""
    held = [row for row in mpt_rows() if row["gpu"].startswith(gpu_name) and row["model"] not in FITTED_MODELS]
    models = sorted({row["model"] for row in held})
    return spread_of(mpt_time_ratios([row for row in held if row["model"] == model], given) for model in models)


def spread_a100(given: Rates) -> SpreadRates:
    titan = [run for run in torchtitan_rows() if run.gpu.name.startswith("a")]
    tables = [korthikanti_table5(), [r for r in megatron_table2() if r.label.startswith("PTD")], bloom_sweep(), titan]
    fsdp = [row for row in mpt_rows() if row["gpu"].startswith("A100")]
    return spread_of([*(_ratios(runs, given) for runs in tables), mpt_time_ratios(fsdp, _pytorch(given))])


def spread_pytorch(given: Rates) -> SpreadRates:
    titan = [run for run in torchtitan_rows() if run.gpu.name.startswith("h")]
    fsdp = [row for row in mpt_rows() if row["gpu"].startswith("H100")]
    return spread_of([_ratios(titan, given), mpt_time_ratios(fsdp, _pytorch(given))])


def _pytorch(given: Rates) -> Rates:
    return given.moved(NCCL)


def spread_megatron_core(pytorch: Rates) -> SpreadRates:
    """Measured over predicted of each model, by rates fitted to the others."""
    models = ("llama3-8b", "llama3-70b", "nemotron4-15b")
    return spread_of(
        np.exp(-nemo_errors({model})(fit_megatron_core(pytorch, set(models) - {model}))) for model in models
    )


def spread_nanotron() -> SpreadRates:
    """Return the spread of the sweep, each model by rates fitted to the other."""
    ratios = []
    for fitted, other in (("1B", "8B"), ("8B", "1B")):
        given = fit_sweep(measured_sweep(fitted), "")
        ratios += [part.step_seconds / predict_seconds(part, given) for part in measured_sweep(other)]
    return spread_of(ratios)


def _ratios(runs: Sequence[Published], given: Rates) -> list[float]:
    known = [run for run in runs if np.isfinite(run.step_seconds)]
    return [run.step_seconds / float(run.predict(given).step_seconds[0]) for run in known]

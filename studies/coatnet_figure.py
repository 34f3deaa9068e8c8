"""The figure of reports/coatnet.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from studies.coatnet_measured import TIMED, Measured
from studies.coatnet_planned import GPU, NUM_GPUS, STATES_SHARE, WIDTHS, plans


def draw(found: Sequence[Measured], budget: float, path: Path) -> None:
    """Measured: the fullest rank by size on two ranks, and of the widest net by ranks. Planned: by size."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "meshmark"
    figure, (by_size, by_ranks, planned) = pyplot.subplots(1, 3, figsize=(15, 4.6))
    good = [each for each in found if not each.failure]
    for name in _names(good):
        own = [each for each in good if each.name == name]
        sized = [each for each in own if each.case.world_size == TIMED]
        wide = [each for each in own if each.width == max(other.width for other in good)]
        style = {"marker": "o", "markersize": 4, "linewidth": 0.8, "label": name}
        if sized:
            sizes = [each.case.workload.model.num_parameters for each in sized]
            by_size.plot(sizes, [each.device_bytes / 2**20 for each in sized], **style)
        if wide:
            by_ranks.plot([e.case.world_size for e in wide], [e.device_bytes / 2**20 for e in wide], **style)
    for panel in (by_size, by_ranks):
        panel.axhline(budget / 2**20, color="black", linewidth=0.8, linestyle="--", label="budget")
        panel.set(ylabel="MiB of the fullest rank", yscale="log", xscale="log")
    by_size.set(xlabel="parameters", title=f"measured, {TIMED} ranks")
    by_ranks.set(xlabel="ranks", title="measured, the widest net")
    worlds = sorted({each.case.world_size for each in good})
    by_ranks.set_xticks(worlds, [str(world) for world in worlds], minor=False)
    by_ranks.minorticks_off()
    sized_plans = [plans(width) for width in WIDTHS]
    sizes = [own[0].case.workload.model.num_parameters for own in sized_plans]
    for index, plan in enumerate(sized_plans[0]):
        held = [own[index].state_bytes / 2**30 for own in sized_plans]
        planned.plot(sizes, held, marker="o", markersize=4, linewidth=0.8, label=plan.name)
    share = STATES_SHARE * GPU.memory_bytes / 2**30
    planned.axhline(share, color="black", linewidth=0.8, linestyle="--", label=f"{STATES_SHARE:.0%} of a GPU")
    planned.set(xlabel="parameters", ylabel="GiB of states of the fullest GPU", xscale="log", yscale="log")
    planned.set_title(f"planned, {NUM_GPUS} GPUs")
    for panel in (by_size, by_ranks, planned):
        panel.legend(frameon=False, fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _names(found: Iterable[Measured]) -> list[str]:
    return list(dict.fromkeys(each.name for each in found))

"""Options of sharded data parallelism: what FSDP's users choose beyond ZeRO stage 3, and its memory and traffic."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.theory.flow import Flow, Purpose, TrafficException
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.traffic import step_traffic


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How units (every block, and the root with all else) are sharded over data-parallel ranks."""

    reshards_blocks: bool = True
    """True if a block's weights are freed after its forward pass, and gathered again for its backward."""
    reshards_root: bool = True
    """True if the same applies to the root."""
    resharded_over: int | None = None
    """Number of neighbours that blocks' weights are resharded over. None means all shards."""
    replicas: int = 1
    """Groups of ranks that each hold all shards. Gradients are reduced within a group, then among groups (HSDP)."""
    reduces_within: bool = True
    """True if every micro-batch's gradients are reduced within a replica. Otherwise their sum is, once a step; until
    then every rank keeps gradients of whole weights.
    """
    reduces_among: bool = True
    """True if every micro-batch's gradients are also reduced among replicas. Otherwise their sum is, once a step."""

    @property
    def kept_share(self) -> float:
        """Share of a block's gathered weights kept from its forward pass to its backward."""
        return 1.0 if not self.reshards_blocks else 1.0 / self.resharded_over if self.resharded_over else 0.0

    def invalid_reason(self, layout: Layout) -> str | None:
        """Return why it does not fit `layout`, or None if it fits."""
        for name, number in (("replicas", self.replicas), ("neighbours to reshard over", self.resharded_over or 1)):
            if number > 1 and (layout.dp % number or layout.dp <= number):
                return f"{number} {name} take a larger multiple of {number} data-parallel ranks, got {layout.dp}"
        return None


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Elements that a framework adds as padding to what it shards."""

    root: int
    blocks: int
    reason: str


def sharded_recipe(recipe: TrainingRecipe, sharding: Sharding, num_micro_batches: int) -> TrainingRecipe:
    """Return `recipe` for a framework with this sharding.

    How much is left of whole gradients, whose reduction is put off, when the peak comes is not planned.
    """
    puts_off = num_micro_batches > 1 and not sharding.reduces_within
    backward = replace(recipe.backward, keeps_root=not sharding.reshards_root, kept_share=sharding.kept_share)
    peak_known = recipe.peak_known and not puts_off
    return replace(recipe, backward=backward, replicas=sharding.replicas, peak_known=peak_known)


def offloaded_recipe(recipe: TrainingRecipe) -> TrainingRecipe:
    """Return `recipe` for a framework whose shards, including weights and gradients, are in host memory.

    They are the masters, from which a device gathers copies.
    """
    states = recipe.states
    kept = replace(states, weight_bytes=0.0, gradient_bytes=0.0, master_bytes=states.weight_bytes)
    return replace(recipe, states=kept)


def sharding_exceptions(case: Case, rank: int, sharding: Sharding, padding: Padding) -> tuple[TrafficException, ...]:
    """Return the exceptions from stage 3 in which everything is gathered twice per micro-batch from all ranks."""
    flows = [flow for flow in step_traffic(case, rank) or () if flow.purpose in _SENT]
    sent = [part for flow in flows for part in _SENT[flow.purpose](case, rank, flow, sharding, padding)]
    chosen = TrafficException(
        sends=tuple(part.flow for part in sent), instead_of=tuple(flows), reason="; ".join(_reasons(sharding))
    )
    padded = tuple(
        replace(part.flow, num_bytes=part.padding_bytes, fewest=0, most=0) for part in sent if part.padding_bytes
    )
    return (
        *([chosen] if chosen.sends != chosen.instead_of else []),
        *([TrafficException(sends=padded, reason=padding.reason)] if padded else []),
    )


@dataclass(frozen=True, kw_only=True)
class _Sent:
    flow: Flow
    padding_bytes: int


def _weights(case: Case, rank: int, flow: Flow, sharding: Sharding, padding: Padding) -> list[_Sent]:
    """Return the gathers of weights. Theory plans two of every element; the second may come only from neighbours."""
    model = case.workload.model
    element = flow.num_bytes // (2 * model.num_parameters)
    root = model.embedding_parameters + model.head_parameters
    blocks = model.num_parameters - root
    times, shards = 1 + sharding.reshards_root, neighbours(flow, sharding.replicas, rank)

    def gathered(ranks: tuple[int, ...], root_times: int, block_times: int) -> _Sent:
        num_bytes = element * (root_times * root + block_times * blocks)
        more = element * (root_times * padding.root + block_times * padding.blocks)
        fewest = flow.fewest // 2 * max(root_times * (root > 0), block_times * (blocks > 0))
        return _Sent(flow=replace(flow, ranks=ranks, num_bytes=num_bytes, fewest=fewest), padding_bytes=more)

    if sharding.resharded_over is None:
        return [gathered(shards, times, 1 + sharding.reshards_blocks)]
    near = neighbours(flow, case.layout.dp // sharding.resharded_over, rank)
    return [gathered(shards, times, 1), gathered(near, 0, 1)]


def _gradients(case: Case, rank: int, flow: Flow, sharding: Sharding, padding: Padding) -> list[_Sent]:
    """Return the reductions within a replica, and then of a rank's shard among the ranks that also hold it."""
    whole = case.workload.model.num_parameters
    more = flow.num_bytes * (padding.root + padding.blocks) // whole
    shards, among = neighbours(flow, sharding.replicas, rank), across(flow, sharding.replicas, rank)
    within = case.layout.num_micro_batches if not sharding.reduces_within else 1
    sent = [_Sent(flow=_fewer(replace(flow, ranks=shards), within), padding_bytes=more // within)]
    if sharding.replicas > 1:
        own = flow.num_bytes // len(shards)  # what is over to a whole byte is padding's, which makes shards equal
        shard = replace(flow, kind="all_reduce", ranks=among, num_bytes=own)
        times = within if sharding.reduces_among else case.layout.num_micro_batches
        padding_bytes = ((flow.num_bytes + more) // len(shards) - own) // times
        sent.append(_Sent(flow=_fewer(shard, times), padding_bytes=padding_bytes))
    return sent


def _fewer(flow: Flow, times: int) -> Flow:
    """Return a flow that is sent once in place of `times`."""
    return replace(flow, num_bytes=flow.num_bytes // times, fewest=flow.fewest // times)


_SENT = {Purpose.WEIGHTS: _weights, Purpose.GRADIENTS: _gradients}


def neighbours(flow: Flow, groups: int, rank: int) -> tuple[int, ...]:
    """Return the group of `rank` if the flow's ranks are divided into `groups` of neighbours."""
    size = len(flow.ranks) // groups
    start = flow.ranks.index(rank) // size * size
    return flow.ranks[start : start + size]


def across(flow: Flow, groups: int, rank: int) -> tuple[int, ...]:
    """Return the ranks with the same position as `rank` in each such group."""
    size = len(flow.ranks) // groups
    return flow.ranks[flow.ranks.index(rank) % size :: size]


def _reasons(sharding: Sharding) -> list[str]:
    found = {
        "what is in no block stays whole from forward to backward": not sharding.reshards_root,
        "blocks stay whole from forward to backward": not sharding.reshards_blocks,
        f"blocks are gathered again from {sharding.resharded_over} neighbours": bool(sharding.resharded_over),
        f"{sharding.replicas} replicas, each sharded": sharding.replicas > 1,
        "gradients are reduced once a step": not sharding.reduces_within,
        "gradients are reduced among replicas once a step": sharding.replicas > 1 and not sharding.reduces_among,
    }
    return [reason for reason, holds in found.items() if holds]

"""The calls of a rank by theory, against the papers' figures; and the adapters' exceptions from it."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from meshmark.measure.readings import wire_factor
from meshmark.models.module import parameter_shapes
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Recompute, Schedule
from meshmark.spec.optimizer import OptimizerSpec
from meshmark.spec.precision import Precision
from meshmark.spec.workload import WORKLOADS, workload
from meshmark.theory.model_theory import local_parameters
from meshmark.theory.traffic import (
    Flow,
    Purpose,
    TrafficException,
    besides,
    by,
    by_route,
    bytes_by_kind,
    departed,
    exceptions_for,
    pipeline_traffic,
    step_traffic,
    tensor_parallel_traffic,
)
from tests.factories import make_case, make_model, make_workload

P = make_model().num_parameters
STREAM = 4 * 12 * 16 * 4
"""Sequences, tokens, hidden, bytes."""


def flows(case: Case, rank: int = 0) -> list[Flow]:
    """Without the scalars."""
    found = step_traffic(case, rank)
    assert found is not None
    return [flow for flow in found if flow.purpose not in (Purpose.NORM, Purpose.OVERFLOW)]


def on_the_wire(case: Case) -> float:
    return sum(flow.num_bytes * wire_factor(flow.kind, len(flow.ranks)) for flow in flows(case))


@pytest.mark.parametrize("n", [2, 4, 8])
def test_ddp_sends_two_parameters_times_n_minus_one_over_n(n: int) -> None:
    case = make_case(layout=Layout(dp=n), workload=make_workload(global_batch=8))
    (flow,) = flows(case)
    assert (flow.kind, flow.ranks, flow.num_bytes) == ("all_reduce", tuple(range(n)), 4 * P)
    assert (flow.fewest, flow.most) == (1, len(parameter_shapes(case.workload.model))), "bucketed, or one a tensor"
    assert on_the_wire(case) == pytest.approx(4 * 2 * P * (n - 1) / n)


@pytest.mark.parametrize("stage, ratio", [(1, 1.0), (2, 1.0), (3, 1.5)])
def test_zero_sends_as_much_as_ddp_and_at_stage_3_half_more(stage: int, ratio: float) -> None:
    """arXiv:1910.02054, section 7."""
    plain, sharded = (on_the_wire(make_case(layout=Layout(dp=4, zero_stage=z))) for z in (0, stage))
    assert sharded == pytest.approx(ratio * plain)


def test_accumulation_is_reduced_once_under_ddp_and_every_time_under_zero_3() -> None:
    ddp, zero = (flows(make_case(layout=Layout(dp=2, num_micro_batches=2, zero_stage=z))) for z in (0, 3))
    assert bytes_by_kind(ddp) == {"all_reduce": 4 * P}
    assert bytes_by_kind(zero) == {"reduce_scatter": 2 * 4 * P, "all_gather": 2 * 2 * 4 * P}
    assert [flow.fewest for flow in zero] == [2, 4]


def test_one_rank_sends_nothing() -> None:
    assert step_traffic(make_case(layout=Layout(num_micro_batches=4)), 0) == []


def test_what_is_not_planned_is_none() -> None:
    assert step_traffic(make_case(layout=Layout(tp=2, sequence_parallel=True)), 0) is None


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_tensor_parallelism_takes_four_all_reduces_a_layer(micro_batches: int) -> None:
    """Each of a micro-batch's residual stream; the embedding, the head's input and the loss come on top."""
    layout = Layout(tp=2, num_micro_batches=micro_batches)
    (few, loss), (many, _) = (
        tensor_parallel_traffic(make_case(layout=layout, workload=make_workload(model=make_model(num_layers=n))), 0)
        for n in (2, 5)
    )
    assert many.num_bytes - few.num_bytes == 3 * 4 * STREAM and few.num_bytes - 2 * 4 * STREAM == 2 * STREAM
    assert few.fewest == few.most == (2 * 4 + 2) * micro_batches
    assert (loss.num_bytes, loss.fewest, loss.most) == (3 * 4 * 12 * 4, 3 * micro_batches, 3 * micro_batches)


def test_recomputation_runs_the_forward_all_reduces_again() -> None:
    plain, again = (
        tensor_parallel_traffic(make_case(layout=Layout(tp=2, recompute=how)), 0)[0]
        for how in (Recompute.NONE, Recompute.FULL)
    )
    assert again.most - plain.most == 2 * make_model().num_layers


def test_a_replica_reduces_its_own_rows_activations_alone() -> None:
    one, two = (tensor_parallel_traffic(make_case(layout=Layout(tp=2, dp=dp)), 0) for dp in (1, 2))
    assert [flow.num_bytes for flow in two] == [flow.num_bytes / 2 for flow in one]


def test_stages_of_a_tensor_parallel_pipeline_share_its_all_reduces() -> None:
    both = [tensor_parallel_traffic(make_case(layout=Layout(tp=2, pp=2)), rank) for rank in (0, 2)]
    whole = tensor_parallel_traffic(make_case(layout=Layout(tp=2)), 0)
    assert sum(f.num_bytes for stage in both for f in stage) == sum(f.num_bytes for f in whole)
    assert [f.purpose for f in both[0]] == [Purpose.ACTIVATIONS], "the loss is the last stage's"


def test_pipelines_send_one_message_a_micro_batch_over_every_boundary_to_the_neighbour() -> None:
    layout = Layout(pp=4, num_micro_batches=4)
    case = make_case(layout=layout, workload=make_workload(model=make_model(num_layers=4)))
    neighbours = {0: [(0, 1)], 1: [(0, 1), (1, 2)], 2: [(1, 2), (2, 3)], 3: [(2, 3)]}
    for rank, pairs in neighbours.items():
        found = pipeline_traffic(case, rank)
        assert [(f.kind, f.ranks) for f in found] == [(k, pair) for pair in pairs for k in ("send", "recv")]
        assert {(f.num_bytes, f.fewest, f.most) for f in found} == {(STREAM, 4, 4)}


def test_virtual_stages_send_from_the_last_rank_to_the_first() -> None:
    layout = Layout(pp=3, num_micro_batches=3, virtual_stages=2, schedule=Schedule.INTERLEAVED)
    case = make_case(layout=layout, workload=make_workload(model=make_model(num_layers=6), global_batch=3))
    sends = {f.ranks: f.fewest for f in pipeline_traffic(case, 0) if f.kind == "send"}
    assert sends == {(0, 1): 6, (0, 2): 3}, "two boundaries after its stages, and one before its second"


def test_groups_are_those_of_the_layout_and_routes_add_up() -> None:
    case = make_case(layout=Layout(dp=2, tp=2, pp=2), workload=make_workload(model=make_model(tied_embeddings=True)))
    found = {(f.purpose, f.axes): f.ranks for f in step_traffic(case, 5) or []}
    assert found == {
        (Purpose.GRADIENTS, "dp"): (5, 7),
        (Purpose.ACTIVATIONS, "tp"): (4, 5),
        (Purpose.LOSS, "tp"): (4, 5),
        (Purpose.ACTIVATIONS, "pp"): (1, 5),
        (Purpose.TIED_WEIGHT, "pp"): (1, 5),
        (Purpose.NORM, "tp+pp"): (0, 1, 4, 5),
    }
    routes = by_route(step_traffic(case, 5) or [])
    activations, loss = tensor_parallel_traffic(case, 5)
    merged = routes["all_reduce", (4, 5)]
    assert merged.num_bytes == activations.num_bytes + loss.num_bytes and merged.most == activations.most + loss.most
    gradients = 4 * (local_parameters(case.workload.model, case.layout, 5) or 0)
    assert routes["all_reduce", (5, 7)].num_bytes == gradients
    assert case.layout.spanned(("dp", "tp"), 5) == (4, 5, 6, 7)


def test_scalars_are_one_number_over_the_ranks_that_share_a_replica_s_gradients() -> None:
    def scalars(layout: Layout, precision: Precision = Precision.FP32) -> list[tuple[Purpose, str, int]]:
        found = step_traffic(make_case(layout=layout, precision=precision), 0) or []
        return [(f.purpose, f.axes, f.num_bytes) for f in found if (f.fewest, f.most) == (1, 1)]

    assert scalars(Layout(dp=2)) == [], "every replica has all of them"
    assert scalars(Layout(dp=2, zero_stage=1)) == [(Purpose.NORM, "dp", 4)]
    assert scalars(Layout(dp=2, tp=2), Precision.FP16) == [(Purpose.NORM, "tp", 4), (Purpose.OVERFLOW, "tp", 4)]
    unclipped = make_workload(optimizer=OptimizerSpec(clip_norm=None))
    assert all(f.purpose is not Purpose.NORM for f in step_traffic(make_case(workload=unclipped), 0) or [])


def test_wide_training_sends_wide() -> None:
    assert bytes_by_kind(flows(make_case(layout=Layout(dp=2), precision=Precision.FP64))) == {"all_reduce": 8 * P}


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", *(n for n in WORKLOADS if "digits" in n)])
def test_as_many_calls_are_allowed_as_the_model_has_tensors(name: str) -> None:
    case = make_case(workload=workload(name), layout=Layout(dp=2))
    assert flows(case)[0].most == len(parameter_shapes(case.workload.model))


# Departures.

SHARDED = make_case(layout=Layout(dp=2, zero_stage=2))
THEORY = flows(SHARDED)


def test_a_departure_takes_a_flow_s_place_and_others_come_besides() -> None:
    instead = exceptions_for(THEORY, Purpose.GRADIENTS, "why", by("all_reduce"))
    padding = besides(THEORY, Purpose.WEIGHTS, Fraction(1, P), "padding")
    sent = by_route(departed(THEORY, [*instead, *padding]))
    assert {(kind, flow.num_bytes) for (kind, _), flow in sent.items()} == {
        ("all_reduce", 4 * P),
        ("all_gather", 4 * P + 4),
    }
    assert sent["all_gather", (0, 1)].most == THEORY[1].most, "in the same calls"
    assert bytes_by_kind(departed(THEORY, exceptions_for(THEORY, Purpose.GRADIENTS, "none"))) == {"all_gather": 4 * P}


def test_nothing_departs_where_theory_sends_nothing() -> None:
    assert (
        exceptions_for([], Purpose.GRADIENTS, "why", by("all_reduce"))
        == exceptions_for(None, Purpose.NORM, "why")
        == ()
    )
    assert besides(THEORY, Purpose.WEIGHTS, Fraction(0), "no padding") == ()


def test_what_theory_does_not_say_cannot_be_departed_from() -> None:
    (made_up,) = exceptions_for(THEORY, Purpose.GRADIENTS, "why", by("all_reduce"))
    with pytest.raises(ValueError, match="replaces all_reduce of gradients over ranks 0, 1, which theory lacks"):
        departed(THEORY, [TrafficException(instead_of=made_up.sends, reason="twice removed")])
    with pytest.raises(ValueError, match="which theory lacks"):
        departed(THEORY, [made_up, made_up])


def test_padding_is_what_is_missing_to_a_multiple() -> None:
    """FSDP2 over three ranks pads rows, FairScale's FSDP a wrapper's flat parameter."""
    from meshmark.adapters.fairscale import FairScaleFSDP
    from meshmark.adapters.fsdp2 import FSDP2

    case = make_case(layout=Layout(dp=3, zero_stage=3), workload=make_workload(global_batch=3))
    shapes = parameter_shapes(case.workload.model)
    rows = sum(-shape[0] % 3 * math.prod(shape[1:]) for shape in shapes.values())
    sent = bytes_by_kind(departed(step_traffic(case, 0) or [], FSDP2.traffic_exceptions(case, 0)))
    assert sent["reduce_scatter"] == 4 * (P + rows) and sent["all_gather"] == 2 * sent["reduce_scatter"]
    sent = bytes_by_kind(departed(step_traffic(case, 0) or [], FairScaleFSDP.traffic_exceptions(case, 0)))
    assert sent["reduce_scatter"] % 12 == 0 and 0 <= sent["reduce_scatter"] - 4 * P <= 4 * 2 * 3

"""Context parallelism: what a ring of keys and values sends, what of it shows, and where a search tries it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmark.cli.commands import main
from meshmark.errors import InputError
from meshmark.models.transformer import ModelSpec
from meshmark.plan.model_names import plan_model
from meshmark.plan.predict_file import predict_file
from meshmark.plan.prediction import Prediction, predict_grid
from meshmark.plan.rates import Rates, rates
from meshmark.plan.search import search
from meshmark.plan.step_time import PARTS
from meshmark.spec.hardware import GIB, gpu
from meshmark.spec.layout import Layout, Recompute
from meshmark.theory.grid import RECOMPUTES, Grid, SearchSpace, make_grid, searched_contexts
from meshmark.theory.memory import CATEGORIES, model_states
from meshmark.theory.recipe import recipe
from meshmark.theory.traffic import bytes_by_kind, context_parallel_traffic, data_parallel_traffic, step_traffic
from studies.papers import paper
from tests.factories import make_case, make_model, make_workload
from tests.test_plan_search import sweep_rows, write_table

TWO = st.sampled_from([1, 2])
H100, NANOTRON, GIVEN = gpu("h100"), recipe("nanotron"), rates("h100-nanotron")


def links(**bandwidths: float) -> Rates:
    """The same without latencies, and with these bandwidths."""
    given = {"tp_latency_seconds": 0.0, "hop_seconds": 0.0, **bandwidths}
    return GIVEN.moved({f"network.{name}": value for name, value in given.items()})


LONG = replace(plan_model("llama-8b"), seq_len=131072)


def predict(grid: Grid, model: ModelSpec = LONG, given: Rates = GIVEN) -> Prediction:
    return predict_grid(model, grid, H100, NANOTRON, given)


@given(
    cp=st.sampled_from([1, 2, 4, 8]), tp=st.sampled_from([1, 2]), pp=st.sampled_from([1, 2]), dp=st.sampled_from([1, 2])
)
def test_a_ring_sends_its_blocks_cp_minus_one_times(cp: int, tp: int, pp: int, dp: int) -> None:
    """Keys and values forward, these and their gradients backward: 6 (cp - 1)/cp of keys, of all tokens and layers."""
    model = make_model(num_layers=4, num_heads=4, num_kv_heads=2, seq_len=16)
    layout = Layout(cp=cp, tp=tp, pp=pp, dp=dp)
    case = make_case(layout=layout, workload=make_workload(model=model))
    sent = bytes_by_kind(context_parallel_traffic(case, rank=0))
    keys = case.workload.tokens_per_step / dp * model.kv_hidden / tp * 4 * model.num_layers / pp
    assert sent.get("send", 0.0) == sent.get("recv", 0.0) == pytest.approx(6 * keys * (cp - 1) / cp)


def test_context_parallel_ranks_reduce_gradients_and_share_zero_s_states_as_data_parallel_ones_do() -> None:
    alone, ring = (make_case(layout=Layout(dp=dp, cp=cp, zero_stage=3)) for dp, cp in ((4, 1), (2, 2)))
    assert bytes_by_kind(data_parallel_traffic(alone, 0)) == bytes_by_kind(data_parallel_traffic(ring, 0)) != {}
    assert model_states(alone, 3).parameters == model_states(ring, 3).parameters
    found, expected = (set(bytes_by_kind(step_traffic(case, 0))) for case in (ring, alone))
    assert found == expected | {"send", "recv"}
    short = plan_model("llama-8b")
    few, many = (predict(make_grid(dp=[dp], cp=[cp]), short).time for dp, cp in ((64, 1), (16, 4)))
    assert few.optimizer[0] == many.optimizer[0]
    reduced = [predict(make_grid(dp=[dp], cp=[cp], zero_stage=[1]), short) for dp, cp in ((64, 1), (16, 4))]
    assert reduced[0].time.data_communication[0] > 0
    assert reduced[1].time.data_communication[0] == pytest.approx(reduced[0].time.data_communication[0])


@given(cp=st.sampled_from([2, 4, 8, 16]), tp=st.sampled_from([1, 2, 4, 8]))
@settings(deadline=None)
def test_only_what_attention_does_not_hide_of_a_hop_shows(cp: int, tp: int) -> None:
    grid = make_grid(cp=[cp], tp=[tp], sequence_parallel=True)
    endless = links(tp_bandwidth=1e30, p2p_bandwidth=1e30)
    assert predict(grid, given=endless).time.context_communication[0] == 0.0
    slow = links(tp_bandwidth=1.0, p2p_bandwidth=1.0)
    found = predict(grid, given=slow)
    block = LONG.seq_len / cp * LONG.kv_hidden / tp * NANOTRON.activations.element_bytes
    hidden = found.time.attention[0] * (cp - 1) / cp
    assert found.time.context_communication[0] == pytest.approx(
        LONG.num_layers * 6 * (cp - 1) * block - hidden, rel=1e-6
    )


def test_a_ring_that_leaves_its_node_goes_over_one_adapter_a_rank() -> None:
    bare = links().moved({"kernels.attention_efficiency": 1.0})
    tiny = replace(plan_model("llama-8b"), seq_len=512)
    inside, outside = (predict(make_grid(cp=[8], tp=[tp]), tiny, bare).time for tp in (1, 2))
    hop = GIVEN.network.tp_bandwidth / GIVEN.network.p2p_bandwidth / 2  # a rank of two sends half as much
    assert outside.context_communication[0] / inside.context_communication[0] > 0.8 * hop > 2


@pytest.mark.parametrize("name", ["llama-8b", "gpt-175b"])
def test_one_rank_a_sequence_costs_nothing_more(name: str) -> None:
    found = predict(make_grid(dp=[8], tp=[8], pp=[4], num_micro_batches=[8], cp=[1, 2]), plan_model(name))
    assert found.time.context_communication[0] == 0.0 < found.memory.total_bytes[1] < found.memory.total_bytes[0]
    assert found.step_seconds[0] == pytest.approx(sum(getattr(found.time, part)[0] for part in PARTS))
    assert found.memory_bytes[0] == pytest.approx(sum(getattr(found.memory, part)[0] for part in CATEGORIES))


def test_long_sequences_are_searched_with_context_parallelism_and_short_ones_without() -> None:
    assert searched_contexts(2048) == searched_contexts(4096) == (1,)
    assert searched_contexts(8192) == (1, 2)
    assert searched_contexts(32768) == (1, 2, 4, 8)
    assert searched_contexts(131072) == (1, 2, 4, 8, 16, 32)
    found = search(LONG, SearchSpace(num_gpus=64, global_batch=16), H100, NANOTRON, GIVEN)
    assert set(found.prediction.grid.cp) == {1, 2, 4, 8, 16, 32}
    best = found.prediction.grid.layout(int(found.ranked[0]))
    assert best.cp > 1 and best.world_size == 64 and "cp" in best.id
    short = search(plan_model("gpt-175b"), SearchSpace(num_gpus=512, global_batch=512), H100, NANOTRON, GIVEN)
    assert set(short.prediction.grid.cp) == {1}
    named = search(
        plan_model("gpt-175b"), SearchSpace(num_gpus=512, global_batch=512, contexts=[2]), H100, NANOTRON, GIVEN
    )
    assert set(named.prediction.grid.cp) == {2}


def test_long_sequences_on_4096_gpus_are_searched() -> None:
    found = search(
        replace(plan_model("gpt-175b"), seq_len=131072),
        SearchSpace(num_gpus=4096, global_batch=256),
        H100,
        NANOTRON,
        GIVEN,
    )
    assert found.num_examined > 1000


def test_degrees_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="cp is 3: a sequence of 131072 tokens must divide"):
        search(LONG, SearchSpace(num_gpus=48, global_batch=16, contexts=[3]), H100, NANOTRON, GIVEN)
    assert main(["plan", "--gpus", "8", "--cp", "0"]) == 2 == main(["plan", "--gpus", "8", "--cp", "two"])
    said = capsys.readouterr().err
    assert "--cp '0': 0 is too small" in said and "--cp 'two': expected whole numbers" in said
    assert main(["plan", "--gpus", "8", "--cp", "2,4", "--global-batch", "8"]) == 0
    assert ".cp2." in capsys.readouterr().out


def test_predict_reads_a_column_cp_where_there_is_one(tmp_path: Path) -> None:
    row = sweep_rows(1)[0]
    doubled = {**row, "cp": "2", "gpus": str(2 * int(row["gpus"]))}
    assert predict_file(write_table(tmp_path / "in.csv", [doubled]), tmp_path / "out.csv") == 1
    with pytest.raises(InputError, match="dp x tp x pp x cp is"):
        predict_file(write_table(tmp_path / "in.csv", [{**row, "cp": "2"}]), tmp_path / "out.csv")


def test_torchtitan_s_long_sequences_take_the_memory_that_is_planned() -> None:
    """Table 2 (arXiv:2410.06511), up to 262,144 tokens on a ring of eight. Its products are float8, which the planner
    has no rate of, so their time is not compared."""
    rows = [row for row in paper("torchtitan_performance") if row["model"] == "Llama 3.1 8B" and row["cp"] != "1"]
    assert len(rows) == 3
    for row in rows:
        model = replace(plan_model("llama-8b"), seq_len=int(row["seq_len"]))
        grid = make_grid(
            dp=[int(row["fsdp"])], cp=[int(row["cp"])], zero_stage=[3], recompute=[RECOMPUTES.index(Recompute.FULL)]
        )
        found = predict_grid(model, grid, gpu("h100-96"), recipe("fsdp2"), GIVEN)
        assert found.memory_bytes[0] / GIB == pytest.approx(float(row["peak_memory_gib"]), rel=0.03)

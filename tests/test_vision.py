"""Images: the digits, the vision transformer, batch norms, and their cases through the launcher."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from meshmark.adapter.contract import Capabilities, Feature
from meshmark.adapter.engine import RankContext
from meshmark.adapter.registry import load_adapter
from meshmark.adapter.single import Single, SingleEngine, reduced_backward
from meshmark.adapters import ADAPTERS
from meshmark.errors import InputError
from meshmark.judge.deviation import QuantityKind
from meshmark.judge.truth import exact_gradients, initial_values
from meshmark.judge.twin import exact_buffers, initial_buffers
from meshmark.launch.launch import ForkserverLauncher
from meshmark.models.config import ImageModelConfig, digit_models
from meshmark.models.module import buffer_shapes, build_model, parameter_shapes, sizes_by_block
from meshmark.models.transformer import MODELS, Family
from meshmark.records.record import Record
from meshmark.reference import data
from meshmark.reference.data import IGNORED, check_data, load_digits, make_batch
from meshmark.reference.objective import loss_share
from meshmark.run.runner import Runner, RunOptions
from meshmark.run.throughput import throughput
from meshmark.run.verdict import judge_communication, judge_memory
from meshmark.serial import decode, encode
from meshmark.spec.algorithm import SYNCHRONOUS
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Loss, Workload, workload
from meshmark.theory.memory import ModelStates, model_states
from meshmark.theory.traffic import bytes_by_kind, step_traffic
from tests.broken.mutant import algorithm_of, under
from tests.broken.mutants import BY_NAME, target
from tests.factories import make_good, make_memory_evidence, make_timed, make_traffic_evidence

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed: pip install scikit-learn"
)
VIT, BN, RESNET = workload("vit-digits"), workload("vit-digits-bn"), workload("resnet-digits")
COATNET, COATNET_BN = workload("coatnet-digits"), workload("coatnet-digits-bn")
AMOEBANET = workload("amoebanet-digits")
STAGES = Layout(pp=2, num_micro_batches=4)
TWO = Layout(dp=2, num_micro_batches=2)
MUTANTS = [
    "fsdp2_MeanOfRanksOfImages",
    "ddp_NormalisesAsInEvaluation",
    "ddp_RankKeepsStatistics",
    "fairscale_oss_RankKeepsStatistics",
    "ddp_RoundsStatistics",
    "ddp_OtherSideOfPositions",
    "ddp_PositionsNotUpdated",
    "fsdp2_NeighbouringGroups",
    "gpipe_SkipsToTheOtherCell",
    "gpipe_InfersOnStages",
    "fsdp2_KeepsStatisticsOfConvolutions",
]
"""`make power` runs all."""


def test_the_digits_are_scikit_learns() -> None:
    """Which takes seconds to import: the file is read instead."""
    from sklearn.datasets import load_digits as theirs

    images, labels = load_digits()
    assert images.shape == (1797, 1, 8, 8)
    assert np.array_equal(images.squeeze(1).numpy() * 16, theirs().images)
    assert np.array_equal(labels.numpy(), theirs().target)


def test_without_scikit_learn_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    load_digits.cache_clear()
    with pytest.raises(InputError, match="pip install scikit-learn"):
        check_data(VIT)


def test_images_are_drawn_by_seed_and_step_and_keep_their_labels() -> None:
    one, again, other = make_batch(VIT, 3), make_batch(VIT, 3), make_batch(VIT, 4)
    assert torch.equal(one.inputs, again.inputs) and torch.equal(one.targets, again.targets)
    assert not torch.equal(one.inputs, other.inputs)
    images, labels = load_digits()
    for image, label, weight in zip(one.inputs, one.targets, one.weights, strict=True):
        same = (images == image).all(-1).all(-1).all(-1)
        assert int(label) in labels[same].tolist() if weight else int(label) == IGNORED


def test_ranks_hold_unequal_numbers_of_images_that_count() -> None:
    """At most steps, so that a mean of means is wrong."""
    uneven = 0
    for step in range(10):
        batch = make_batch(VIT, step)
        parts = [float(part.weights.sum()) for part in batch.micro_batches(2)]
        assert sum(parts) == batch.total_weight == float((batch.targets != IGNORED).sum()) > 0
        uneven += parts[0] != parts[1]
    assert uneven >= 7


def test_weights_weigh() -> None:
    batch = make_batch(dataclasses.replace(VIT, masked=False), 0).rows(0, 2)
    logits = torch.randn(2, 10, generator=torch.Generator().manual_seed(0))
    each = [float(loss_share(logits[i : i + 1], batch.rows(i, i + 1), Loss.WEIGHTED_CROSS_ENTROPY)) for i in range(2)]
    weighed = dataclasses.replace(batch, weights=torch.tensor([0.25, 2.0]))
    assert float(loss_share(logits, weighed, VIT.loss)) == pytest.approx(0.25 * each[0] + 2 * each[1])


@pytest.mark.parametrize("spec", digit_models().values(), ids=lambda s: s.name)
def test_closed_forms_are_those_of_the_model(spec: ImageModelConfig) -> None:
    model, sizes = build_model(spec), sizes_by_block(spec)
    assert spec.num_parameters == sum(p.numel() for p in model.parameters())
    assert spec.embedding_parameters + spec.head_parameters == sum(sizes.pop(""))
    assert spec.embedding_parameters == sum(p.numel() for p in model.embedding.parameters())
    assert spec.block_parameters == max(map(sum, sizes.values()))
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        build_model(spec)(torch.empty(3, 1, 8, 8))
    assert counter.get_total_flops() == 3 * spec.forward_flops


@pytest.mark.parametrize("coupled", [BN, RESNET, COATNET, COATNET_BN, AMOEBANET], ids=lambda w: w.name)
def test_a_part_has_the_names_and_values_of_the_whole(coupled: Workload) -> None:
    spec = coupled.model
    whole, parts = build_model(spec), [build_model(spec, layers) for layers in ([0, 1], range(2, spec.num_layers + 2))]
    for model in (whole, *parts):
        model.initialize(seed=5)
    held = {name: p for part in parts for name, p in part.named_parameters()}
    assert held.keys() == dict(whole.named_parameters()).keys() == parameter_shapes(spec).keys()
    assert all(torch.equal(p, held[name]) for name, p in whole.named_parameters())
    images = make_batch(BN, 0).inputs
    torch.testing.assert_close(parts[1](parts[0](images)), whole(images))


def test_every_patch_sees_all_others() -> None:
    """Attention that is causal would leave the first patch as it is when the last one changes."""
    model = build_model(VIT.model, [0, 1])
    model.initialize(seed=0)
    images = make_batch(VIT, 0).inputs[:1].clone()
    before = model(images)
    images[..., -1, -1] += 1
    assert not torch.allclose(model(images)[0, 0], before[0, 0])


@pytest.mark.parametrize("coupled", [BN, RESNET, COATNET_BN, AMOEBANET], ids=lambda w: w.name)
def test_the_truth_under_batch_norm_is_that_of_micro_batches_of_replicas(coupled: Workload) -> None:
    """Against plain PyTorch in training mode, part by part; and another layout is another truth."""
    model, batch = build_model(coupled.model).double(), make_batch(coupled, 0)
    model.initialize(coupled.seed)
    rows = coupled.global_batch // 4
    for i in range(4):
        part = batch.rows(i * rows, (i + 1) * rows)
        loss_share(model(part.inputs), part, coupled.loss).backward()
    start = initial_values(coupled)
    exact = exact_gradients(coupled, start, batch, TWO).gradients
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(exact[name], parameter.grad.numpy(), rtol=1e-9, atol=1e-14)
    whole = exact_gradients(coupled, start, batch, Layout(dp=2)).gradients
    assert not np.allclose(whole["head.output.weight"], exact["head.output.weight"], rtol=1e-3)


def test_exact_buffers_are_pytorchs() -> None:
    model = build_model(BN.model).double()
    model.initialize(BN.seed)
    parts = list(make_batch(BN, 0).micro_batches(4))
    for part in parts:
        model(part.inputs)
    exact = exact_buffers(BN, initial_values(BN), initial_buffers(BN), parts)
    assert exact.keys() == buffer_shapes(BN.model).keys() and len(exact) == 3
    for name, buffer in model.named_buffers():
        np.testing.assert_allclose(exact[name], buffer.numpy(), rtol=1e-12)


def test_what_is_not_known_is_not_planned() -> None:
    case = Case(adapter="ddp", workload=VIT, layout=TWO)
    states = model_states(case, 0)
    assert states is not None and (states.activations, states.peak) == (None, None)
    assert states.parameters == 4 * VIT.model.num_parameters
    assert bytes_by_kind(step_traffic(case, 0)) == {"all_reduce": 4 * VIT.model.num_parameters}
    split = dataclasses.replace(case, layout=Layout(tp=2))
    assert model_states(split, 0) is None and step_traffic(split, 0) is None
    record = make_good(
        case=split,
        memory=make_memory_evidence(planned=[None, None]),
        traffic=make_traffic_evidence(planned=[None, None]),
    )
    assert judge_memory(record) is None and judge_communication(record) is None
    planned = ModelStates(parameters=400, gradients=400, optimizer_states=800)
    verdict = judge_memory(
        make_good(case=case, memory=make_memory_evidence(planned=[planned] * 2, extra_memory=[[], []]))
    )
    assert verdict is not None and "activations: not planned" in verdict.summary


def test_throughput_counts_images() -> None:
    timed = make_timed(case=Case(adapter="ddp", workload=VIT, layout=TWO))
    found = throughput(timed)
    assert (found.unit, found.per_second) == ("images", 32 * 2 / sum(timed.timing.step_seconds))
    assert found.mfu == pytest.approx(found.per_second * 3 * VIT.model.forward_flops / 3e9)


@pytest.mark.parametrize("one", [VIT, BN, RESNET, COATNET, AMOEBANET, workload("gpt-mini")], ids=lambda w: w.name)
def test_a_workload_comes_back_from_json_with_its_kind_of_model(one: Workload) -> None:
    assert decode(Workload, encode(one)) == one


def test_contradictions_are_refused() -> None:
    with pytest.raises(InputError, match="trains on text, but the data set is digits"):
        dataclasses.replace(VIT, model=MODELS["gpt-mini"])
    with pytest.raises(InputError, match="trains on digits, but the data set is text"):
        dataclasses.replace(workload("gpt-mini"), model=VIT.model)
    with pytest.raises(InputError, match="image_size 8 is not divisible by patch_size 3"):
        dataclasses.replace(VIT.model, patch_size=3)
    with pytest.raises(InputError, match="image_size 8 is not divisible by 16: every change of widths"):
        dataclasses.replace(RESNET.model, widths=(1, 2, 3, 4, 5))
    with pytest.raises(InputError, match="at least 1 of every block"):
        dataclasses.replace(RESNET.model, widths=())
    with pytest.raises(InputError, match="attentions holds 12, not divisible by head_dim 8"):
        dataclasses.replace(COATNET.model, attentions=(12,))
    with pytest.raises(InputError, match="it has no attentions; use a ResNetSpec"):
        dataclasses.replace(COATNET.model, attentions=())
    with pytest.raises(InputError, match="its last cell .* reduces, and no later cell would read"):
        dataclasses.replace(AMOEBANET.model, cells=(4, 8))
    with pytest.raises(InputError, match="the digits have"):
        check_data(dataclasses.replace(VIT, model=dataclasses.replace(VIT.model, image_size=16)))


@pytest.mark.parametrize("cast", [False, True], ids=["autocast", "cast-weights"])
def test_rounded_reductions_see_micro_batches_in_the_order_of_the_truth(cast: bool) -> None:
    """Rank by rank: `single`, which stands for two of them, comes to the statistics of four micro-batches in a row."""
    context = RankContext(rank=0, world_size=1, device=torch.device("cpu"), backend="gloo", scratch=Path())
    statistics = []
    for count in (2, 4):
        layout = Layout(num_micro_batches=count)
        case = Case(adapter="single", workload=BN, layout=layout, precision=Precision.BF16_REDUCE_BF16)
        engine = Single().build(case, context)
        assert isinstance(engine, SingleEngine)
        engine.cast_weights = cast
        batch = make_batch(BN, 0)
        _ = reduced_backward(engine, batch, 2) if count == 2 else engine.backward(batch)
        statistics.append(engine.buffers())
    ranks, alone = statistics
    assert len(ranks) == 3 and all(torch.equal(ranks[name], alone[name]) for name in alone)


@pytest.mark.parametrize("images", [VIT, RESNET, COATNET_BN], ids=lambda w: w.name)
def test_an_adapter_takes_images_only_where_it_says_so(images: Workload) -> None:
    refused = {}
    for name, path in ADAPTERS.items():
        adapter = load_adapter(path)
        stage = min(adapter.capabilities.zero_stages)
        if images.couples_rows and algorithm_of(name) is not SYNCHRONOUS:
            continue  # replicas that differ and batch norms: such a workload cannot be made
        case = Case(adapter=name, workload=under(name, images), layout=Layout(zero_stage=stage))
        if reason := adapter.capabilities.refusal(case, "cpu", "gloo"):
            refused[name] = reason
    assert refused.keys() == {"megatron"}
    assert all(f"model family {images.model.family} (" in reason for reason in refused.values())


def test_an_adapter_may_lack_buffers() -> None:
    """The note is made for a workload with buffers, and for no other."""
    without = Capabilities(families=frozenset(Family), lacks={Feature.BUFFERS: "its engine tells none"})
    cases = [Case(adapter="mine", workload=trained, layout=Layout()) for trained in (VIT, BN)]
    plain, coupled = (without.refusal(case, "cpu", "gloo") for case in cases)
    assert plain is None and coupled == "mine does not support buffers by replica (its engine tells none)"


@pytest.fixture(scope="module")
def runner(launcher: ForkserverLauncher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    known = {name: target(name) for name in MUTANTS} | {name: ADAPTERS[name] for name in ("ddp", "gpipe")}
    running = Runner(launcher, known, RunOptions(observed_steps=3), tmp_path_factory.mktemp("results"))
    yield running
    running.close()


def observe(runner: Runner, trained: Workload) -> Record:
    return runner.observe(Case(adapter="ddp", workload=trained, layout=TWO))


@pytest.mark.parametrize(
    "trained", [BN, RESNET, pytest.param(COATNET_BN, marks=pytest.mark.slow)], ids=lambda w: w.name
)
def test_ddp_trains_images_correctly(runner: Runner, trained: Workload) -> None:
    record = observe(runner, trained)
    assert [v.suite for v in record.verdicts if v.passed] == ["equivalence", "memory", "communication"], record.outcome
    equivalence = record.verdict("equivalence")
    assert equivalence is not None and float(equivalence.evidence["detection_limit"]) < 2e-5
    judged = {quantity for quantity in record.equivalence.deviations if quantity.kind is QuantityKind.BUFFERS}
    assert judged == {QuantityKind.BUFFERS.of(name) for name in buffer_shapes(trained.model)}
    assert judged <= record.equivalence.noise.keys(), "what has no noise is not judged"
    assert all(plan and plan.activations is None for plan in record.memory.planned)
    memory = record.verdict("memory")
    assert memory is not None and memory.summary.endswith("activations: not planned")


@pytest.mark.slow
def test_a_pipeline_trains_images_in_stages_of_unequal_size(runner: Runner) -> None:
    """Weights of targets reach the last stage, and each stage tells its own batch norms."""
    record = runner.observe(Case(adapter="gpipe", workload=AMOEBANET, layout=STAGES))
    assert [v.suite for v in record.verdicts if v.passed] == ["equivalence", "memory", "communication"]
    judged = {q for q in record.equivalence.deviations if q.kind is QuantityKind.BUFFERS}
    assert judged == {QuantityKind.BUFFERS.of(name) for name in buffer_shapes(AMOEBANET.model)}
    first, last = record.memory.planned
    assert first is not None and last is not None and first.parameters != last.parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught_and_named(runner: Runner, name: str) -> None:
    mutant = BY_NAME[name]
    record = runner.observe(mutant.case)
    verdict = record.verdict("equivalence")
    assert verdict is not None and not verdict.passed, record.outcome.message
    diagnosis = record.equivalence.diagnosis
    assert diagnosis is not None and diagnosis.fault in mutant.faults, diagnosis
    if "Rank" in name and "Statistics" in name:
        assert diagnosis.ranks == [1] and "not updated" in diagnosis.detail

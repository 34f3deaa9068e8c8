"""The truth must be right, and every error must show up where it is, and nowhere else."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from meshmark.algorithms.contract import Tensors
from meshmark.errors import AdapterError
from meshmark.judge import truth
from meshmark.judge.deviation import Deviation, deviation, global_norm
from meshmark.judge.trace import Trace, host_copies
from meshmark.judge.truth import ExactOptimizer, assess, exact_gradients, initial_values, norm_deviation
from meshmark.models.module import initial_value
from meshmark.models.transformer import Family
from meshmark.models.transformer.module import Transformer
from meshmark.reference.data import make_batch
from meshmark.reference.objective import loss_share
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.workload import Loss, Workload
from tests.factories import make_model, make_workload

STEPS = 4
WORKLOAD = make_workload()
NAMES = sorted(initial_values(WORKLOAD))
VICTIM = "blocks.1.feed_forward.up.weight"

Tamper = Callable[[int, torch.nn.Module], None]


def honest_run(workload: Workload, tamper: Tamper | None = None) -> Trace:
    """A plain float64 loop of its own: row by row, clipped by PyTorch, stepped by PyTorch. `tamper` may change
    gradients before they are noted."""
    model = Transformer(workload.model)
    model.initialize(workload.seed)
    model.double()
    optimizer_class = torch.optim.AdamW if workload.optimizer.kind is OptimizerKind.ADAMW else torch.optim.SGD
    more = {"betas": workload.optimizer.betas, "eps": workload.optimizer.eps} if "W" in optimizer_class.__name__ else {}
    optimizer = optimizer_class(
        model.parameters(), lr=workload.optimizer.learning_rate, weight_decay=workload.optimizer.weight_decay, **more
    )
    parameters = dict(model.named_parameters())
    trace = Trace(parameters=[host_copies(parameters)])
    for step in range(STEPS):
        batch, total = make_batch(workload, step), 0.0
        for row in batch.micro_batches(workload.global_batch):
            share = loss_share(model(row.inputs), row, Loss.CROSS_ENTROPY)
            share.backward()
            total += share.item()
        if tamper:
            tamper(step, model)
        trace.losses.append(total)
        trace.gradients.append(host_copies({name: p.grad for name, p in parameters.items()}))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), workload.optimizer.clip_norm or float("inf"))
        trace.norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
        trace.parameters.append(host_copies(parameters))
    return trace


@pytest.fixture(scope="module")
def honest() -> Trace:
    return honest_run(WORKLOAD)


def assessed(trace: Trace, workload: Workload, start: Tensors | None = None) -> dict[str, list[Deviation]]:
    """Quantities as they are written."""
    return {str(quantity): steps for quantity, steps in assess(trace, workload, start).items()}


def wrong(trace: Trace, workload: Workload = WORKLOAD, tolerance: float = 1e-9) -> set[tuple[str, int]]:
    """Quantities and steps that are off, relative to the truth's norm (at least 1e-3: a key bias's gradient is 0)."""
    return {
        (quantity, step)
        for quantity, steps in assessed(trace, workload).items()
        for step, d in enumerate(steps)
        if not d.distance <= tolerance * max(d.scale, 1e-3)
    }


def at(step: int, kind: str) -> set[tuple[str, int]]:
    return {(f"{kind}/{name}", step) for name in NAMES}


KEY_BIASES = {
    (f"{kind}/blocks.{i}.attention.k.bias", step)
    for kind in ("gradients", "parameters")
    for i in (0, 1)
    for step in range(STEPS)
}
"""Softmax ignores them: their gradient is zero by mathematics, and they never leave zero by much."""


@pytest.mark.parametrize(
    "workload",
    [
        WORKLOAD,
        make_workload(model=make_model(family=Family.LLAMA, num_kv_heads=2)),
        make_workload(model=make_model(tied_embeddings=True)),
        make_workload(optimizer=OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=0.1, clip_norm=None)),
    ],
    ids=["gpt", "llama", "tied", "sgd unclipped"],
)
def test_an_honest_run_is_at_the_truth(workload: Workload) -> None:
    """By an independent loop in float64; every quantity of every step is there."""
    trace = honest_run(workload)
    found = assessed(trace, workload)
    names = set(initial_values(workload))
    expected = {
        "loss",
        "norm",
        *(f"{kind}/{name}" for kind in ("initial", "gradients", "parameters") for name in names),
    }
    assert found.keys() == expected
    assert {len(found[q]) for q in expected if not q.startswith("initial/")} == {STEPS}
    assert wrong(trace, workload, tolerance=1e-12) == set()


def test_the_honest_run_clips_and_learns(honest: Trace) -> None:
    """Else the tests below would prove less than they say."""
    assert min(n for n in honest.norms if n is not None) > 2 * 0.5
    moved = global_norm({n: honest.parameters[-1][n] - honest.parameters[0][n] for n in NAMES})
    assert moved > 1e-2


def test_a_gradient_off_by_1e_5_shows_in_that_gradient_alone() -> None:
    """The run's own update and norm follow from it, and later steps are judged where the run then is."""

    def tamper(step: int, model: torch.nn.Module) -> None:
        if step == 1:
            dict(model.named_parameters())[VICTIM].grad.mul_(1.00001)

    trace = honest_run(WORKLOAD, tamper)
    assert wrong(trace) == {(f"gradients/{VICTIM}", 1)}
    found = assessed(trace, WORKLOAD)[f"gradients/{VICTIM}"][1]
    assert found.distance == pytest.approx(1e-5 * found.scale)
    assert found.factor == pytest.approx(1.00001, rel=1e-9)


def test_all_gradients_halved_show_in_all_gradients_as_half() -> None:
    """AdamW hides it from every parameter: the update of a halved gradient is (but for eps) the same."""

    def tamper(step: int, model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)

    trace = honest_run(WORKLOAD, tamper)
    assert {q for q in wrong(trace) if q[1] == 0} == at(0, "gradients") - KEY_BIASES
    assert assessed(trace, WORKLOAD)[f"gradients/{VICTIM}"][2].factor == pytest.approx(0.5)


def test_a_stale_gradient_shows_in_the_gradients_of_that_step() -> None:
    kept: dict[str, torch.Tensor] = {}

    def tamper(step: int, model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if step == 1:
                kept[name] = parameter.grad.clone()
            elif step == 2:
                parameter.grad.copy_(kept[name])

    assert wrong(honest_run(WORKLOAD, tamper)) == at(2, "gradients") - KEY_BIASES


def test_a_skipped_update_shows_in_the_parameters_of_that_step(honest: Trace) -> None:
    trace = copy.deepcopy(honest)
    trace.parameters[STEPS] = trace.parameters[STEPS - 1]
    assert wrong(trace) == at(STEPS - 1, "parameters") - KEY_BIASES


def test_one_parameter_left_out_of_the_update_shows_in_it_alone(honest: Trace) -> None:
    trace = copy.deepcopy(honest)
    trace.parameters[STEPS][VICTIM] = trace.parameters[STEPS - 1][VICTIM]
    assert wrong(trace) == {(f"parameters/{VICTIM}", STEPS - 1)}


def test_a_wrong_norm_shows_in_the_norm(honest: Trace) -> None:
    trace = copy.deepcopy(honest)
    trace.norms[2] *= 1.0001
    assert wrong(trace) == {("norm", 2)}


def test_the_norm_of_one_flat_vector_is_as_right_as_that_of_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch adds squares of one long float32 vector in few sums, and comes out short, by more the longer it is."""
    tensors = {"a": np.random.default_rng(0).normal(size=(600, 700)).astype(np.float32), "b": np.ones(9, np.float32)}
    exact = global_norm(tensors)
    flat = float(torch.linalg.vector_norm(torch.cat([torch.from_numpy(t).flatten() for t in tensors.values()])))
    assert 1e-7 < abs(flat / exact - 1) < 1e-5
    assert abs(flat / exact - 1) > 3e-7, "beyond rounding"
    assert norm_deviation(exact, tensors).distance == norm_deviation(flat, tensors).distance == 0
    assert norm_deviation(2 * flat - exact, tensors).distance > 0, "twice as short"
    assert norm_deviation(exact * (1 + 1e-4), tensors).distance > 0.9e-4 * exact
    wide = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    assert norm_deviation(flat, wide).distance > 0
    monkeypatch.setattr(truth, "_FLAT_SHORT", 1e-8)
    assert norm_deviation(flat, tensors).distance > 0


def test_a_norm_that_the_framework_does_not_tell_is_not_judged(honest: Trace) -> None:
    trace = copy.deepcopy(honest)
    trace.norms = [None] * STEPS
    assert "norm" not in assessed(trace, WORKLOAD)
    assert wrong(trace) == set()


def test_a_norm_that_is_told_in_some_steps_alone_is_judged_in_those(honest: Trace) -> None:
    """The wrong norm of step 2 was named as step 1's, because step 0 has none."""
    trace = copy.deepcopy(honest)
    trace.norms = [None, *honest.norms[1:]]
    assert wrong(trace) == set()
    trace.norms[2] = 1.0001 * (honest.norms[2] or 0.0)
    assert wrong(trace) == {("norm", 2)}


def test_clipping_by_half_the_norm_shows_in_the_parameters() -> None:
    """Under SGD, whose update is proportional to the clipped gradient."""
    workload = make_workload(optimizer=OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=0.1, clip_norm=0.5))
    trace = honest_run(workload)
    loose = honest_run(dataclasses.replace(workload, optimizer=dataclasses.replace(workload.optimizer, clip_norm=0.6)))
    trace.parameters[1] = loose.parameters[1]
    trace.gradients, trace.losses, trace.norms = trace.gradients[:1], trace.losses[:1], trace.norms[:1]
    found = wrong(trace, workload)
    assert (f"parameters/{VICTIM}", 0) in found
    assert {quantity.partition("/")[0] for quantity, _ in found} == {"parameters"}


def test_a_wrong_loss_shows_in_the_loss(honest: Trace) -> None:
    trace = copy.deepcopy(honest)
    trace.losses[0] *= 1.00001
    assert wrong(trace) == {("loss", 0)}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_infinitely_far(honest: Trace, value: float) -> None:
    trace = copy.deepcopy(honest)
    trace.losses[3] = value
    assert wrong(trace) == {("loss", 3)}
    assert assessed(trace, WORKLOAD)["loss"][3].distance == float("inf")


def test_a_nan_in_a_gradient_shows_in_it_and_in_what_clipping_makes_of_it(honest: Trace) -> None:
    """The other gradients stay right; the norm, and through it every parameter, is not a number from there on."""
    trace = copy.deepcopy(honest)
    trace.gradients[3][VICTIM][0, 0] = np.nan
    assert wrong(trace) == {(f"gradients/{VICTIM}", 3), ("norm", 3)} | at(3, "parameters")
    assert assessed(trace, WORKLOAD)[f"gradients/{VICTIM}"][3].distance == float("inf")


def test_a_missing_gradient_is_infinitely_far_and_the_others_stay_right(honest: Trace) -> None:
    trace = copy.deepcopy(honest)
    del trace.gradients[1][VICTIM]
    found = wrong(trace)
    assert {q for q, _ in found if q.startswith("gradients/")} == {f"gradients/{VICTIM}"}
    assert assessed(trace, WORKLOAD)[f"gradients/{VICTIM}"][1].distance == float("inf")
    assert not {(q, s) for q, s in found if s == 0 or q == "loss"}


def test_a_parameter_missing_at_the_end_shows_in_it_alone(honest: Trace) -> None:
    trace = copy.deepcopy(honest)
    del trace.parameters[STEPS][VICTIM]
    assert wrong(trace) == {(f"parameters/{VICTIM}", STEPS - 1)}
    assert assessed(trace, WORKLOAD)[f"parameters/{VICTIM}"][-1].distance == float("inf")


def test_a_wrong_start_shows_in_the_initial_value_and_nowhere_else() -> None:
    """A run from another seed is right in every step, but it is another run."""
    trace = honest_run(dataclasses.replace(WORKLOAD, seed=1))
    own_data = honest_run(WORKLOAD)
    trace.parameters, trace.gradients, trace.norms, trace.losses = trace.parameters[:1], [], [], []
    expected = {(f"initial/{n}", 0) for n in NAMES if "norm." not in n and not n.endswith("bias")}
    assert wrong(trace) == expected
    assert wrong(own_data) == set()


def test_one_bit_of_an_initial_value_is_seen(honest: Trace) -> None:
    trace = copy.deepcopy(honest)
    value = trace.parameters[0][VICTIM]
    value[0, 0] = np.nextafter(np.float32(value[0, 0]), np.float32(1))
    assert assessed(trace, WORKLOAD)[f"initial/{VICTIM}"][0].distance > 0
    assert assessed(honest, WORKLOAD)[f"initial/{VICTIM}"][0].distance == 0


def test_another_start_is_judged_against_that_start(honest: Trace) -> None:
    found = assessed(honest, WORKLOAD, start={n: v + 1 for n, v in initial_values(WORKLOAD).items()})
    assert found[f"initial/{VICTIM}"][0].distance == pytest.approx(np.sqrt(16 * 24))


@pytest.mark.parametrize("kind", ["parameters", "gradients"])
def test_an_unknown_name_is_an_error_of_the_adapter(honest: Trace, kind: str) -> None:
    trace = copy.deepcopy(honest)
    getattr(trace, kind)[0]["module.head"] = np.zeros(1)
    with pytest.raises(AdapterError, match=rf"{kind}\(\) returned 'module.head'; the canonical names are .*{VICTIM}"):
        assessed(trace, WORKLOAD)


@pytest.mark.parametrize("kind", ["parameters", "gradients"])
def test_a_shard_in_place_of_the_whole_is_an_error_of_the_adapter(honest: Trace, kind: str) -> None:
    trace = copy.deepcopy(honest)
    getattr(trace, kind)[1][VICTIM] = np.zeros((12, 16))
    with pytest.raises(
        AdapterError, match=rf"{kind}\(\) returned '{VICTIM}' as \(12, 16\); its full shape is \(24, 16"
    ):
        assessed(trace, WORKLOAD)


def test_initial_values_are_those_of_the_generator() -> None:
    values = initial_values(WORKLOAD)
    expected = initial_value(WORKLOAD.model, VICTIM, (24, 16), seed=0).numpy()
    assert values[VICTIM].dtype == np.float32
    assert np.array_equal(values[VICTIM], expected)


def test_exact_gradients_are_those_of_finite_differences() -> None:
    values = {name: v.astype(np.float64) for name, v in initial_values(WORKLOAD).items()}
    batch = make_batch(WORKLOAD, 0)
    gradients = exact_gradients(WORKLOAD, values, batch).gradients
    for name, index in ((VICTIM, (3, 5)), ("head.norm.bias", (2,)), ("embedding.tokens.weight", (101, 7))):
        around = []
        for sign in (1, -1):
            moved = copy.deepcopy(values)
            moved[name][index] += sign * 1e-5
            around.append(exact_gradients(WORKLOAD, moved, batch).loss)
        assert gradients[name][index] == pytest.approx((around[0] - around[1]) / 2e-5, rel=1e-6), name


class NumpyOptimizer:
    """AdamW with decoupled decay (arXiv:1711.05101, algorithm 2) or SGD with L2, written out, after clipping."""

    def __init__(self, spec: OptimizerSpec) -> None:
        self.spec, self.t = spec, 0
        self.m: dict[str, np.ndarray | float] = {}
        self.v: dict[str, np.ndarray | float] = {}

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        spec, self.t = self.spec, self.t + 1
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        clip = 1.0 if spec.clip_norm is None else min(1.0, spec.clip_norm / (norm + 1e-6))  # the 1e-6 is PyTorch's
        after = {}
        for name, w in parameters.items():
            g = gradients[name] * clip
            if spec.kind is OptimizerKind.SGD:
                after[name] = w - spec.learning_rate * (g + spec.weight_decay * w)
                continue
            b1, b2 = spec.betas
            self.m[name] = b1 * self.m.get(name, 0.0) + (1 - b1) * g
            self.v[name] = b2 * self.v.get(name, 0.0) + (1 - b2) * g**2
            first, second = self.m[name] / (1 - b1**self.t), self.v[name] / (1 - b2**self.t)
            after[name] = w * (1 - spec.learning_rate * spec.weight_decay) - spec.learning_rate * first / (
                np.sqrt(second) + spec.eps
            )
        return after


@pytest.mark.parametrize(
    "spec",
    [
        OptimizerSpec(learning_rate=0.1, clip_norm=0.5),
        OptimizerSpec(learning_rate=0.1, clip_norm=None, weight_decay=0.0),
        OptimizerSpec(learning_rate=0.1, betas=(0.5, 0.6), eps=0.1, clip_norm=100.0),
        OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=0.1, clip_norm=0.5),
        OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=0.1, clip_norm=None, weight_decay=0.3),
    ],
    ids=["adamw clipped", "adamw plain", "adamw clip not reached", "sgd clipped", "sgd decayed"],
)
def test_the_exact_optimizer_is_the_one_written_out(spec: OptimizerSpec) -> None:
    """Over steps from parameters that each time are others, as a run in low precision would have them."""
    random = np.random.default_rng(0)
    exact, written = ExactOptimizer(spec), NumpyOptimizer(spec)
    for _ in range(4):
        parameters = {name: random.normal(size=(3, 4)) for name in "ab"}
        gradients = {name: random.normal(size=(3, 4)) for name in "ab"}
        got, expected = exact.step(parameters, gradients), written.step(parameters, gradients)
        for name in "ab":
            np.testing.assert_allclose(got[name], expected[name], rtol=1e-12)


def test_the_exact_optimizer_leaves_its_inputs_alone() -> None:
    parameters, gradients = {"a": np.ones((2, 2))}, {"a": np.full((2, 2), 9.0)}
    after = ExactOptimizer(OptimizerSpec(clip_norm=0.5)).step(parameters, gradients)
    assert (parameters["a"] == 1).all() and (gradients["a"] == 9).all()
    assert (after["a"] < 1).all()


def test_a_deviation_measures_distance_scale_and_multiple() -> None:
    found = deviation(np.array([6.0, 8.5]), np.array([3.0, 4.0]))
    assert found.distance == pytest.approx(np.hypot(3.0, 4.5))
    assert found.scale == 5.0
    assert found.factor == pytest.approx((18 + 34) / 25)


def test_a_deviation_from_zero_has_no_multiple() -> None:
    found = deviation(np.array([1e-9]), np.array([0.0]))
    assert (found.distance, found.scale, found.factor) == (1e-9, 0.0, 0.0)


def test_a_missing_tensor_is_infinitely_far() -> None:
    found = deviation(None, np.array([3.0, 4.0]))
    assert (found.distance, found.scale, found.factor) == (float("inf"), 5.0, 0.0)


def test_notes_are_exact_copies() -> None:
    """bf16 widens to float32; float64 stays; later changes of the tensor do not reach the note."""
    tensors = {"a": torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "b": torch.tensor([1 / 3], dtype=torch.float64)}
    notes = host_copies(tensors)
    tensors["a"].zero_()
    tensors["b"].zero_()
    assert notes["a"].dtype == np.float32 and notes["a"].tolist() == [1.0, 2.0]
    assert notes["b"].tolist() == [1 / 3]

"""Initial values: any block without the whole, the same bits everywhere."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmark.adapter.engine import initial_model
from meshmark.measure.meters import Watch
from meshmark.models import module as model
from meshmark.models.module import (
    _AT_ONCE_ELSEWHERE,
    Block,
    _counters,
    _fill,
    _fill_on_host,
    _signed,
    _splitmix64,
    initial_value,
    parameter_shapes,
    random_bits,
)
from meshmark.models.transformer import MODELS
from meshmark.spec.layout import Layout
from tests.factories import make_case, make_model, make_workload

TINY = MODELS["gpt-tiny"]
MASK = 2**64 - 1


@st.composite
def blocks(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """A full shape, and shape and offset of a block (perhaps empty) inside it."""
    full = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    offset = [draw(st.integers(0, size)) for size in full]
    shape = [draw(st.integers(0, size - start)) for size, start in zip(full, offset, strict=True)]
    return full, shape, offset


@given(blocks(), st.integers(0, 2**40))
@settings(max_examples=150, deadline=None)
def test_any_block_is_that_slice_of_the_whole(block: tuple[list[int], list[int], list[int]], seed: int) -> None:
    full, shape, offset = block
    whole = initial_value(TINY, "a.weight", full, seed=seed)
    window = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    part = initial_value(TINY, "a.weight", full, seed=seed, block=Block(shape=shape, offset=offset))
    assert part.shape == tuple(shape)
    assert torch.equal(part, whole[window])


@given(blocks(), st.integers(1, 50), st.integers(0, 2**40))
@settings(max_examples=150, deadline=None)
def test_both_ways_of_drawing_draw_the_same(
    block: tuple[list[int], list[int], list[int]], at_once: int, seed: int
) -> None:
    """NumPy's on a CPU and PyTorch's elsewhere, however many elements each draws at once."""
    full, shape, offset = block
    expected = initial_value(TINY, "a.weight", full, seed=seed, block=Block(shape=shape, offset=offset))
    rows = Block(shape=[min(at_once, shape[0]), *shape[1:]], offset=offset)
    counters = _counters("a.weight", full, rows, seed, torch.device("cpu"))
    advance = math.prod(full[1:]) * 0x9E3779B97F4A7C15
    by_torch, by_numpy = torch.empty(shape), torch.empty(shape)
    _fill(by_torch, counters, advance, TINY.init_std)
    _fill_on_host(by_numpy.numpy(), counters.numpy().view(np.uint64), advance, TINY.init_std)
    assert torch.equal(by_torch, expected) and torch.equal(by_numpy, expected)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_scalar_is_drawn_like_any_other(device: str) -> None:
    drawn = initial_value(TINY, "scale", (), seed=0, device=torch.device(device))
    assert drawn.shape == () and drawn.device.type == device
    if device == "cpu":
        assert drawn == initial_value(TINY, "scale", (1,), seed=0)[0]


def watched(rows: int) -> tuple[int, int]:
    """Events that a profiler notes while as many rows are drawn, and bytes allocated at most."""
    with Watch(torch.device("cpu")) as watch:
        out = torch.empty(rows, 64)
        counters = _counters("a.weight", out.shape, Block(shape=(16, 64), offset=(0, 0)), 0, out.device)
        _fill(out, counters, 64, 1.0)
    totals = [change.total_bytes for change in watch.changes()]
    return len(watch._events), max(totals) - min(totals)


def test_drawing_on_a_device_costs_a_watcher_few_events_and_little_memory() -> None:
    """A step of the generator in place makes few values beside those drawn, whatever the number of elements."""
    (few, small), (many, large) = watched(16 * 4), watched(16 * 68)
    blocks = MODELS["gpt-1.3b"].num_parameters / _AT_ONCE_ELSEWHERE
    assert (many - few) / 64 * blocks < 50_000, "of 16 rows more each, which are drawn at once"
    assert large - small <= 4 * 64 * 16 * 64 + 4096, "nothing but the values themselves"


def splitmix64(state: int) -> int:
    """The finaliser, in Python's own integers (Steele, Lea, Flood, OOPSLA 2014, figure 16 as of Vigna's C)."""
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_generator_is_splitmix64() -> None:
    """The first outputs from seed 0 as they are published with Java's SplittableRandom and Vigna's C."""
    golden = 0x9E3779B97F4A7C15
    states = torch.tensor([_signed(golden * i) for i in (1, 2, 3)])
    got = [int(value) & MASK for value in _splitmix64(states)]
    assert got == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_bits_are_the_generator_at_key_plus_golden_times_index() -> None:
    key = int.from_bytes(hashlib.blake2b(b"5/some.name", digest_size=8).digest(), "little")
    got = random_bits("some.name", (3, 4), seed=5).flatten()
    assert [int(v) & MASK for v in got] == [splitmix64((key + i * 0x9E3779B97F4A7C15) & MASK) for i in range(12)]


def test_values_are_the_sums_of_four_uniform_numbers_bit_for_bit() -> None:
    """Baselines and noise floors on disk hold for these very bits: another rule is a new `noise.FORMAT`."""
    value = initial_value(TINY, "embedding.tokens.weight", (256, 64), seed=0).flatten()
    key = int.from_bytes(hashlib.blake2b(b"0/embedding.tokens.weight", digest_size=8).digest(), "little")
    mean, std = 4 * (2**16 - 1) // 2, math.sqrt(4 * (2**32 - 1) / 12)
    for i in range(16):
        bits = splitmix64((key + i * 0x9E3779B97F4A7C15) & MASK)
        total = sum((bits >> shift) & 0xFFFF for shift in (0, 16, 32, 48))
        expected = np.float32(total - mean) * np.float32(1 / std) * np.float32(TINY.init_std)
        assert value[i].numpy() == expected
    assert value.dtype is torch.float32


@pytest.mark.parametrize("other", [{"name": "b.weight"}, {"seed": 1}])
def test_names_and_seeds_give_independent_values(other: dict[str, object]) -> None:
    arguments: dict = {"name": "a.weight", "seed": 0}
    one, two = (initial_value(TINY, full_shape=(100, 100), **a).flatten() for a in (arguments, arguments | other))
    assert (one == two).float().mean() < 1e-3
    assert abs(torch.corrcoef(torch.stack([one, two]))[0, 1]) < 4 / math.sqrt(len(one))


def test_weights_have_mean_zero_and_the_spread_asked_for() -> None:
    """Four standard errors of a million draws, and the bound of a sum of four uniform variables."""
    n = 1_000_000
    value = initial_value(make_model(init_std=0.5), "a.weight", (1000, 1000), seed=3).double()
    assert abs(value.mean()) < 4 * 0.5 / math.sqrt(n)
    assert float(value.std()) == pytest.approx(0.5, rel=4 / math.sqrt(2 * n))
    assert float(value.abs().max()) <= 0.5 * 2 * math.sqrt(3)


def test_neighbours_are_uncorrelated() -> None:
    """Elements of one row, and of one column: a counter must not show through."""
    value = initial_value(TINY, "a.weight", (500, 500), seed=0)
    for shifted in (value.roll(1, 0), value.roll(1, 1), value.roll(64, 1)):
        correlation = torch.corrcoef(torch.stack([value.flatten(), shifted.flatten()]))[0, 1]
        assert abs(correlation) < 4 / math.sqrt(value.numel())


def spread(name: str) -> float:
    shapes = parameter_shapes(TINY) | {f"blocks.0.{part}": (400, 400) for part in SPREADS}
    full = f"blocks.0.{name}"
    return float(initial_value(TINY, full, shapes[full], seed=0).std())


SPREADS = {
    "attention.q.weight": 0.08,
    "attention.k.weight": 0.08,
    "attention.v.weight": 0.08,
    "attention.out.weight": 0.08 / math.sqrt(8),
    "feed_forward.up.weight": 0.08,
    "feed_forward.down.weight": 0.08 / math.sqrt(8),
}


@pytest.mark.parametrize("name", SPREADS)
def test_residual_projections_alone_are_scaled_by_depth(name: str) -> None:
    """By 1 / sqrt(2 num_layers): tiny has 4 layers."""
    assert spread(name) == pytest.approx(SPREADS[name], rel=0.01)


def test_norms_start_at_one_and_biases_at_zero_and_nothing_else_does() -> None:
    for name, shape in parameter_shapes(TINY).items():
        value = initial_value(TINY, name, shape, seed=0)
        if name.endswith("bias"):
            assert not value.any(), name
        elif "norm" in name:
            assert (value == 1).all(), name
        else:
            assert value.unique().numel() > value.numel() / 2, name


def test_constant_parameters_are_cut_into_blocks_too() -> None:
    assert (
        initial_value(TINY, "head.norm.weight", (64,), seed=0, block=Block(shape=(5,), offset=(3,))).tolist()
        == [1.0] * 5
    )
    assert initial_value(TINY, "head.norm.bias", (64,), seed=0, block=Block(shape=(0,), offset=(64,))).shape == (0,)


def watched_build(width: int) -> tuple[int, int]:
    """Events that a profiler notes while a model is built, and bytes that it has beside its parameters at most."""
    spec = make_model(hidden=width, ffn_hidden=width, vocab_size=64 * width)
    case = make_case("single", Layout(), workload=make_workload(model=spec))
    with Watch(torch.device("cpu")) as watch:
        model = initial_model(case, torch.device("cpu"))
    totals = [change.total_bytes for change in watch.changes()]
    return len(watch._events), max(totals) - min(totals) - sum(4 * p.numel() for p in model.parameters())


def test_a_watched_build_costs_no_more_events_for_a_larger_model() -> None:
    """A model of 1.3 billion parameters had cost 4.5 million events, and 16.5 GB of host memory a rank."""
    (few, small), (many, large) = watched_build(32), watched_build(256)
    assert many == few
    room = 32 * 2**16
    assert small <= 4 * 64 * 32**2 + room and large <= 4 * 64 * 256**2 + room, "one parameter twice, the largest"


def test_any_number_of_threads_draws_the_same() -> None:
    shape, before = (3001, 1031), torch.get_num_threads()
    assert shape[0] * shape[1] > 2 * model._LEAST_A_THREAD
    block = Block(shape=(2900, 1031), offset=(7, 0))
    drawn = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            drawn.append(initial_value(TINY, "embedding.tokens.weight", shape, seed=3, block=block))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])
    whole = initial_value(TINY, "embedding.tokens.weight", shape, seed=3)
    assert torch.equal(drawn[2], whole[7:2907])

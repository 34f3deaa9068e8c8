"""Meters see exact bytes. One process; real allocations, and a real process group of one."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from meshmark.adapter.holdings import Holdings
from meshmark.adapter.traffic_source import Transfer
from meshmark.measure.memory import Named, _classify, _peak_time, cuda_peaks, read_memory, visible_storages
from meshmark.measure.readings import Bytes, Collective, MemoryReading, TrafficReading
from meshmark.measure.traffic import TorchTraffic, _full_bytes, _sum, read_traffic
from meshmark.measure.watch import Allocation, AskedOperation, Operand, Watch, Window

CPU = torch.device("cpu")
NOTHING = Named(parameters={}, gradients={}, optimizer_states={}, communication={})


def life(address: int, num_bytes: int, start: int, stop: int | None = None) -> Allocation:
    return Allocation(address=address, num_bytes=num_bytes, start_ns=start, stop_ns=stop)


# What a watch sees.


def test_a_watch_sees_an_allocation_s_exact_bytes_and_its_life() -> None:
    with Watch(CPU) as watch:
        with watch.window("first", 0):
            tensor = torch.empty(12_345, dtype=torch.float32)
            address = tensor.data_ptr()
        with watch.window("second", 0):
            del tensor
    (found,) = (a for a in watch.allocations() if a.num_bytes == 4 * 12_345)
    first, second = watch.windows
    assert found.address == address
    assert first.holds(found.start_ns)
    assert found.stop_ns is not None and second.holds(found.stop_ns)
    assert found.alive(first.stop_ns) and not found.alive(second.stop_ns) and not found.alive(first.start_ns)


def test_an_allocation_that_outlives_the_watch_has_no_end() -> None:
    with Watch(CPU) as watch:
        tensor = torch.empty(12_347, dtype=torch.uint8)
    (found,) = (a for a in watch.allocations() if a.num_bytes == 12_347)
    assert found.stop_ns is None and found.alive(time.time_ns())
    assert found.address == tensor.data_ptr()


def test_lives_span_the_change_of_focus() -> None:
    """The watch goes on under another profiler; what was born before and dies after is one life."""
    with Watch(CPU) as watch:
        tensor = torch.empty(12_347, dtype=torch.uint8)
        watch.focus()
        with watch.window("later", 0):
            del tensor
    (found,) = (a for a in watch.allocations() if a.num_bytes == 12_347)
    assert found.stop_ns is not None and watch.windows[0].holds(found.stop_ns)


def test_an_address_used_twice_is_two_lives() -> None:
    with Watch(CPU) as watch:
        for _ in range(2):
            tensor = torch.empty(12_347, dtype=torch.uint8)
            del tensor
    found = [a for a in watch.allocations() if a.num_bytes == 12_347]
    assert len(found) == 2
    assert found[0].stop_ns is not None and found[0].stop_ns <= found[1].start_ns


def test_views_allocate_nothing() -> None:
    with Watch(CPU) as watch:
        tensor = torch.empty(100, 123, dtype=torch.uint8)
        view = tensor.view(-1)[10:].reshape(10, -1)
    assert [a.num_bytes for a in watch.allocations() if a.num_bytes > 1000] == [12_300]
    assert view.untyped_storage().data_ptr() == tensor.data_ptr()


def test_a_window_is_kept_when_its_inside_raises() -> None:
    with Watch(CPU) as watch, pytest.raises(KeyError), watch.window("bad", 7):
        raise KeyError
    assert [(w.name, w.step) for w in watch.windows] == [("bad", 7)]


# From allocations to categories.


def measure_step() -> tuple[MemoryReading, list[torch.Tensor]]:
    """A step made by hand, of tensors of known sizes; returned with what is alive after it, for its addresses' sake."""
    with Watch(CPU) as watch:
        parameter = torch.zeros(1000)
        moment = torch.zeros(2000)
        unnamed = torch.zeros(50)
        with watch.window("backward", 4):
            saved = torch.zeros(30_000)
            gradient = torch.zeros(1000)
            del saved
        before = Named.of(Holdings(parameters=[parameter], gradients=[gradient], optimizer_states=[moment]))
        with watch.window("update", 4):
            temporary = torch.zeros(500)
            del temporary, gradient
        after = Named.of(Holdings(parameters=[parameter], optimizer_states=[moment]))
        visible = visible_storages()
    return read_memory(watch, 4, before, after, visible, None), [parameter, moment, unnamed]


def test_a_step_is_classified_to_the_byte() -> None:
    reading, _ = measure_step()
    assert reading.states == Bytes(parameters=4000, gradients=4000, optimizer_states=8000)
    assert reading.peak == Bytes(parameters=4000, gradients=4000, optimizer_states=8000, activations=120_000, other=200)
    assert reading.steady == Bytes(parameters=4000, optimizer_states=8000, other=200)
    assert reading.peak.total == 136_200
    assert reading.allocator_peak_bytes is None


def test_the_allocator_s_own_peaks_are_passed_on() -> None:
    with Watch(CPU) as watch:
        for name in ("backward", "update"):
            with watch.window(name, 0):
                torch.zeros(10)
    reading = read_memory(watch, 0, NOTHING, NOTHING, set(), (123, 456))
    assert (reading.allocator_peak_bytes, reading.allocator_reserved_bytes) == (123, 456)
    assert cuda_peaks(CPU) is None


@pytest.mark.parametrize(
    "lives, peak",
    [
        ([life(1, 10, 0)], 100),
        ([life(1, 10, 0), life(2, 5, 120, 130)], 120),
        ([life(1, 10, 120, 140), life(2, 5, 130, 150), life(3, 6, 145)], 130),
        ([life(1, 10, 120, 130), life(2, 10, 150, 160)], 120),
        ([life(1, 10, 0, 110), life(2, 9, 150)], 100),
        ([life(1, 10, 120), life(2, 999, 200)], 120),
        ([life(1, 10, 120, 130), life(2, 10, 130, 140), life(3, 11, 140, 150)], 140),
        ([life(1, 999, 50, 90), life(2, 10, 120)], 120),
        ([], 100),
    ],
    ids=[
        "held from before",
        "brief",
        "overlap",
        "first of equals",
        "falls at once",
        "later is not ours",
        "freed before allocated",
        "earlier is not ours",
        "nothing",
    ],
)
def test_the_peak_is_the_first_instant_of_most_bytes_within_the_step(lives: list[Allocation], peak: int) -> None:
    """Steps run from 100 to 200 here."""
    assert _peak_time(lives, 100, 200) == peak


def test_bytes_go_to_the_name_then_to_the_wire_then_to_the_step() -> None:
    """A buffer counts as communication while the storage that a collective touched lives, not for its address's
    sake: the allocator hands addresses out again."""
    lives = [
        life(1, 1, 0),
        life(2, 10, 0),
        life(3, 100, 150),
        life(4, 1000, 0),
        life(5, 10_000, 150, 160),
        life(5, 100_000, 170),
    ]
    named = Named(parameters={1: 1}, gradients={}, optimizer_states={}, communication={2: 10})
    on_wire = {1: [155], 3: [155], 5: [155]}
    early = _classify(lives, 155, named, on_wire, step_start_ns=100)
    assert early == Bytes(parameters=1, communication=10 + 100 + 10_000, other=1000)
    late = _classify(lives, 180, named, on_wire, step_start_ns=100)
    assert late == Bytes(parameters=1, communication=10 + 100, activations=100_000, other=1000)


def test_a_storage_named_twice_counts_once_under_the_first_name() -> None:
    """FSDP's flat parameter: many views of one storage; and a gradient that is a view of a bucket."""
    flat, bucket = torch.zeros(100), torch.zeros(30)
    named = Named.of(
        Holdings(parameters=[flat[:40], flat[40:]], gradients=[bucket[:10]], communication=[bucket, torch.zeros(0)])
    )
    assert named.parameters == {flat.data_ptr(): 400}
    assert named.gradients == {bucket.data_ptr(): 120}
    assert named.communication == {}
    assert named.category(flat.data_ptr()) == "parameters"
    assert named.category(12345) is None


class Canned(Watch):
    """A watch that saw what it is told: a step from 100 to 200, whose update begins at 150."""

    def __init__(self, lives: list[Allocation], asked: list[AskedOperation]) -> None:
        super().__init__(CPU)
        self.lives, self.calls = lives, asked
        self.windows = [
            Window(name="backward", step=0, start_ns=100, stop_ns=150),
            Window(name="update", step=0, start_ns=150, stop_ns=200),
        ]

    def allocations(self) -> list[Allocation]:
        return self.lives

    def asked(self) -> list[AskedOperation]:
        return self.calls


def reduced(address: int, time_ns: int) -> AskedOperation:
    operand = Operand(num_bytes=1, address=address)
    return AskedOperation(name="c10d::allreduce_", time_ns=time_ns, operands=((operand,),))


@pytest.mark.parametrize(
    "born, calls, visible, peak, steady",
    [
        (50, [], {7}, {"other": 10}, {"other": 10}),
        (120, [], {7}, {"activations": 10}, {"other": 10}),
        (50, [reduced(7, 130)], set(), {"communication": 10}, {"communication": 10}),
        (120, [reduced(7, 130)], set(), {"communication": 10}, {}),
        (160, [reduced(7, 170)], set(), {"communication": 10}, {}),
        (120, [], set(), {}, {}),
        (50, [], set(), {}, {}),
    ],
    ids=[
        "seen by Python",
        "seen by Python, new",
        "a bucket",
        "scratch of backward",
        "scratch of the update",
        "of a collective that is over",
        "of long ago",
    ],
)
def test_a_storage_whose_end_nobody_saw(
    born: int, calls: list[AskedOperation], visible: set[int], peak: dict[str, int], steady: dict[str, int]
) -> None:
    """Gloo frees in threads that the profiler cannot see: such a storage lives as long as something shows that it does,
    and does not pile up step by step."""
    reading = read_memory(Canned([life(7, 10, born)], calls), 0, NOTHING, NOTHING, visible, None)
    assert reading.peak == Bytes(**peak)
    assert reading.steady == Bytes(**steady)


def test_a_storage_at_an_address_that_was_given_out_again_is_over() -> None:
    """Its end was not seen, but two storages cannot be in one place: the name belongs to the later one."""
    lives = [life(7, 1000, 20), life(7, 10, 60)]
    named = Named(parameters={7: 10}, gradients={}, optimizer_states={}, communication={})
    reading = read_memory(Canned(lives, []), 0, named, named, {7}, None)
    assert reading.peak == reading.steady == Bytes(parameters=10)


def test_storages_that_python_reaches_are_found() -> None:
    """Also behind views, in closures and containers; not those that are gone."""
    kept = {"inside": [torch.zeros(100)[5:]]}
    gone = torch.zeros(100)
    address = gone.untyped_storage().data_ptr()
    del gone
    found = visible_storages()
    assert kept["inside"][0].untyped_storage().data_ptr() in found
    assert address not in found


# Collectives.


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one; the flight recorder must be on before it is made."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "1000")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_collectives_are_seen_with_their_operands(group: None) -> None:
    """Asked for and issued, inside windows and after the change of focus alone."""
    tensor, out = torch.ones(1000), torch.ones(2000, dtype=torch.float64)
    with Watch(CPU) as watch:
        watch.focus()
        torch_traffic = TorchTraffic(watch)
        dist.barrier()
        torch_traffic.start()
        with watch.window("backward", 0):
            dist.all_reduce(tensor)
            dist.broadcast(out, 0)
        torch_traffic.stop()
        dist.all_reduce(tensor)
    asked = watch.asked()
    assert [a.name for a in asked] == ["c10d::barrier", "c10d::allreduce_", "c10d::broadcast_", "c10d::allreduce_"]
    assert [a.operands[0] for a in asked[1:3]] == [
        (Operand(num_bytes=4000, address=tensor.data_ptr()),),
        (Operand(num_bytes=16_000, address=out.data_ptr()),),
    ]
    assert [(t.kind, t.num_bytes) for t in torch_traffic.asked()] == [("all_reduce", 4000), ("broadcast", 16_000)]
    assert [(t.kind, t.num_bytes) for t in torch_traffic.issued()] == [("all_reduce", 4000), ("broadcast", 16_000)]
    assert read_traffic([torch_traffic]) == TrafficReading(asked=[], issued=[]), "a group of one moves nothing"


def test_point_to_point_calls_are_noted_in_focus_alone(group: None) -> None:
    """Methods of a process group stand in for PyTorch's, and are gone with the watch: no step after it is touched."""
    before = {name: vars(dist.ProcessGroup)[name] for name in ("send", "recv", "recv_anysource")}
    with Watch(CPU) as watch:
        watch.focus()
        inside = {name: vars(dist.ProcessGroup)[name] for name in before}
    assert all(inside[name] is not before[name] for name in before)
    assert all(vars(dist.ProcessGroup)[name] is before[name] for name in before), "not one bound otherwise"


def asked(name: str, *operand_bytes: int) -> AskedOperation:
    """First argument: outputs (or what is reduced in place); second: inputs."""
    operands = tuple((Operand(num_bytes=n, address=1),) for n in operand_bytes)
    return AskedOperation(name=f"c10d::{name}", time_ns=0, operands=operands)


@pytest.mark.parametrize(
    "operation, full",
    [
        (asked("allreduce_", 400), 400),
        (asked("_allgather_base_", 400, 100), 400),
        (asked("allgather_", 400, 100), 400),
        (asked("_reduce_scatter_base_", 100, 400), 400),
        (asked("reduce_scatter_", 100, 400), 400),
        (asked("broadcast_", 400), 400),
        (asked("reduce_", 400), 400),
        (asked("send", 400), 400),
        (asked("barrier", 1), 0),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_bytes_are_those_of_the_full_tensor_over_four_ranks(operation: AskedOperation, full: int) -> None:
    assert _full_bytes(operation, 4) == full


def test_calls_add_up_by_kind_and_ranks_and_groups_of_one_are_left_out() -> None:
    calls = [((0, 2), 10), ((0, 1), 1), ((0, 2), 20), ((0,), 99)]
    found = _sum(Transfer(kind="all_reduce", ranks=ranks, num_bytes=count) for ranks, count in calls)
    assert found == [
        Collective(kind="all_reduce", group_size=2, ranks=(0, 1), count=1, num_bytes=1),
        Collective(kind="all_reduce", group_size=2, ranks=(0, 2), count=2, num_bytes=30),
    ]


def test_windows_are_half_open() -> None:
    window = Window(name="w", step=0, start_ns=10, stop_ns=20)
    assert [window.holds(t) for t in (9, 10, 19, 20)] == [False, True, True, False]


# What a forward pass leaves.


def test_what_is_held_is_read_when_the_first_backward_pass_begins() -> None:
    """Two passes; what the second finds is not asked for."""
    with Watch(CPU) as watch:
        parameter = torch.ones(1000, requires_grad=True)
        with watch.window("backward", 0):
            for scale in (2.0, 3.0):
                saved = (parameter * scale).exp()
                saved.sum().backward()
                del saved
        named = Named.of(Holdings(parameters=[parameter.detach()], gradients=[parameter.grad]))
        with watch.window("update", 0):
            pass
    assert len(watch.backward_starts()) == 2
    reading = read_memory(watch, 0, named, named, visible_storages(), None)
    assert reading.held is not None
    assert reading.held.parameters == 4000 and reading.held.gradients == 0
    assert 4000 <= reading.held.activations < 4100, "the exponential, and the gradient of the sum"


def test_nothing_is_held_where_no_backward_pass_was_seen() -> None:
    reading, _ = measure_step()
    assert reading.held is None


def test_an_address_s_name_is_that_of_the_storage_that_was_named() -> None:
    """What had the address before is not the gradient that was put there later."""
    lives = [life(5, 1000, 110, 120), life(5, 10, 130)]
    named = Named(parameters={}, gradients={5: 10}, optimizer_states={}, communication={})
    reading = read_memory(Canned(lives, []), 0, named, named, set(), None)
    assert reading.peak == Bytes(activations=1000)
    assert _classify(lives, 140, named, {}, 100, named_ns=150) == Bytes(gradients=10)

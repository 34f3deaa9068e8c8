"""Meters see exact bytes. One process; real allocations, and a real process group of one."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from meshmark.adapter.engine import Holdings, Transfer
from meshmark.errors import ClockError
from meshmark.launch.rank import _kind
from meshmark.measure import allocations
from meshmark.measure.allocations import Allocation, Change, HeldStorages, Timeline, timeline
from meshmark.measure.meters import (
    AskedOperation,
    Named,
    Operand,
    TorchTraffic,
    Watch,
    Window,
    _classify,
    _full_bytes,
    read_memory,
    read_traffic,
    sum_transfers,
)
from meshmark.measure.readings import Bytes, Collective, MemoryReading, TrafficReading
from meshmark.records.record import Status

CPU = torch.device("cpu")
NOTHING = Named()


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
    (found,) = (a for a in timeline(watch.changes()).lives if a.num_bytes == 4 * 12_345)
    first, second = watch.windows
    assert found.address == address
    assert first.contains(found.start_ns)
    assert found.stop_ns is not None and second.contains(found.stop_ns)
    assert found.alive(first.stop_ns) and not found.alive(second.stop_ns) and not found.alive(first.start_ns)


def test_an_allocation_that_outlives_the_watch_has_no_end() -> None:
    with Watch(CPU) as watch:
        tensor = torch.empty(12_347, dtype=torch.uint8)
    (found,) = (a for a in timeline(watch.changes()).lives if a.num_bytes == 12_347)
    assert found.stop_ns is None and found.alive(time.time_ns())
    assert found.address == tensor.data_ptr()


def test_lives_span_the_change_of_focus() -> None:
    """The watch goes on under another profiler; what was born before and dies after is one life."""
    with Watch(CPU) as watch:
        tensor = torch.empty(12_347, dtype=torch.uint8)
        watch.focus()
        with watch.window("later", 0):
            del tensor
    (found,) = (a for a in timeline(watch.changes()).lives if a.num_bytes == 12_347)
    assert found.stop_ns is not None and watch.windows[0].contains(found.stop_ns)


def test_an_address_used_twice_is_two_lives() -> None:
    with Watch(CPU) as watch:
        for _ in range(2):
            tensor = torch.empty(12_347, dtype=torch.uint8)
            del tensor
    found = [a for a in timeline(watch.changes()).lives if a.num_bytes == 12_347]
    assert len(found) == 2
    assert found[0].stop_ns is not None and found[0].stop_ns <= found[1].start_ns


def test_views_allocate_nothing() -> None:
    with Watch(CPU) as watch:
        tensor = torch.empty(100, 123, dtype=torch.uint8)
        view = tensor.view(-1)[10:].reshape(10, -1)
    assert [a.num_bytes for a in timeline(watch.changes()).lives if a.num_bytes > 1000] == [12_300]
    assert view.untyped_storage().data_ptr() == tensor.data_ptr()


def test_a_window_is_kept_when_its_inside_raises() -> None:
    with Watch(CPU) as watch, pytest.raises(KeyError), watch.window("bad", 7):
        raise KeyError
    assert [(w.name, w.step) for w in watch.windows] == [("bad", 7)]


def test_a_clock_that_is_set_amid_a_measurement_ends_it_outside_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time_ns
    with pytest.raises(ClockError, match="set by -3.6e\\+03 s during the measurement") as caught, Watch(CPU) as watch:
        with watch.window("steady", 0):
            torch.ones(100)
        with watch.window("set", 1):
            monkeypatch.setattr(time, "time_ns", lambda: real() - 3_600 * 10**9)
    assert _kind(caught.value) is Status.UNFINISHED


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
        watch.settle(4)
        after = Named.of(Holdings(parameters=[parameter], optimizer_states=[moment]))
    return read_memory(watch, 4, before, after), [parameter, moment, unnamed]


def test_a_step_is_classified_to_the_byte() -> None:
    reading, _ = measure_step()
    assert reading.states == Bytes(parameters=4000, gradients=4000, optimizer_states=8000)
    assert reading.peak == Bytes(parameters=4000, gradients=4000, optimizer_states=8000, activations=120_000, other=200)
    assert reading.steady == Bytes(parameters=4000, optimizer_states=8000, other=200)
    assert reading.peak.total == 136_200
    assert reading.allocator_peak_bytes is None


def changes(*told: tuple[int, int, int] | tuple[int, int, int, int]) -> list[Change]:
    """Return changes from (time, address, bytes) and, where another thread freed memory unseen, the bytes freed
    before."""
    total, found = 0, []
    for time_ns, address, num_bytes, *unseen in told:
        total += num_bytes - sum(unseen)
        found.append(Change(time_ns=time_ns, address=address, num_bytes=num_bytes, total_bytes=total))
    return found


@pytest.mark.parametrize(
    "told, peak",
    [
        (changes((50, 1, 10)), (10, 100)),
        (changes((50, 1, 10), (120, 2, 5), (130, 2, -5)), (15, 120)),
        (changes((50, 1, 99), (90, 1, -99), (120, 2, 10)), (10, 120)),
        (changes((120, 1, 10), (130, 1, -10), (150, 2, 10)), (10, 120)),
        (changes((120, 1, 10), (200, 2, 999)), (10, 120)),
        (changes((50, 1, 10), (120, 2, 5, 10)), (10, 100)),
        ([], (0, 100)),
    ],
    ids=["from before", "brief", "freed before", "first of equals", "later is not ours", "freed unseen", "nothing"],
)
def test_the_peak_is_the_first_instant_of_most_bytes_within_a_window(told: list[Change], peak: tuple[int, int]) -> None:
    assert timeline(told).peak(100, 200) == peak


def test_what_a_kernel_takes_and_gives_back_itself_is_no_tensor() -> None:
    """Kernels began at 100 and at 200. What the first makes stays, though it was made within; what another address, or
    the second kernel, gives back is not the first's."""
    told = [(90, 1, 10), (101, 2, 20), (102, 3, 500), (103, 4, 70), (104, 4, -70), (105, 3, -500), (201, 2, -20)]
    counted, found = 0, list[Change]()
    for time_ns, address, num_bytes in told:
        counted += num_bytes
        kernel = time_ns // 100 * 100 if time_ns > 100 else None
        found.append(Change(time_ns=time_ns, address=address, num_bytes=num_bytes, total_bytes=counted, kernel=kernel))
    line = timeline(found)
    assert [(life.num_bytes, life.stop_ns) for life in line.lives] == [(10, None), (20, 201)]
    assert line.peak(0, 300) == (30, 101)
    assert (line.total(102), line.total(104), line.total(201)) == (30, 30, 10)
    assert line.peak_with_workspaces(0, 300) == 600
    assert line.peak_with_workspaces(150, 300) == 30


def test_a_product_s_workspace_is_told_apart_and_its_result_is_not() -> None:
    """Where a CPU's bf16 products take none, nothing is told: the tensors are the same."""
    a, b = torch.ones(128, 128, dtype=torch.bfloat16), torch.ones(128, 128, dtype=torch.bfloat16)
    with Watch(CPU) as watch:
        with watch.window("backward", 0):
            product = a @ b
        with watch.window("update", 0):
            del product
        watch.settle(0)
    reading = read_memory(watch, 0, NOTHING, NOTHING)
    assert reading.peak.total == 128 * 128 * 2
    raw = [event for event in watch._events if event.name == "[memory]"]
    most = max(event.extra_fields.total_allocated for event in raw) - raw[0].extra_fields.total_allocated
    assert reading.workspace_bytes == most


def test_what_another_thread_frees_is_over_when_the_allocator_no_longer_counts_it() -> None:
    """Of two equal sizes the older was freed; an address that is given out again ends its life; a known end stays."""
    told = changes((10, 1, 100), (20, 2, 100), (30, 3, 7), (40, 4, 1, 100), (50, 3, 5, 7), (60, 5, 1))
    ends = {(life.address, life.start_ns): (life.stop_ns, life.freed_elsewhere) for life in timeline(told).lives}
    assert ends[1, 10] == (40, True) and ends[2, 20] == (None, False)
    assert ends[3, 30] == (50, True) and ends[3, 50] == (None, False)
    known = {life.address: life.stop_ns for life in timeline(told, known=frozenset({1})).lives}
    assert (known[1], known[2]) == (None, 40)


def test_of_two_as_large_the_one_whose_address_is_given_out_again_first_is_gone() -> None:
    """DeepSpeed's ZeRO-2 showed it on a busy machine: the older one was taken for gone and the peak did not add up."""
    told = changes((10, 1, 100), (20, 2, 100), (30, 3, 7), (40, 4, 1, 100), (50, 2, 7), (60, 1, 3, 100))
    found = timeline(told)
    assert {a.address: a.stop_ns for a in found.lives if a.num_bytes == 100} == {1: 60, 2: 40}
    assert sum(life.num_bytes for life in found.lives if life.alive(50)) == found.total(50)


def test_what_was_named_is_not_what_was_freed_unseen_before() -> None:
    """As a gradient that one of gloo's threads lets go of last, and a copy of gloo's that is as large."""
    told = changes((10, 1, 100), (20, 2, 100), (30, 3, 7), (40, 4, 1, 100), (50, 5, 1), (60, 6, 1, 100))
    held = timeline(told, held=HeldStorages(time_ns=50, num_bytes={1: 100, 3: 8})).lives
    assert {life.address: life.stop_ns for life in held if life.num_bytes == 100} == {1: 60, 2: 40}
    other = timeline(
        told, held=HeldStorages(time_ns=50, num_bytes={1: 99})
    ).lives  # another storage, where this one was
    assert {life.address: life.stop_ns for life in other if life.num_bytes == 100} == {1: 40, 2: 60}


def test_several_may_be_freed_at_once_unseen() -> None:
    told = changes((10, 1, 100), (20, 2, 30), (30, 3, 7), (40, 4, 1, 107))
    assert {life.address: life.stop_ns for life in timeline(told).lives} == {1: 40, 2: None, 3: 40, 4: None}


def many_unseen(num_storages: int) -> list[Change]:
    """Storages whose end nobody sees, and a count that lacks, from the last of them on, ever other bytes that none of
    their sums is: all sizes are even, and an odd number is missing."""
    sizes = [2 * (10**6 + 7 ** (i % 6) + i**3) for i in range(num_storages)]
    missing, total, found = sum(sizes) // 2 | 1, 0, list[Change]()
    for i, num_bytes in enumerate(sizes):
        total += num_bytes
        found.append(Change(time_ns=i, address=i, num_bytes=num_bytes, total_bytes=total))
    for i in range(num_storages, 100 * num_storages):  # a busy step, of which every change asks anew
        total, num_bytes = total - 2, 64 if i % 2 == 0 else -64
        total += num_bytes
        found.append(Change(time_ns=i, address=-1, num_bytes=num_bytes, total_bytes=total - missing))
    return found


def test_the_search_for_unseen_ends_has_an_end() -> None:
    """It was a sum of subsets at every change: correct engines, with hundreds of storages that gloo's threads free,
    ran into the time limit. Now the meter says that it does not know; totals are the allocator's, and stay."""
    told = many_unseen(300)
    found = timeline(told)
    assert not found.ends_known
    assert found.totals == [change.total_bytes for change in told]
    assert timeline(told[:300]).ends_known


def test_a_reading_says_that_ends_are_not_known() -> None:
    assert not read_memory(Canned(many_unseen(300), []), 0, NOTHING, NOTHING).ends_known
    assert read_memory(Canned(many_unseen(300)[:300], []), 0, NOTHING, NOTHING).ends_known


def test_a_search_in_vain_is_not_repeated_while_nothing_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = list[int]()
    sized = allocations._sized
    monkeypatch.setattr(allocations, "_sized", lambda w, n, b: questions.append(n) or sized(w, n, b))
    beginning, steady = [(10, 1, 100), (20, 2, 100), (30, 3, 7, 5)], [(40 + i, 4, 8 * (-1) ** i) for i in range(100)]
    timeline(changes(*beginning, *steady))
    assert questions == [5]
    timeline(changes(*beginning, *steady, (200, 9, 64), *[(t + 200, a, n) for t, a, n in steady]))
    assert questions == [5, 5, 5], "another storage came, which might have made them up"


def test_what_was_there_before_does_not_count() -> None:
    """Neither as held nor, when it goes, as freed unseen."""
    told = [(10, 1, 100, 1100), (20, 9, -1000, 100), (30, 2, 5, 105)]
    found = timeline([Change(time_ns=t, address=a, num_bytes=n, total_bytes=all_) for t, a, n, all_ in told])
    assert found.totals == [100, 100, 105] and all(life.stop_ns is None for life in found.lives)


def counted(lives: list[Allocation]) -> Timeline:
    """With an allocator that counts just these."""
    times = sorted({t for each in lives for t in (each.start_ns, each.stop_ns) if t is not None})
    return Timeline(lives=lives, times=times, totals=[sum(a.num_bytes for a in lives if a.alive(t)) for t in times])


def test_what_no_life_accounts_for_is_other() -> None:
    found = Timeline(lives=[life(1, 10, 0)], times=[0], totals=[25])
    assert _classify(found, 5, Named(parameters={1: 10}), {}, 0) == Bytes(parameters=10, other=15)


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
    named = Named(parameters={1: 1}, communication={2: 10})
    on_wire = {1: [155], 3: [155], 5: [155]}
    early = _classify(counted(lives), 155, named, on_wire, step_start_ns=100)
    assert early == Bytes(parameters=1, communication=10 + 100 + 10_000, other=1000)
    late = _classify(counted(lives), 180, named, on_wire, step_start_ns=100)
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

    def __init__(self, told: list[Change], asked: list[AskedOperation]) -> None:
        super().__init__(CPU)
        self.told, self.calls = told, asked
        self.windows = [
            Window(name="backward", step=0, start_ns=100, stop_ns=150),
            Window(name="update", step=0, start_ns=150, stop_ns=200),
        ]
        self.steady_ns = {-1: 95, 0: 205}

    def changes(self) -> list[Change]:
        return self.told

    def requested(self) -> list[AskedOperation]:
        return self.calls


def reduced(address: int, time_ns: int, done_ns: int | None = None) -> AskedOperation:
    operand = Operand(num_bytes=1, address=address)
    return AskedOperation(name="c10d::allreduce_", time_ns=time_ns, operands=((operand,),), done_ns=done_ns)


@pytest.mark.parametrize(
    "told, calls, peak, late, steady",
    [
        (changes((50, 7, 10)), [], {"other": 10}, 0, {"other": 10}),
        (changes((120, 7, 10)), [], {"activations": 10}, 0, {"other": 10}),
        (changes((50, 7, 10)), [reduced(7, 130)], {"communication": 10}, 0, {"communication": 10}),
        (changes((120, 7, 10), (180, 8, 1, 10), (181, 8, -1)), [reduced(7, 130, 150)], {"communication": 10}, 0, {}),
        (
            changes((120, 7, 10), (160, 8, 1), (161, 8, -1, 10)),
            [reduced(7, 130, 150)],
            {"communication": 10, "activations": 1},
            10,
            {},
        ),
        (
            changes((120, 7, 10), (160, 8, 1), (161, 8, -1)),
            [reduced(7, 130, 150)],
            {"communication": 10, "activations": 1},
            0,
            {"communication": 10},
        ),
        (changes((50, 7, 10), (60, 8, 1, 10), (61, 8, -1)), [], {}, 0, {}),
    ],
    ids=["kept", "kept, new", "a bucket", "on its way", "late", "done and kept", "of long ago"],
)
def test_a_storage_whose_end_nobody_saw(
    told: list[Change], calls: list[AskedOperation], peak: dict[str, int], late: int, steady: dict[str, int]
) -> None:
    """Gloo frees in threads that the profiler cannot see: such a storage is there as long as the allocator counts it;
    what only gloo's thread still had at the peak is told."""
    reading = read_memory(Canned(told, calls), 0, NOTHING, NOTHING)
    assert (reading.peak, reading.late_bytes) == (Bytes(**peak), late)
    assert reading.steady == Bytes(**steady)


def test_the_backends_copy_of_what_it_reduces_may_be_late_too() -> None:
    told = changes((120, 7, 10), (131, 9, 10), (160, 8, 1), (161, 8, -1, 10))
    assert read_memory(Canned(told, [reduced(7, 130, 150)]), 0, NOTHING, NOTHING).late_bytes == 10


def test_the_steady_point_of_the_step_before_is_told() -> None:
    reading = read_memory(Canned(changes((50, 7, 10), (120, 8, 5)), []), 0, NOTHING, NOTHING)
    assert (reading.previous_steady_bytes, reading.steady.total) == (10, 15)


def test_what_lies_between_the_windows_is_ours_and_no_peak() -> None:
    """Gradients are gathered there, to be compared."""
    watch = Canned(changes((110, 1, 10), (155, 2, 1000), (160, 2, -1000), (170, 3, 5)), [])
    watch.windows[1] = Window(name="update", step=0, start_ns=165, stop_ns=200)
    assert read_memory(watch, 0, NOTHING, NOTHING).peak.total == 15


@contextlib.contextmanager
def mapped_at(address: int, size: int) -> Iterator[ctypes.Array[ctypes.c_char]]:
    """`size` bytes at `address`, asked of the kernel: the C library gives the same address again only as a rule."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    fixed_noreplace = 0x100000  # Linux's MAP_FIXED_NOREPLACE, which the mmap module does not name
    page = address - address % mmap.PAGESIZE
    length = address - page + size
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed_noreplace
    mapped = libc.mmap(page, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert mapped == page, os.strerror(ctypes.get_errno())
    try:
        yield (ctypes.c_char * size).from_address(address)
    finally:
        libc.munmap(page, length)


def test_a_tensor_that_another_thread_frees_is_gone() -> None:
    """As gloo's do, for real: not seen by the profiler, but by the allocator's count; though the C library has given
    the address away since, to a tensor that is not the allocator's (the corpus, once, where DDP's old buffer was)."""
    size = 400_000_000  # so large that it is mapped by itself, and unmapped with its tensor; no byte of it is touched
    with Watch(CPU) as watch:
        held = [torch.empty(size, dtype=torch.uint8)]
        freed = held[0].data_ptr()
        with watch.window("backward", 0):
            pass
        freeing = threading.Thread(target=held.clear)
        freeing.start()
        freeing.join()
        with watch.window("update", 0):
            pass
        watch.settle(0)
    with mapped_at(freed, size) as memory:
        elsewhere = torch.frombuffer(memory, dtype=torch.uint8)
        assert elsewhere.data_ptr() == freed
        reading = read_memory(watch, 0, NOTHING, NOTHING)
        del elsewhere, memory
    assert reading.steady.total == 0 and reading.peak.total == size


def test_a_storage_at_an_address_that_was_given_out_again_is_over() -> None:
    """Its end was not seen, but two storages cannot be in one place: the name belongs to the later one."""
    named = Named(parameters={7: 10})
    reading = read_memory(Canned(changes((20, 7, 1000), (60, 7, 10, 1000)), []), 0, named, named)
    assert reading.peak == reading.steady == Bytes(parameters=10)


def test_the_batch_is_named() -> None:
    batch, held = torch.zeros(8), torch.zeros(4)
    named = Named.of(Holdings(parameters=[held]), [batch, batch[2:], held])
    assert named.inputs == {batch.data_ptr(): 32} and named.parameters == {held.data_ptr(): 16}


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
    asked = watch.requested()
    assert [a.name for a in asked] == ["c10d::barrier", "c10d::allreduce_", "c10d::broadcast_", "c10d::allreduce_"]
    assert [a.operands[0] for a in asked[1:3]] == [
        (Operand(num_bytes=4000, address=tensor.data_ptr()),),
        (Operand(num_bytes=16_000, address=out.data_ptr()),),
    ]
    assert [(t.kind, t.num_bytes) for t in torch_traffic.requested()] == [("all_reduce", 4000), ("broadcast", 16_000)]
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
    found = sum_transfers(Transfer(kind="all_reduce", ranks=ranks, num_bytes=count) for ranks, count in calls)
    assert found == [
        Collective(kind="all_reduce", group_size=2, ranks=(0, 1), count=1, num_bytes=1),
        Collective(kind="all_reduce", group_size=2, ranks=(0, 2), count=2, num_bytes=30),
    ]


def test_windows_are_half_open() -> None:
    window = Window(name="w", step=0, start_ns=10, stop_ns=20)
    assert [window.contains(t) for t in (9, 10, 19, 20)] == [False, True, True, False]


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
        watch.settle(0)
    assert len(watch.backward_starts()) == 2
    reading = read_memory(watch, 0, named, named)
    assert reading.held is not None
    assert reading.held.parameters == 4000 and reading.held.gradients == 0
    assert 4000 <= reading.held.activations < 4100, "the exponential, and the gradient of the sum"


def test_nothing_is_held_where_no_backward_pass_was_seen() -> None:
    reading, _ = measure_step()
    assert reading.held is None


def test_an_address_s_name_is_that_of_the_storage_that_was_named() -> None:
    """The tensor that had the address before is not the gradient that was put there later."""
    told = changes((110, 5, 1000), (120, 5, -1000), (130, 5, 10))
    named = Named(gradients={5: 10})
    assert read_memory(Canned(told, []), 0, named, named).peak == Bytes(activations=1000)
    assert _classify(timeline(told), 140, named, {}, 100, named_ns=150) == Bytes(gradients=10)

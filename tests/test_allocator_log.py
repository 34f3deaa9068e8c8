"""The CUDA allocator's log completes what the profiler saw, in the form in which PyTorch gives it."""

from __future__ import annotations

import pytest

from meshmark.measure.allocations import Change, Logged, read_log, timeline, with_unseen

MS = 1_000_000
"""Nanoseconds."""


def seen(ms: float, address: int, num_bytes: int, total: int) -> Change:
    return Change(time_ns=int(ms * MS), address=address, num_bytes=num_bytes, total_bytes=total, thread=7)


def logged(ms: float, address: int, num_bytes: int) -> Logged:
    return Logged(time_ns=int(ms * MS) // 1000 * 1000, address=address, num_bytes=num_bytes)


def test_the_log_is_read_without_segments_and_completions() -> None:
    entries = [
        {"action": "segment_alloc", "addr": 4096, "size": 2097152, "stream": 0, "time_us": 5},
        {"action": "alloc", "addr": 4096, "size": 400, "stream": 0, "time_us": 6},
        {"action": "free_requested", "addr": 4096, "size": 400, "stream": 0, "time_us": 9},
        {"action": "free_completed", "addr": 4096, "size": 400, "stream": 0, "time_us": 9},
    ]
    assert read_log(entries) == [
        Logged(time_ns=6000, address=4096, num_bytes=400),
        Logged(time_ns=9000, address=4096, num_bytes=-400),
    ]


def test_what_was_seen_stays_as_it_is() -> None:
    changes = [seen(10, 4096, 512, 512), seen(20, 8192, 1024, 1536), seen(30, 4096, -512, 1024)]
    log = [logged(10, 4096, 400), logged(20, 8192, 1000), logged(30.001, 4096, -400)]
    assert with_unseen(changes, log) == changes


def test_an_end_that_no_watched_thread_saw_is_known_to_the_log() -> None:
    """Two storages of one size: without the log, the meter would have to guess which of them is gone."""
    changes = [
        seen(10, 4096, 512, 512),
        seen(20, 8192, 512, 1024),
        seen(50, 16384, 512, 1024),  # one of the first two has gone
    ]
    log = [logged(10, 4096, 500), logged(20, 8192, 500), logged(40, 8192, -500), logged(50, 16384, 500)]
    merged = with_unseen(changes, log)
    assert [(c.time_ns // MS, c.address, c.num_bytes, c.total_bytes) for c in merged] == [
        (10, 4096, 512, 512),
        (20, 8192, 512, 1024),
        (40, 8192, -512, 512),
        (50, 16384, 512, 1024),
    ]
    found = timeline(merged)
    assert found.ends_known and found.total(45 * MS) == 512
    assert {life.address for life in found.lives if life.alive(45 * MS)} == {4096}
    guessed = timeline(changes)
    assert {life.address for life in guessed.lives if life.alive(45 * MS)} == {4096, 8192}


def test_an_allocation_of_an_unwatched_thread_is_counted_in_blocks() -> None:
    changes = [seen(10, 4096, 512, 512), seen(40, 4096, -512, 1536)]
    merged = with_unseen(changes, [logged(10, 4096, 8), logged(20, 8192, 1500), logged(40, 4096, -8)])
    assert [(c.address, c.num_bytes, c.total_bytes) for c in merged] == [
        (4096, 512, 512),
        (8192, 1536, 2048),
        (4096, -512, 1536),
    ]


def test_what_was_there_before_is_left_to_the_count() -> None:
    """Its end lies in the log, its beginning does not: the allocator's count alone knows its size."""
    changes = [seen(10, 4096, 512, 10512), seen(30, 8192, 512, 1024)]
    log = [logged(1, 1 << 20, 10000), logged(10, 4096, 8), logged(20, 1 << 20, -10000), logged(30, 8192, 8)]
    assert with_unseen(changes, log) == changes


@pytest.mark.parametrize("later_ns", [1, 400, 999])
def test_a_storage_of_less_than_a_microsecond_ends_after_it_began(later_ns: int) -> None:
    begun_ns = 10 * MS + 600
    changes = [
        Change(time_ns=begun_ns, address=4096, num_bytes=512, total_bytes=512),
        seen(30, 8192, 512, 512),
    ]
    end = Logged(time_ns=(begun_ns + later_ns) // 1000 * 1000, address=4096, num_bytes=-8)
    merged = with_unseen(changes, [logged(10, 4096, 8), end, logged(30, 8192, 8)])
    assert [change.num_bytes for change in merged] == [512, -512, 512]
    assert timeline(merged).ends_known


def test_an_address_that_is_used_again_is_matched_by_time() -> None:
    changes = [seen(10, 4096, 512, 512), seen(30, 4096, 1024, 1024), seen(50, 4096, -1024, 0)]
    log = [logged(10, 4096, 8), logged(20, 4096, -8), logged(30, 4096, 1000), logged(50, 4096, -1000)]
    assert [(c.time_ns // MS, c.num_bytes) for c in with_unseen(changes, log)] == [
        (10, 512),
        (20, -512),
        (30, 1024),
        (50, -1024),
    ]


def test_nothing_seen_is_nothing_to_add_to() -> None:
    assert with_unseen([], [logged(10, 4096, 8)]) == []

"""Reading of NCCL's flight recorder: a dump of an H200, and dumps of several ranks shaped as PyTorch's own tests assert
them (test_c10d_nccl.py, NCCLTraceTest)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.flight_recorder.components.types import COLLECTIVES

from meshmark.environment import visible_gpus
from meshmark.errors import TrafficError
from meshmark.launch import rank
from meshmark.launch.rank import RankInfo
from meshmark.measure.flight_recorder import IssuedOperation, issued_operations, kind_of, under_way
from meshmark.measure.meters import AskedOperation, Message, Operand, TorchTraffic, Watch, read_traffic
from meshmark.measure.readings import Collective, device_memory, wire_factor
from meshmark.report.table import bytes_text
from meshmark.spec.hardware import gpu_of_device

GROUPS = {"0": (0, 1, 2, 3), "1": (0, 2)}


def entry(title: str, sizes: list[list[int]], out: list[list[int]] | None = None, **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    outputs = sizes if out is None else out
    dtype = changes.pop("dtype", "Float")
    return {
        "record_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 1,
        "p2p_seq_id": 0,
        "op_id": 1,
        "profiling_name": f"nccl:{title}",
        "time_created_ns": 100,
        "input_sizes": sizes,
        "input_dtypes": [dtype] * len(sizes),
        "output_sizes": outputs,
        "output_dtypes": [dtype] * len(outputs),
        "state": "completed",
        "is_p2p": False,
        **changes,
    }


H200 = Path(__file__).parent / "data" / "h200"
"""Files that `python -m benchmarks.gpu fixtures` left on an H200 with PyTorch 2.11 and NCCL 2.28.9, without frames."""


def test_a_dump_of_a_gpu_is_read() -> None:
    """One rank: every call of `benchmarks.gpu_fixtures`, in its order, with the bytes of a thousand floats."""
    entries = json.loads((H200 / "flight-recorder.json").read_text())["entries"]
    found = list(issued_operations(entries, {"0": (0,)}))
    assert [(one.kind, one.num_bytes) for one in found] == [
        ("all_reduce", 4000),
        ("broadcast", 4000),
        ("all_gather", 4000),
        ("reduce_scatter", 4000),
        ("all_gather", 4000),
        ("all_to_all", 4000),
        ("barrier", 4),
        ("all_gather", 8000),
    ]
    assert {one.ranks for one in found} == {(0,)}
    assert [one.time_ns for one in found] == sorted(one.time_ns for one in found)
    assert under_way(entries) == ["nccl:coalesced, number 8 of group 0 default_pg, of nothing: completed"]


def test_dumps_of_two_ranks_are_read() -> None:
    """Both ranks of one H200, over NCCL: collectives of both groups, with the bytes of a thousand floats a rank. A send
    and a receive in a batch, whose state PyTorch leaves at `scheduled`, are not under way."""
    dumps = json.loads((H200 / "flight-recorder-two-ranks.json").read_text())
    for dump in dumps:
        groups = {group["name"]: tuple(json.loads(group["ranks"])) for group in dump["pg_config"].values()}
        found = list(issued_operations(dump["entries"], groups))
        assert [(one.kind, one.num_bytes) for one in found] == [
            ("all_reduce", 4000),
            ("broadcast", 4000),
            ("reduce", 4000),
            ("all_gather", 8000),
            ("reduce_scatter", 4000),
            ("all_gather", 8000),
            ("all_to_all", 4000),
            ("barrier", 4),
            ("all_reduce", 6000),
        ]
        assert {one.ranks for one in found} == {(0, 1)}
        assert "scheduled" in {entry["state"] for entry in dump["entries"]}
        assert under_way(dump["entries"]) == ["nccl:coalesced, number 8 of group 0 default_pg, of nothing: completed"]


def test_a_batch_of_messages_is_under_way_until_it_is_closed() -> None:
    batch = [entry("send 0->1", [[10]], is_p2p=True, p2p_seq_id=1, state="scheduled"), entry("coalesced", [])]
    batch[1] |= {"p2p_seq_id": 1, "state": "started"}
    assert under_way(batch)[0] == "nccl:send 0->1, number 1 of group 0 default_pg, of Float [10]: scheduled"
    batch[1] |= {"state": "completed"}
    assert under_way(batch) == ["nccl:coalesced, number 1 of group 0 default_pg, of nothing: completed"]


def test_memory_statistics_of_a_gpu_are_read() -> None:
    """The device's bytes outside the allocator are those of its context and of NCCL: 2.8 GB."""
    statistics, free_and_total = (
        json.loads((H200 / f"{name}.json").read_text()) for name in ("memory-stats", "memory-free-total")
    )
    found = device_memory(statistics, tuple(free_and_total))
    assert found.allocated_peak_bytes <= found.reserved_peak_bytes < found.outside_bytes
    assert found.num_retries == 0 and 2.5e9 < found.outside_bytes < 3e9


def test_the_list_of_a_machine_with_one_gpu_is_read() -> None:
    listed = (H200 / "nvidia-smi-list.txt").read_text()
    assert visible_gpus(listed, None) == visible_gpus(listed, "0") == ["NVIDIA H200"]
    found = gpu_of_device(visible_gpus(listed, None)[0])
    assert found and found.name == "h200"


def issued(*entries: dict[str, Any]) -> list[IssuedOperation]:
    return list(issued_operations(entries, GROUPS))


@pytest.mark.parametrize(
    "told, kind, num_bytes",
    [
        (entry("all_reduce", [[3, 4]]), "all_reduce", 48),
        (entry("_all_gather_base", [[5]], [[20]]), "all_gather", 80),
        (entry("_reduce_scatter_base", [[20]], [[5]]), "reduce_scatter", 80),
        (entry("all_gather_into_tensor_coalesced", [[5], [1]], [[20], [4]]), "all_gather", 96),
        (entry("reduce_scatter_tensor_coalesced", [[20], [4]], [[5], [1]]), "reduce_scatter", 96),
        (entry("allreduce_coalesced", [[3], [4]]), "all_reduce", 28),
        (entry("all_to_all", [[8]], dtype="BFloat16"), "all_to_all", 16),
        (entry("all_reduce_barrier", [[1]]), "barrier", 4),
        (entry("broadcast", [[7]], dtype="Float8_e4m3fn"), "broadcast", 7),
        (entry("_broadcast_oop", [[7]], dtype="Double"), "broadcast", 56),
    ],
    ids=lambda value: value["profiling_name"] if isinstance(value, dict) else None,
)
def test_titles_and_sizes_become_kinds_and_bytes(told: dict[str, Any], kind: str, num_bytes: int) -> None:
    assert issued(told) == [IssuedOperation(kind=kind, time_ns=100, ranks=(0, 1, 2, 3), num_bytes=num_bytes)]


def test_every_collective_that_pytorch_s_analyzer_knows_has_a_wire_factor() -> None:
    """Its own list of titles, of the version that is installed; `split` and `new_window` make groups and windows."""
    unknown = {title for title in COLLECTIVES if not wire_factor(kind_of(f"nccl:{title}"), 4) >= 0}
    assert unknown == {"split", "new_window"} & set(COLLECTIVES)


def test_an_all_gather_of_unequal_parts_is_one() -> None:
    """test_allgather_uneven: as many broadcasts as ranks, and an entry for the group; all of one sequence number."""
    parts = [entry("_broadcast_oop", [[i + 1]], state="scheduled") for i in range(4)]
    other = entry("all_reduce", [[9]], collective_seq_id=2)
    whole = entry("ALLGATHER_coalesced", [])
    found = issued(*parts, whole, other)
    assert [(o.kind, o.num_bytes) for o in found] == [("all_gather", 4 * 10), ("all_reduce", 36)]
    scattered = [entry("_reduce_oop", [[i + 1]]) for i in range(4)]
    assert [(o.kind, o.num_bytes) for o in issued(*scattered, entry("REDUCE_SCATTER_coalesced", []))] == [
        ("reduce_scatter", 40)
    ]


def test_parts_of_two_groups_are_not_mixed_and_those_of_no_group_stand_for_themselves() -> None:
    mine, other = entry("_broadcast_oop", [[1]]), entry("_broadcast_oop", [[2]], process_group=("1", "tp"))
    found = issued(mine, other, entry("ALLGATHER_coalesced", [], process_group=("1", "tp")))
    assert [(o.kind, o.num_bytes, o.ranks) for o in found] == [
        ("all_gather", 8, (0, 2)),
        ("broadcast", 4, (0, 1, 2, 3)),
    ]


def test_messages_and_the_entry_of_their_batch_are_no_collectives() -> None:
    """test_batched_send_recv: the parts are point-to-point, and what closes the batch has no sizes."""
    batch = [entry("send 1->0", [[3, 4]], is_p2p=True, p2p_seq_id=1), entry("coalesced", [])]
    assert issued(*batch) == []


class Canned(Watch):
    """A watch that saw what it is told."""

    def __init__(self, asked: list[AskedOperation], entries: list[dict[str, Any]]) -> None:
        super().__init__(torch.device("cpu"))
        self.calls, self.entries = asked, entries

    def requested(self) -> list[AskedOperation]:
        return self.calls

    def messages(self) -> list[Message]:
        sent = [call for call in self.calls if call.ranks]
        return [
            Message(kind="send", ranks=call.ranks, num_bytes=call.operands[0][0].num_bytes, time_ns=call.time_ns)
            for call in sent
        ]

    def issued(self) -> list[IssuedOperation]:
        return issued(*self.entries)


def traffic(asked: list[AskedOperation], *entries: dict[str, Any]) -> TorchTraffic:
    made = TorchTraffic(Canned(asked, list(entries)))
    made._stretches = [(0, 200)]
    return made


def asked(name: str, *num_bytes: int, ranks: tuple[int, ...] = ()) -> AskedOperation:
    operands = tuple((Operand(num_bytes=n, address=1),) for n in num_bytes)
    return AskedOperation(name=f"c10d::{name}", time_ns=100, operands=operands, ranks=ranks)


def test_a_step_over_nccl_is_told_in_the_words_of_theory() -> None:
    source = traffic(
        [asked("_allgather_base_", 80, 20), asked("allgather_", 40, 8), asked("send", 48, ranks=(0, 1))],
        entry("_all_gather_base", [[5]], [[20]]),
        *[entry("_broadcast_oop", [[i + 1]], collective_seq_id=2) for i in range(4)],
        entry("ALLGATHER_coalesced", [], collective_seq_id=2),
        entry("send 0->1", [[3, 4]], is_p2p=True),
        entry("coalesced", []),
    )
    reading = read_traffic([source])
    gathers = Collective(kind="all_gather", group_size=4, ranks=(0, 1, 2, 3), count=2, num_bytes=120)
    send = Collective(kind="send", group_size=2, ranks=(0, 1), count=1, num_bytes=48)
    assert reading.issued == [gathers, send]


def test_what_a_callback_asked_for_where_nobody_saw_is_told_as_it_was_issued() -> None:
    """PowerSGD's hook: the second and the third all-reduce follow from the first one's future."""
    entries = [entry("all_reduce", [[size]], collective_seq_id=size) for size in (3, 4, 5)]
    seen = read_traffic([traffic([asked("allreduce_", 16)], *entries)])
    assert [(c.count, c.num_bytes) for c in seen.asked] == [(3, 48)] and seen.issued == seen.asked
    with pytest.raises(TrafficError, match="1 collectives asked for, 3 in the flight recorder"):
        read_traffic([traffic([asked("allreduce_", 24)], *entries)])


@pytest.mark.parametrize(
    "source, reason",
    [
        (traffic([asked("allreduce_", 48)]), "1 collectives asked for, 0 in the flight recorder"),
        (traffic([asked("conjure_", 48)], entry("conjure", [[1]])), "c10d::conjure_ is unknown to Meshmark"),
        (
            traffic([asked("allreduce_", 48)], entry("all_reduce", [[12]], process_group=("7", "gone"))),
            "all_reduce used a process group that was destroyed",
        ),
        (traffic([asked("send", 48)]), "1 sends and receives, whose ends were not all seen"),
    ],
    ids=["unpaired", "unknown", "of no group", "without ends"],
)
def test_what_cannot_be_told_is_an_error_of_the_traffic_alone(source: TorchTraffic, reason: str) -> None:
    with pytest.raises(TrafficError, match=reason):
        read_traffic([source])


def test_a_kind_that_nobody_knows_is_listed_and_raises_nowhere() -> None:
    odd = Collective(kind="conjure", group_size=4, count=1, num_bytes=100)
    assert bytes_text(odd.wire_bytes) == "unknown"


# What a rank that hangs was communicating.


def test_what_was_under_way_is_told_after_the_last_that_ended() -> None:
    first, last = entry("all_reduce", [[1]], collective_seq_id=1), entry("broadcast", [[2]], collective_seq_id=2)
    open_one = entry("_all_gather_base", [[5]], [[20]], collective_seq_id=3, state="started")
    assert under_way([first, last, open_one]) == [
        "nccl:broadcast, number 2 of group 0 default_pg, of Float [2]: completed",
        "nccl:_all_gather_base, number 3 of group 0 default_pg, of Float [5]: started",
    ]


def test_a_rank_answers_when_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, by a thread that waits in the kernel until then; whoever does not listen is not waited for."""
    told = {"entries": [entry("all_reduce", [[1]], state="scheduled")]}
    monkeypatch.setattr(rank, "dump", lambda: told)
    info = RankInfo(
        rank=1, local_rank=1, local_world_size=2, world_size=2, host="h", port=0, prefix="", folder=tmp_path
    )
    assert not rank.ask(info)
    rank.answer_about_collectives(info)
    deadline = time.monotonic() + 10
    while not rank.ask(info) and time.monotonic() < deadline:
        time.sleep(0.01)
    file = info.file("collectives")
    while not (file.is_file() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert file.read_text() == "nccl:all_reduce, number 1 of group 0 default_pg, of Float [1]: scheduled\n"

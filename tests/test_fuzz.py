"""Odd inputs are refused with a sentence, in seconds: no traceback, whatever somebody types or a file holds.

FUZZ_EXAMPLES=2000 (`make fuzz`) tries more, and other ones each time; in `make test` they are always the same.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshmark.cli.commands import main
from meshmark.cli.options import chosen_adapters, positive, split_values
from meshmark.errors import InputError, ResultsError
from meshmark.launch.cluster import cluster_of
from meshmark.plan.layout_columns import DEGREES, DIMENSIONS
from meshmark.records.record_file import read_records
from meshmark.spec.workload import WORKLOADS

ROOT = Path(__file__).parent.parent
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "40"))
LONGEST_SECONDS = 30.0
"""Most seconds of one command, on a busy machine."""
fuzz = settings(
    max_examples=EXAMPLES,
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)

NUMBERS = ["0", "-1", "1", "2", "3", "8", "1e9", "nan", "inf", "-inf", "1e400", "10" * 200, "9" * 5000, "1_0", "²", "٣"]
TEXTS = ["", " ", "'", "a" * 200_000, "\0", "\x1b[31m", "\ud800", "é", "../x", "gpt-" + "9" * 400 + "b", "None", "{}"]
numbers = st.sampled_from(NUMBERS) | st.integers().map(str)
texts = st.sampled_from(TEXTS) | st.text(max_size=20)
odd = numbers | texts
_COLUMNS = (*DIMENSIONS, *DEGREES, "micro_batch", "gpus", "gpu", "framework")
_CELLS = "llama 2 256 8 8 1024 512 0 128 2 2 2 1 0 4 1 1 1f1b none none 1 8 h100 nanotron"
LAYOUT = dict(zip(_COLUMNS, _CELLS.split(), strict=True))
MACHINE: dict[str, Any] = {
    "name": "here",
    "peak_flops": {"bf16": 1e14},
    "memory_bytes": 8e10,
    "memory_bandwidth": 2e12,
    "link_bandwidth": 3e11,
    "network_bandwidth": 5e10,
    "gpus_per_node": 8,
    "source": "made up",
    "host": None,
}


def expect_answer(*arguments: str) -> None:
    """An answer, or a mistake that is told as one; and soon."""
    said, started = io.StringIO(), time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            code = main(arguments)
        except SystemExit as ended:  # argparse's own
            code = ended.code if isinstance(ended.code, int) else 1
    assert code == 0 or (code == 2 and "meshmark: " in said.getvalue() or "error: " in said.getvalue()), said.getvalue()
    assert len(said.getvalue()) < 20_000, "a message that nobody reads"
    assert time.monotonic() - started < LONGEST_SECONDS


@fuzz
@given(changes=st.dictionaries(st.sampled_from(sorted(LAYOUT)), odd, max_size=3), extra=st.lists(odd, max_size=2))
def test_predict_takes_any_row(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, str], extra: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    cells = [*(LAYOUT | changes).values(), *extra]
    text = ",".join(LAYOUT) + "\n" + ",".join(f'"{cell}"' for cell in cells) + "\n"
    (folder / "in.csv").write_text(text, encoding="utf-8", errors="surrogatepass")
    expect_answer("predict", str(folder / "in.csv"), "-o", str(folder / "out.csv"))


@fuzz
@given(content=st.binary(max_size=200), row=st.booleans())
def test_predict_takes_any_file(tmp_path_factory: pytest.TempPathFactory, content: bytes, row: bool) -> None:
    folder = tmp_path_factory.mktemp("files")
    (folder / "in.csv").write_bytes((",".join(LAYOUT) + "\n").encode() * row + content)
    expect_answer("predict", str(folder / "in.csv"), "-o", str(folder / "out.csv"))


@fuzz
@given(
    st.dictionaries(
        st.sampled_from(["--gpus", "--global-batch", "--seq-len", "--cp", "--top", "--model", "--schedules"]),
        odd,
        max_size=2,
    ),
    st.booleans(),
)
def test_plan_takes_any_number_and_name(chosen: dict[str, str], largest: bool) -> None:
    given = {"--gpus": "8", "--model": "gpt2-124m"} | chosen
    expect_answer("plan", *(f"{k}={v}" for k, v in given.items()), *(["--max-model"] if largest else []))


@fuzz
@given(
    st.sampled_from(sorted(MACHINE)), st.sampled_from([None, [], {}, "8", -1, 0, 10**400, float("nan"), 1e308, True])
)
def test_plan_takes_any_machine(tmp_path_factory: pytest.TempPathFactory, field: str, value: object) -> None:
    path = tmp_path_factory.mktemp("machines") / "here.json"
    machine = copy.deepcopy(MACHINE) | {field: value}
    path.write_text(json.dumps({"gpu": machine, "rates": {"name": "here"}}))
    expect_answer("plan", "--gpus", "8", "--model", "gpt2-124m", "--gpu", str(path))


@pytest.mark.parametrize(
    "deep", ["[" * 100_000, '{"gpu": ' + "[" * 100_000, '{"a":' * 100_000], ids=["list", "gpu", "object"]
)
@pytest.mark.parametrize("option", ["--gpu", "--rates"])
def test_plan_takes_a_deep_file(tmp_path: Path, deep: str, option: str) -> None:
    (tmp_path / "deep.json").write_text(deep)
    expect_answer("plan", "--gpus", "8", option, str(tmp_path / "deep.json"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--gpus", "8", "--global-batch", "1" + "0" * 20),
        ("plan", "--gpus", "1" + "0" * 400),
        ("plan", "--gpus", "8", "--seq-len", "1" + "0" * 20),
        ("plan", "--gpus", "8", "--model", "gpt-" + "9" * 400 + "b"),
        ("plan", "--gpus", "8", "--model", "x" * 1_000_000),
        ("calibrate", "--seconds", "inf"),
        ("report", "results", "-o", ""),
        ("predict", "nowhere.csv", "-o", ""),
        ("cases", "--world", "1000000000"),
        ("cases", "--world", "9" * 5000),
        ("cases", "--world", "²"),
        ("cases", "--workload", "x" * 1_000_000),
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_what_was_seen_to_hang_or_to_crash(arguments: tuple[str, ...]) -> None:
    expect_answer(*arguments)


def test_a_row_of_a_billion_layers_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(",".join(LAYOUT) + "\n" + ",".join((LAYOUT | {"layers": str(10**9)}).values()))
    expect_answer("predict", str(tmp_path / "in.csv"), "-o", str(tmp_path / "out.csv"))


SCHEDULER = {
    "GROUP_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "WORLD_SIZE": "2",
    "MASTER_PORT": "29500",
    "MASTER_ADDR": "node0",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "node[0-1]",
}


def detected(environment: Mapping[str, str]) -> str:
    try:
        return f"{cluster_of(environment).nnodes} nodes"
    except InputError as error:
        return str(error)


@fuzz
@given(
    st.dictionaries(st.sampled_from(sorted(SCHEDULER)), odd, max_size=3),
    st.sets(st.sampled_from(sorted(SCHEDULER)), max_size=5),
)
def test_any_environment_of_a_scheduler_is_understood_or_refused(changes: dict[str, str], missing: set[str]) -> None:
    assert detected({k: v for k, v in (SCHEDULER | changes).items() if k not in missing})


def test_no_ranks_on_a_node_is_a_mistake_that_is_named() -> None:
    assert "LOCAL_WORLD_SIZE='0'" in detected(SCHEDULER | {"LOCAL_WORLD_SIZE": "0"})
    assert detected(SCHEDULER) == "2 nodes"


@fuzz
@given(odd, odd)
def test_options_take_any_text(text: str, other: str) -> None:
    for ask in (
        lambda: positive("--world", text),
        lambda: split_values("--workload", text),
        lambda: chosen_adapters(text, [other]),
        lambda: WORKLOADS["gpt-mini"].__class__(name=text, model=WORKLOADS["gpt-mini"].model, global_batch=hash(other)),
    ):
        with contextlib.suppress(InputError):
            ask()


@fuzz
@given(st.binary(max_size=300) | st.sampled_from([b"[" * 100_000, b'{"schema": 2, "case": ' + b"[" * 100_000]))
def test_any_line_of_records_is_a_complaint_at_most(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("records")
    (folder / "records.jsonl").write_bytes(content)
    with pytest.raises(ResultsError):
        read_records(folder)

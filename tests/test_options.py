"""Options of `pytest suites`: what cannot be is a usage error, before anything runs. Most are checked where the plugin
checks them; two go through a whole pytest in this process, for its exit code. Nothing is launched."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

from meshmark.adapter.matrix import matrix
from meshmark.adapter.registry import core_adapters, load_adapter
from meshmark.conformance.scenario import plain_cells
from meshmark.errors import AdapterError
from meshmark.pytest_plugin.selection import Selection, selection, take_engines
from meshmark.spec.precision import Precision

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parent.parent
OUTSIDE = """
from meshmark.adapter.contract import Adapter, Capabilities

class Mine(Adapter):
    capabilities = Capabilities(degrees=frozenset({"dp"}))
    def build(self, case, context):
        raise NotImplementedError
"""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No options and no cluster from outside. What the inner pytest imports it also forgets, and PyTorch must not be
    imported twice: so everything is imported before."""
    for name in ("PYTEST_ADDOPTS", "GROUP_RANK", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    for file in sorted((ROOT / "adapters").glob("*.py")):
        importlib.import_module(f"adapters.{file.stem}".removesuffix(".__init__"))


CORE = ("--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider")


def choose(pytester: pytest.Pytester, *options: str) -> Selection:
    """Return the choice of a command line, as the plugin checks it."""
    return selection(pytester.parseconfig(*CORE, *options, str(ROOT / "suites")))


def ids(pytester: pytest.Pytester, *options: str) -> list[str]:
    """Ids of the cases that the suites would run."""
    chosen = choose(pytester, *options)
    return [case.id for case in matrix(chosen.adapters, chosen.worlds, chosen.workloads, chosen.precisions)]


def collect(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess(*CORE, "--collect-only", "-q", *options, str(ROOT / "suites"))


@pytest.mark.parametrize(
    "options, message",
    [
        (["--adapters", "dpd"], "unknown adapter 'dpd': did you mean 'ddp'"),
        (["--workload", "gpt-tny"], "unknown workload 'gpt-tny': did you mean 'gpt-tiny'"),
        (["--precision", "fp23"], "unknown precision 'fp23': did you mean 'fp32'"),
        (["--device", "cdua"], "unknown device 'cdua': did you mean 'cuda'"),
        (["--backend", "glo"], "unknown backend 'glo': did you mean 'gloo'"),
        (["--world", "0"], "--world '0': expected a whole number of at least 1"),
        (["--world", "two"], "--world 'two': expected a whole number of at least 1"),
        (["--steps", "1"], "--steps 1: at least 3 are needed"),
        (["--time-limit", "0"], "--time-limit 0: expected seconds above 0"),
        (["--time-limit", "nan"], "--time-limit nan: expected seconds above 0"),
        (["--time-limit", "inf"], "--time-limit inf: expected seconds above 0, at most 1,000,000"),
        (["--timing-budget", "-1"], "--timing-budget -1: expected seconds from 0 to below --time-limit, 120"),
        (["--corpus", "nowhere.txt"], "corpus 'nowhere.txt' cannot be read: No such file"),
        (["--workload", "gpt-tiny", "--corpus", "empty.txt"], "corpus 'empty.txt' is empty"),
        (["--corpus", "short.txt"], "has 64 bytes; one sequence takes 65"),
        (["--adapter", "nowhere.py:Mine"], "cannot be imported: FileNotFoundError"),
        (["--adapter", "mine.py"], "expected FILE.py:CLASS"),
        (["--adapters", "mine.py:Mine"], "--adapter takes FILE.py:CLASS"),
        (["--adapter", "lacking.py:Mine"], "lacks build"),
        (["--nnodes", "2"], "--nnodes 2 needs --rdzv HOST:PORT"),
        (["--nnodes", "2", "--node-rank", "2", "--rdzv", "a:1"], "--node-rank 2 with --nnodes 2: expected 0 to 1"),
        (["--adapters", ","], "--adapters ',': expected"),
        (["--world", ""], "--world '': expected"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_a_usage_error(pytester: pytest.Pytester, options: list[str], message: str) -> None:
    (pytester.path / "empty.txt").touch()
    (pytester.path / "short.txt").write_text("x" * 64)
    (pytester.path / "lacking.py").write_text(OUTSIDE.replace("def build", "def bild"))
    with pytest.raises(pytest.UsageError) as caught:
        choose(pytester, *options)
    assert message in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none_is_a_usage_error(pytester: pytest.Pytester) -> None:
    with pytest.raises(pytest.UsageError, match="--device cuda, but PyTorch sees no CUDA device here; `mesh"):
        choose(pytester, "--device", "cuda")


@pytest.mark.parametrize(
    "options, message",
    [
        (["--workload", "gpt-tny"], "unknown workload 'gpt-tny': did you mean 'gpt-tiny'"),
        (["--adapters", "ddp", "--world", "5"], "24 sequences is not divisible by dp 5 x 2 micro-batches"),
        (
            ["--adapters", "ddp,single", "--world", "2,6", "--nnodes", "4", "--rdzv", "a:1"],
            "1 or 2 or 6 ranks cannot be spread evenly over 4 nodes: --world takes multiples of 4 here; or start one",
        ),
    ],
    ids=["selection", "matrix", "nodes"],
)
def test_a_usage_error_ends_pytest_with_4_and_its_message_once(
    pytester: pytest.Pytester, options: list[str], message: str
) -> None:
    """As for pytest's own options; not one error a test file."""
    result = collect(pytester, *options)
    assert (result.stdout.str() + result.stderr.str()).count(message) == 1
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_every_suite_runs_every_case(pytester: pytest.Pytester) -> None:
    """And -k selects by parts of the id."""
    result = collect(pytester, "--adapters", "ddp,single", "--world", "2,4", "-k", "single or dp4")
    found = re.findall(r"::test_(\w+)\[(.*)\]", result.stdout.str())
    suites = ("equivalence", "memory", "communication", "throughput")
    cases = ("ddp-dp4.mb3-gpt-tiny-fp32", "single-one.mb3-gpt-tiny-fp32")
    assert sorted(found) == sorted((suite, case) for suite in suites for case in cases)


def test_conformance_is_collected_when_it_is_asked_for(pytester: pytest.Pytester) -> None:
    """By its option, by its file or by a test in it; `pytest suites` alone is the matrix."""
    options, file = ("--adapters", "ddp"), str(ROOT / "suites" / "test_conformance.py")

    def collected(*arguments: str) -> set[str]:
        result = pytester.runpytest_inprocess(*CORE, "--collect-only", "-q", *options, *arguments)
        assert result.ret == 0
        return set(re.findall(r"::test_(\w+)\[", result.stdout.str()))

    matrix_alone = {"equivalence", "memory", "communication", "throughput"}
    assert collected(str(ROOT / "suites")) == matrix_alone
    assert collected(str(ROOT / "suites"), "--conformance") == matrix_alone | {"conformance"}
    assert collected(str(ROOT / "suites"), "--profile") == matrix_alone | {"profile"}
    one = str(ROOT / "suites" / "test_memory.py")
    assert collected(one, "--profile", "--conformance") == {"memory", "profile", "conformance"}
    assert collected(f"{one}::test_memory[ddp-dp2.mb3-gpt-tiny-fp32]", "--profile") == {"memory", "profile"}
    assert collected("--pyargs", "meshmark.suites.test_memory", "--profile") == {"memory", "profile"}
    assert collected(str(ROOT / "suites"), file) == matrix_alone | {"conformance"}
    assert collected(file) == {"conformance"}
    assert collected(f"{file}::test_conformance[ddp-dp2-loss]") == {"conformance"}


@pytest.mark.parametrize("world", ["2,4", "8", "16"])
def test_every_suite_collects_at_every_world(pytester: pytest.Pytester, world: str) -> None:
    """Conformance's workload grows with the world; in the matrix, what does not fit is a skip."""
    result = collect(pytester, "--world", world, "--conformance")
    assert result.ret == 0, result.stdout.str() + result.stderr.str()
    found = set(re.findall(r"test_conformance\[(.*)-loss\]", result.stdout.str()))
    for size in world.split(","):
        assert {f"ddp-dp{size}", f"gpipe-pp{size}.mb{size}", f"megatron-tp{size}", f"fsdp2-dp{size}.zero3"} <= found


def test_a_layout_that_does_not_fit_is_a_skip_with_its_reason(pytester: pytest.Pytester) -> None:
    """Beside one that does; nothing is launched, for -k leaves the skips alone."""
    result = pytester.runpytest_inprocess(
        *CORE, "--adapters", "ddp", "--world", "2,5", "-k", "dp5 and memory", "-rs", str(ROOT / "suites")
    )
    result.assert_outcomes(skipped=1, deselected=7)
    result.stdout.fnmatch_lines(["SKIPPED*24 sequences is not divisible by dp 5 x 2 micro-batches; choose another*"])


def test_conformance_keeps_the_batch_and_the_corpus_that_it_is_told(pytester: pytest.Pytester) -> None:
    """Four ranks do not share six sequences evenly."""
    (pytester.path / "text.txt").write_text("x" * 100)
    chosen = choose(pytester, "--global-batch", "12", "--corpus", "text.txt")
    (cell,) = plain_cells("ddp", chosen.adapters["ddp"], 4, global_batch=chosen.global_batch, corpus=chosen.corpus)
    assert (cell.workload.global_batch, cell.workload.corpus) == (12, "text.txt")
    assert cell.workload.name.startswith("gpt-mini.b12.text.")
    options = ("--adapters", "ddp", "--global-batch", "6", "--world", "4")
    result = pytester.runpytest_inprocess(*CORE, *options, str(ROOT / "suites" / "test_conformance.py"))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "6 sequences is not divisible by dp 4 x 1 micro-batches" in result.stderr.str()


def test_the_defaults_are_the_core_s_adapters_on_two_cpu_ranks(pytester: pytest.Pytester) -> None:
    chosen = choose(pytester)
    assert set(chosen.adapters) == set(core_adapters())
    assert (chosen.worlds, [w.name for w in chosen.workloads], chosen.precisions) == (
        [2],
        ["gpt-tiny"],
        [Precision.FP32],
    )
    assert (chosen.options.device, chosen.options.backend) == ("cpu", None)
    assert (chosen.cluster.nnodes, chosen.cluster.node_rank) == (1, 0)


def test_adapters_worlds_and_precisions_make_the_cases(pytester: pytest.Pytester) -> None:
    found = ids(pytester, "--adapters", "ddp, fs*p2", "--world", "2,4", "--precision", "fp32,bf16")
    assert sorted(found) == sorted(
        f"{layout}-gpt-tiny-{precision}"
        for layout in ("ddp-dp2.mb3", "ddp-dp4.mb3", "fsdp2-dp2.zero3.mb3", "fsdp2-dp4.zero3.mb3")
        for precision in ("fp32", "bf16")
    )


def test_a_case_named_twice_is_one_case(pytester: pytest.Pytester) -> None:
    """Not two with a number behind: their records would be one."""
    options = [
        "--adapters",
        "ddp,dd*p",
        "--world",
        "2,2",
        "--precision",
        "fp32,fp32",
        "--workload",
        "gpt-tiny,gpt-tiny",
    ]
    assert ids(pytester, *options) == ["ddp-dp2.mb3-gpt-tiny-fp32"]


def test_steps_are_those_of_both_passes(pytester: pytest.Pytester) -> None:
    options = choose(pytester, "--steps", "7", "--time-limit", "9.5").options
    assert (options.observed_steps, options.timed_steps, options.time_limit_seconds) == (7, 7, 9.5)


def test_a_corpus_is_that_of_every_workload(pytester: pytest.Pytester) -> None:
    (pytester.path / "text.txt").write_text("x" * 100)
    chosen = choose(pytester, "--corpus", "text.txt", "--workload", "gpt-tiny,llama-tiny")
    assert [w.corpus for w in chosen.workloads] == ["text.txt"] * 2


def test_a_case_is_named_after_its_corpus(pytester: pytest.Pytester) -> None:
    """By its bytes, for two may share a file's name; in characters that a shell leaves alone."""
    for folder, text in (("one", "x" * 100), ("two", "y" * 100), ("three", "x" * 100)):
        (pytester.path / folder).mkdir()
        (pytester.path / folder / "my text; rm -é.txt").write_text(text)
    one, two, three = (
        ids(pytester, "--adapters", "ddp", "--global-batch", "16", "--corpus", f"{folder}/my text; rm -é.txt")[0]
        for folder in ("one", "two", "three")
    )
    assert re.fullmatch(r"ddp-dp2\.mb4-gpt-tiny\.b16\.my_text_rm\.[0-9a-f]{8}-fp32", one)
    assert one != two and one == three


def test_an_outside_adapter_runs_alone(pytester: pytest.Pytester) -> None:
    (pytester.path / "mine.py").write_text(OUTSIDE)
    assert ids(pytester, "--adapter", "mine.py:Mine") == ["mine-dp2.mb3-gpt-tiny-fp32"]


def test_an_outside_adapter_joins_those_that_are_named(pytester: pytest.Pytester) -> None:
    (pytester.path / "mine.py").write_text(OUTSIDE)
    found = ids(pytester, "--adapters", "ddp", "--adapter", "mine.py:Mine")
    assert sorted(found) == ["ddp-dp2.mb3-gpt-tiny-fp32", "mine-dp2.mb3-gpt-tiny-fp32"]


MOVES = f"import os; os.chdir(os.path.dirname(__file__) + '/elsewhere')\n{OUTSIDE}"


def test_adapters_that_change_the_working_directory_move_nothing(pytester: pytest.Pytester) -> None:
    """Records had come to lie in two folders."""
    (pytester.path / "elsewhere").mkdir()
    (pytester.path / "text.txt").write_text("x" * 100)
    for name in ("first", "second"):
        (pytester.path / f"{name}.py").write_text(MOVES.replace("class Mine", f"class {name.title()}"))
    adapters = ("--adapter", "first.py:First", "--adapter", "second.py:Second")
    chosen = choose(pytester, *adapters, "--corpus", "text.txt", "--results", "found/here")
    assert list(chosen.adapters) == ["first", "second"]
    assert chosen.results == pytester.path / "found" / "here"
    assert [w.corpus for w in chosen.workloads] == ["text.txt"]
    assert Path.cwd() == pytester.path


def test_an_adapter_whose_import_fails_elsewhere_moves_nothing(pytester: pytest.Pytester) -> None:
    (pytester.path / "elsewhere").mkdir()
    (pytester.path / "mine.py").write_text(f"{MOVES}\nraise ValueError('no')\n")
    with pytest.raises(AdapterError, match="ValueError: no"):
        load_adapter("mine.py:Mine")
    assert Path.cwd() == pytester.path


def test_engines_and_what_is_asked_beside_them_move_nothing(pytester: pytest.Pytester) -> None:
    (pytester.path / "elsewhere").mkdir()
    (pytester.path / "mine.py").write_text(MOVES)
    suite = str(ROOT / "suites" / "test_inference.py")
    take_engines(pytester.parseconfig(*CORE, "--adapter", "mine.py:Mine", suite, str(ROOT / "suites")))
    assert Path.cwd() == pytester.path


@pytest.mark.parametrize(
    "targets", [["ddp.py:DDP"], ["mine.py:Mine", "other.py:Mine"]], ids=["a builtin's name", "one name twice"]
)
def test_two_adapters_of_one_name_are_refused(pytester: pytest.Pytester, targets: list[str]) -> None:
    """A case's id would not tell which one ran."""
    (pytester.path / "ddp.py").write_text(OUTSIDE.replace("Mine", "DDP"))
    (pytester.path / "mine.py").write_text(OUTSIDE)
    (pytester.path / "other.py").write_text(OUTSIDE)
    options = [word for target in targets for word in ("--adapter", target)]
    with pytest.raises(pytest.UsageError):
        choose(pytester, "--adapters", "ddp", *options)


def test_an_adapter_that_runs_in_one_process_joins_whatever_the_world(pytester: pytest.Pytester) -> None:
    assert ids(pytester, "--adapters", "single", "--world", "4") == ["single-one.mb3-gpt-tiny-fp32"]

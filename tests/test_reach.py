"""Reach: the rules by which lines, options and mutants of the frameworks are counted, and two real launches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.reach import mutate
from benchmarks.reach.attempts import End, read_readings, tried_before
from benchmarks.reach.launcher import CoveringLauncher
from benchmarks.reach.measured import Measured, added, load
from benchmarks.reach.mutate import Mutation, change_of, install, mutations
from benchmarks.reach.mutating_launcher import MutatingLauncher
from benchmarks.reach.options import SOURCES, Excluded, OptionStatus, excluded, stale, status
from benchmarks.reach.page import page
from benchmarks.reach.runs import SUITES_OF_FOUR, SUITES_OF_TWO
from benchmarks.reach.scope import DISTRIBUTIONS, as_ranges, of_ranges, statements_of
from meshmark.adapter.registry import builtin_adapters
from meshmark.errors import InputError
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.records.record import Status
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload

ROOT = Path(__file__).parent.parent

SOURCE = """
import os
LIMIT = 3
def f(a, b):
    '''Text about cuda.'''
    x = g(a,
          b)
    if x.is_cuda:
        x = x.half()
    else:
        x = x + 1
    torch.cuda.synchronize()
    raise ValueError("this message mentions cuda")
def init_cuda_graphs():
    return 1
"""


def test_only_statements_in_functions_count_once_each_and_accelerators_apart() -> None:
    found = statements_of(SOURCE, "module.py")
    assert found.lines == {6, 8, 9, 11, 12, 13, 15}
    assert found.accelerator == {9, 12, 15}, "the branch, the call and the function by their names; no message"
    assert found.executed({7, 3, 11}) == {6, 11}, "a statement's later lines are its first; module level is none"
    assert statements_of(SOURCE, "nccl_allocator.py").accelerator == found.lines


def test_ranges_hold_lines() -> None:
    lines = {1, 2, 3, 7, 9, 10}
    assert as_ranges(lines) == "1-3,7,9-10"
    assert of_ranges(as_ranges(lines)) == lines
    assert of_ranges("") == set()


# --- Options.


def test_an_option_is_judged_only_by_another_value_than_its_default() -> None:
    assert status("any", "new_option", "True", {}) == (OptionStatus.NOT_ASKED, "")
    assert status("any", "new_option", "True", {"True": ["ddp"]})[0] is OptionStatus.NOT_ASKED
    assert status("any", "new_option", "True", {"True": ["ddp"], "False": ["fsdp2"]}) == (OptionStatus.JUDGED, "False")
    assert status("PyTorch fully_shard", "module", "required", {"Block": ["fsdp2"]})[0] is OptionStatus.NOT_TRAINING


def test_an_entry_for_an_option_that_is_gone_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Excluded(source="PyTorch fully_shard", status=OptionStatus.REFUSED, reason="", options=("gone", "module"))
    monkeypatch.setattr("benchmarks.reach.options.excluded", lambda: [gone])
    assert stale({"PyTorch fully_shard": {"module": "required"}}) == ["PyTorch fully_shard: gone"]


def test_every_exclusion_has_a_reason_and_is_no_judged_or_unjudged_standing() -> None:
    assert all(each.reason and each.status in (OptionStatus.REFUSED, OptionStatus.NOT_TRAINING) for each in excluded())
    names = [(each.source, option) for each in excluded() for option in each.options]
    assert len(names) == len(set(names)), "an option is excluded once"


_INTROSPECT = """
import json
from benchmarks.reach.mutating_launcher import MutatingLauncher
from benchmarks.reach.options import SOURCES
print(json.dumps({source.name: source.options() for source in SOURCES}))
"""


@pytest.mark.slow
def test_the_table_and_the_record_are_in_step_with_the_installed_versions() -> None:
    """In a process of its own, because frameworks change PyTorch when they are imported."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _INTROSPECT]
    told = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    options = json.loads(told.stdout.splitlines()[-1])
    assert not stale(options), "entries of benchmarks/reach/options.toml that the installed versions have not got"
    found = load()
    installed = {name: version(distribution) for name, distribution in DISTRIBUTIONS.items()}
    assert found.versions == installed, "run `make reach` with the installed versions"
    recorded = {source: set(own) for source, own in found.options.items()}
    assert recorded == {source: set(own) for source, own in options.items()}, "python -m benchmarks.reach --summary"


def test_what_is_run_is_built_in() -> None:
    assert not {*SUITES_OF_TWO, *SUITES_OF_FOUR} - set(builtin_adapters())


def test_readings_are_of_survivors() -> None:
    survivors = {each.mutation.name for each in tried_before() if each.end is End.SURVIVED}
    assert not set(read_readings()) - survivors


# --- Mutants.

MODULE = """
def outer(a, b):
    def inner(c):
        return c * 2
    if a == b and b:
        a += 1
    logger.info(a - b)
    send(a, b)
    return inner(a)

class Thing:
    @staticmethod
    def value():
        return outer(3, 3) - 0
"""


def test_every_operator_changes_one_statement_and_messages_are_left_out() -> None:
    found = mutations("module.py", set(range(20)), MODULE)
    changes = {(each.line, each.operator): change_of(each, MODULE) for each in found}
    assert changes[4, "arithmetic"] == ("return c * 2", "return c / 2")
    assert changes[4, "constant"] == ("return c * 2", "return c * 3")
    assert changes[5, "comparison"] == ("if a == b and b:", "if a != b and b:")
    assert changes[5, "boolean"][1] == "if a == b or b:"
    assert changes[5, "condition"][1] == "if not (a == b and b):"
    assert changes[6, "deleted"] == ("a += 1", "...")
    assert changes[8, "swapped"][1] == "send(b, a)"
    assert not [line for line, _ in changes if line == 7], "a message"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in the place of site-packages, with one module that has no calls to undefined names."""
    monkeypatch.setattr(mutate, "SITE", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "reach_sample.py").write_text(MODULE.replace("    logger.info(a - b)\n    send(a, b)\n", ""))
    before = list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = before
    sys.modules.pop("reach_sample", None)


def _doubling() -> Mutation:
    return next(each for each in mutations("reach_sample.py", {4}, None) if each.operator == "constant")


def test_a_module_that_is_there_gets_the_changed_code_in_place(site: Path) -> None:
    import reach_sample  # type: ignore[import-not-found]

    value = reach_sample.Thing.value
    assert value() == 8
    assert install(_doubling())
    assert value() == 12, "held by its class, and nested in a function"
    assert "c * 2" in (site / "reach_sample.py").read_text(), "the file stays as it is"


def test_a_module_that_is_imported_later_is_compiled_changed(site: Path) -> None:
    assert install(_doubling()) == 0
    import reach_sample

    assert reach_sample.Thing.value() == 12


# --- Real launches.


def _fsdp2() -> Case:
    return Case(adapter="fsdp2", workload=workload("gpt-mini"), layout=Layout(dp=2, zero_stage=3, num_micro_batches=2))


@pytest.mark.slow
def test_ranks_tell_lines_and_options_and_a_mutant_of_pytorch_fails(tmp_path: Path) -> None:
    options, case = RunOptions(observed_steps=3, time_limit_seconds=600), _fsdp2()  # coverage slows ranks down
    with Cluster(ClusterSpec()) as cluster:
        covering = CoveringLauncher(cluster)
        runner = Runner(covering, builtin_adapters(), options, tmp_path)
        assert all(verdict.passed for verdict in runner.observe(case).verdicts)
        runner.close()
        lines, values = covering.take()
        covering.close()
        file = "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"
        assert len(lines[file]) > 50
        assert {"True", "False"} & values["PyTorch fully_shard"]["reshard_after_forward"]

        mutating = MutatingLauncher(cluster)
        found = [each for each in mutations(file, lines[file]) if each.operator == "deleted"]
        mutating.mutation = next(each for each in found if "foreach_reduce_scatter_copy_in(" in change_of(each)[0])
        runner = Runner(mutating, builtin_adapters(), options, tmp_path)
        record = runner.observe(case)
        runner.close()
        mutating.close()
    assert mutating.changed and not mutating.complaint
    failing = [verdict.suite for verdict in record.verdicts if not verdict.passed]
    # The memory that nothing fills holds what it held before, which may be no number.
    assert failing == ["equivalence"] or record.outcome.status is Status.NAN, record.outcome.message


def test_a_run_adds_to_what_earlier_ones_reached(measured: Measured) -> None:
    name, file = next((n, f) for n, f in measured.files.items() if len(of_ranges(f.executed)) > 9 and f.accelerator)
    lines = sorted(of_ranges(file.executed))
    less = replace(file, executed=as_ranges({*lines[:5]}), accelerator=as_ranges({*lines[5:7]}))
    source, options = next((s, o) for s, o in measured.options.items() if any(each.values for each in o.values()))
    option = next(each for each in options if options[each].values)
    bare = {**options, option: replace(options[option], values={"other": ["mine"]})}
    found = replace(
        measured, files={**measured.files, name: less}, options={**measured.options, source: bare}, adapters=["mine"]
    )
    both = added(found, measured)
    assert of_ranges(both.files[name].executed) == {*lines} and both.files[name].not_executed == file.not_executed
    assert both.options[source][option].values.keys() >= {"other", *[*options[option].values][:7]}
    assert {"mine", *measured.adapters} == {*both.adapters} and measured.commit in both.earlier
    assert measured.commit in page(both)
    with pytest.raises(InputError, match="is of .*, this run of"):
        added(replace(found, versions={"PyTorch": "1.0"}), measured)


def test_the_record_counts_what_it_says(measured: Measured) -> None:
    assert measured.num_suites and measured.adapters
    for file, own in measured.files.items():
        executed, accelerator = of_ranges(own.executed), of_ranges(own.accelerator)
        assert not executed & accelerator, file
        assert own.not_executed == own.statements - len(executed) - len(accelerator), file
    assert set(measured.options) == {source.name for source in SOURCES}


@pytest.fixture(scope="module")
def measured() -> Measured:
    return load()

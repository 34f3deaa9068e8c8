"""Adapters by name and from outside; whatever is wrong with one is an AdapterError that says so."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from meshmark.adapter.contract import Adapter, Capabilities, Feature, Requirement, Track
from meshmark.adapter.registry import (
    builtin_adapters,
    core_adapters,
    known_adapters,
    load_adapter,
    outside_name,
    select,
)
from meshmark.adapters import ADAPTERS, ROSTER
from meshmark.cli.commands import main
from meshmark.cli.options import chosen_adapters
from meshmark.environment import PACKAGES
from meshmark.errors import AdapterError, InputError, UnknownNameError
from meshmark.models.transformer import Family
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Offload, Recompute, Schedule
from meshmark.spec.precision import Precision
from meshmark.spec.workload import workload
from tests.factories import make_case, make_model, make_workload

ROOT = Path(__file__).parent.parent
GOOD = """
from meshmark.adapter.contract import Adapter, Capabilities

class Mine(Adapter):
    capabilities = Capabilities()
    def build(self, case, context):
        raise NotImplementedError
"""
KNOWN = {"ddp": "meshmark.adapters.ddp:DDP", "fsdp2": "a:B", "fairscale-oss": "c:D", "fairscale-fsdp": "e:F"}
CORE = list(KNOWN)


@pytest.mark.parametrize("name", builtin_adapters())
def test_every_adapter_of_the_checkout_can_be_loaded(name: str) -> None:
    found = load_adapter(builtin_adapters()[name])
    assert issubclass(found, Adapter)
    assert isinstance(found.capabilities, Capabilities)
    assert (found.track is Track.AUTHORS) == name.endswith("-recommended")


def test_the_core_is_what_runs_where_none_is_named() -> None:
    assert chosen_adapters(None, []) == core_adapters() == ADAPTERS
    assert chosen_adapters("*", []) == builtin_adapters() == ADAPTERS | ROSTER
    assert not ADAPTERS.keys() & ROSTER.keys()


def test_a_family_is_one_of_the_core() -> None:
    """Who names `fsdp2` has not asked for every variant of it."""
    known = {"fsdp2": "a:B", "fsdp2-recommended": "a:C", "fsdp2-noreshard": "a:D"}
    assert list(select(["fsdp2"], known, ["fsdp2"])) == ["fsdp2"]
    assert list(select(["fsdp2-recommended"], known, ["fsdp2"])) == ["fsdp2-recommended"]
    assert list(select(["fsdp2*"], known, ["fsdp2"])) == list(known)


def test_a_pattern_behind_an_exclamation_mark_leaves_adapters_out() -> None:
    assert list(select(["*", "!fsdp2*"], KNOWN, CORE)) == [name for name in KNOWN if not name.startswith("fsdp2")]
    assert select(["!fsdp2*", "*"], KNOWN, CORE) == select(["!fsdp2*"], KNOWN, CORE)
    with pytest.raises(UnknownNameError, match="fdsp2"):
        select(["*", "!fdsp2"], KNOWN, CORE)
    with pytest.raises(InputError, match="every adapter is left out"):
        select(["ddp", "!*"], KNOWN, CORE)


def test_an_adapter_is_loaded_from_a_file_once(tmp_path: Path) -> None:
    """Twice the same class: `isinstance` across calls holds."""
    file = tmp_path / "mine.py"
    file.write_text(GOOD)
    found = load_adapter(f"{file}:Mine")
    assert (found.__name__, found.capabilities) == ("Mine", Capabilities())
    assert load_adapter(f"{file}:Mine") is found


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(GOOD)
    assert load_adapter(f"{tmp_path}/a/mine.py:Mine") is not load_adapter(f"{tmp_path}/b/mine.py:Mine")


def test_an_adapter_is_loaded_from_a_file_relative_to_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    assert load_adapter("mine.py:Mine").__name__ == "Mine"


def test_an_adapter_is_loaded_from_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside_package_of_test_registry.py").write_text(GOOD)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_adapter("outside_package_of_test_registry:Mine").__name__ == "Mine"


@pytest.mark.parametrize(
    "source, reason",
    [
        ("import no_such_framework\n", "cannot be imported: ModuleNotFoundError: No module named 'no_such_framework'"),
        ("def broken(:\n", "cannot be imported: SyntaxError"),
        ("1 / 0\n", "cannot be imported: ZeroDivisionError"),
        ("raise SystemExit(3)\n", "cannot be imported: SystemExit"),
        ("Yours = 1\n", "has no Mine; its adapters are: "),
        ("class Mine: pass\n", "Mine is not a subclass of meshmark.adapter.contract.Adapter"),
        ("Mine = 3\n", "Mine is not a subclass of meshmark.adapter.contract.Adapter"),
        ("from meshmark.adapter.contract import Adapter\nclass Mine(Adapter): pass\n", "lacks build, capabilities"),
        (GOOD.replace("def build", "def bild"), "lacks build;"),
        (GOOD.replace("capabilities = Capabilities()", ""), "lacks capabilities;"),
        (GOOD.replace("capabilities = Capabilities()", "capabilities = {'dp'}"), "capabilities"),
    ],
    ids=[
        "missing module",
        "syntax",
        "raises",
        "exits",
        "no such class",
        "no adapter",
        "no class",
        "empty",
        "no build",
        "no capabilities",
        "other capabilities",
    ],
)
def test_a_bad_adapter_is_refused_with_the_reason(tmp_path: Path, source: str, reason: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(AdapterError, match=f"adapter '.*mine.py:Mine'.*{reason}"):
        load_adapter(f"{file}:Mine")


def test_a_file_that_failed_is_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("1 / 0")
    with pytest.raises(AdapterError):
        load_adapter(f"{file}:Mine")
    file.write_text(GOOD)
    importlib.invalidate_caches()
    assert load_adapter(f"{file}:Mine").__name__ == "Mine"


def test_a_missing_file_is_named() -> None:
    with pytest.raises(AdapterError, match="cannot be imported: FileNotFoundError: no Python file at .*nowhere.py"):
        load_adapter("nowhere.py:Mine")


@pytest.mark.parametrize("target", ["mine.py", "mine.py:", ":Mine", "mine.py:My Class", "package.module", ""])
def test_a_target_of_another_form_is_refused_with_the_two_forms(target: str) -> None:
    with pytest.raises(AdapterError, match="expected path/to/file.py:Class or package.module:Class"):
        load_adapter(target)


def test_an_outside_adapter_is_called_by_its_class() -> None:
    assert outside_name("path/to/file.py:MyEngine") == "myengine"


@pytest.mark.parametrize(
    "patterns, chosen",
    [
        (["*"], list(KNOWN)),
        (["fsdp2", "ddp"], ["fsdp2", "ddp"]),
        (["fairscale-*"], ["fairscale-oss", "fairscale-fsdp"]),
        (["*fsdp*", "fsdp2"], ["fsdp2", "fairscale-fsdp"]),
        (["d?p"], ["ddp"]),
        (["fairscale"], ["fairscale-oss", "fairscale-fsdp"]),
    ],
)
def test_adapters_are_selected_by_shell_patterns(patterns: list[str], chosen: list[str]) -> None:
    found = select(patterns, KNOWN, CORE)
    assert sorted(found) == sorted(chosen)
    assert all(found[name] == KNOWN[name] for name in chosen)


def test_an_unknown_adapter_has_near_matches() -> None:
    with pytest.raises(UnknownNameError, match="unknown adapter 'fdsp2': did you mean 'fsdp2'"):
        select(["ddp", "fdsp2"], KNOWN, CORE)


def test_a_pattern_that_matches_nothing_gets_the_list() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown adapter 'z\*': known: ddp, fairscale-fsdp"):
        select(["z*"], KNOWN, CORE)


def test_foreign_packages_called_adapters_and_suites_are_let_be(tmp_path: Path) -> None:
    """One of each name is on the package index. In a process whose `meshmark` stands as it does when installed."""
    (tmp_path / "meshmark").symlink_to(ROOT / "meshmark")
    for name in ("adapters", "suites"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('a stranger')\n")
    path = str(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {path!r}); from meshmark.cli.commands import main; sys.exit(main(['cases']))"
    )
    run = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert "ddp-dp2.mb3-gpt-tiny-fp32" in run.stdout.splitlines()


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Installs a distribution of a name that brings adapters by these entry points."""

    def install(name: str, points: str) -> None:
        info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[meshmark.adapters]\n{points}\n")

    monkeypatch.syspath_prepend(tmp_path)
    return install


def test_an_installed_distribution_brings_its_adapter(
    tmp_path: Path, distribution: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """By name, for the suites, `doctor` and `cases` alike."""
    distribution("meshmark-theirs", "theirs = theirs_of_test_registry:Mine")
    (tmp_path / "theirs_of_test_registry.py").write_text(GOOD)
    assert known_adapters() == {**builtin_adapters(), "theirs": "theirs_of_test_registry:Mine"}
    assert main(["cases", "--adapters", "theirs"]) == 0
    assert "theirs-one.mb3-gpt-tiny-fp32" in capsys.readouterr().out
    assert main(["doctor"]) == 0
    assert re.search(r"^  theirs +one process; fp32; ready$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("points", ["ddp = theirs:Mine", "twice = theirs:Mine"], ids=["built-in", "another's"])
def test_a_name_that_would_stand_for_two_adapters_is_refused(
    distribution: Callable[[str, str], None], points: str, capsys: pytest.CaptureFixture[str]
) -> None:
    distribution("meshmark-theirs", points)
    distribution("meshmark-others", "twice = others:Mine")
    named = r"adapter '(ddp|twice)' of the distribution meshmark-\w+ .*has the name of one of (Meshmark|meshmark-\w+)"
    with pytest.raises(AdapterError, match=f"{named}: rename it in its pyproject.toml, or `pip uninstall meshmark-"):
        known_adapters()
    assert main(["doctor"]) == 2
    assert re.match(f"meshmark: {named}", capsys.readouterr().err)


def test_an_installed_adapter_that_cannot_be_imported_is_told_with_its_distribution(
    distribution: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """`doctor` goes on to the others; and so does a run that asks for others."""
    distribution("meshmark-theirs", "theirs = no_such_module_of_theirs:Mine")
    told = "'no_such_module_of_theirs:Mine' of the distribution meshmark-theirs (entry point of meshmark.adapters)"
    with pytest.raises(AdapterError, match=f"adapter {re.escape(told)} cannot be imported: ModuleNotFoundError"):
        load_adapter(known_adapters()["theirs"])
    assert main(["doctor"]) == 0
    assert f"broken: adapter {told} cannot be imported" in capsys.readouterr().out
    assert main(["cases", "--adapters", "ddp"]) == 0


# What an adapter says it can do, against what is asked of it.

EVERYTHING = Capabilities(
    degrees=frozenset({"dp", "tp", "pp"}),
    zero_stages=frozenset({0, 1, 2, 3}),
    precisions=frozenset(Precision.PRESETS.values()),
)


def test_capabilities_that_suffice_refuse_nothing() -> None:
    dropped = make_workload(model=make_model(tied_embeddings=True, dropout=0.1))
    case = make_case(layout=Layout(dp=2, tp=2, pp=2, zero_stage=3), workload=dropped, precision=Precision.FP16)
    assert EVERYTHING.refusal(case, "cuda", "nccl") is None


@pytest.mark.parametrize(
    "lacking, reason",
    [
        ({"degrees": frozenset({"tp", "pp"})}, "dp=2"),
        ({"degrees": frozenset({"dp"})}, "tp=2, pp=2"),
        ({"combinations": frozenset({frozenset({"dp", "tp"}), frozenset({"dp", "pp"})})}, "dp with tp with pp"),
        ({"zero_stages": frozenset({0})}, "ZeRO stage 3"),
        ({"precisions": frozenset({Precision.FP32})}, "precision bf16"),
        ({"families": frozenset({Family.LLAMA})}, "model family gpt"),
        ({"lacks": {Feature.TIED_EMBEDDINGS: "no way"}}, "tied embeddings (no way)"),
        ({"lacks": {Feature.DROPOUT: "no dice"}}, "dropout (no dice)"),
        ({"devices": frozenset({"cuda"})}, "device cpu"),
    ],
)
def test_each_capability_that_is_lacking_is_named(lacking: dict[str, object], reason: str) -> None:
    workload = make_workload(model=make_model(tied_embeddings=True, dropout=0.1))
    case = make_case(layout=Layout(dp=2, tp=2, pp=2, zero_stage=3), workload=workload, precision=Precision.BF16)
    able = Capabilities(**{**vars(EVERYTHING), **lacking})
    assert able.refusal(case, "cpu", "gloo") == f"ddp does not support {reason}"


@pytest.mark.parametrize(
    "layout, reason",
    [
        (Layout(cp=2), "cp=2"),
        (Layout(pp=2, schedule=Schedule.ONE_F_ONE_B), "schedule 1f1b"),
        (Layout(pp=2, schedule=Schedule.INTERLEAVED, virtual_stages=2), "schedule interleaved, 2 virtual stages"),
        (Layout(tp=2, sequence_parallel=True), "sequence parallelism"),
        (Layout(recompute=Recompute.SELECTIVE), "selective recomputation"),
        (Layout(dp=2, zero_stage=3, offload=Offload.NVME), "offload to nvme"),
    ],
)
def test_an_axis_that_is_not_declared_is_not_run_as_something_else(layout: Layout, reason: str) -> None:
    case = make_case(layout=layout, workload=make_workload(model=make_model(num_layers=4)))
    assert EVERYTHING.refusal(case, "cpu", "gloo") == f"ddp does not support {reason}"


def test_axes_may_be_declared_to_go_together_in_some_ways_alone() -> None:
    able = replace(EVERYTHING, combinations=frozenset({frozenset({"dp", "tp"}), frozenset({"dp", "pp"})}))
    assert able.beyond(Layout(dp=2, pp=2)) == able.beyond(Layout(dp=2, tp=2)) == able.beyond(Layout(tp=2)) == []
    assert able.beyond(Layout(tp=2, pp=2)) == ["tp with pp"]


def test_a_schedule_means_nothing_without_a_pipeline() -> None:
    assert EVERYTHING.beyond(Layout(dp=2, schedule=Schedule.ONE_F_ONE_B)) == []


def test_pipelines_of_cuda_tensors_over_gloo_are_refused_with_the_reason() -> None:
    """gloo's send and recv would hand a device's address to a socket."""
    piped = make_case(layout=Layout(pp=2))
    assert [EVERYTHING.refusal(piped, *where) for where in (("cpu", "gloo"), ("cuda", "nccl"))] == [None, None]
    assert "host memory alone" in (EVERYTHING.refusal(piped, "cuda", "gloo") or "")
    assert EVERYTHING.refusal(make_case(), "cuda", "gloo") is None, "its collectives go by way of the host"


def test_an_adapter_may_say_more_than_its_capabilities() -> None:
    class Picky(Adapter):
        capabilities = EVERYTHING

        @classmethod
        def supports(cls, case: Case, device: str, backend: str) -> str | None:
            return super().supports(case, device, backend) or f"not on {device} over {backend}"

    assert Picky.refusal(make_case(), "cuda", "nccl") == "not on cuda over nccl"
    assert Picky.refusal(make_case(layout=Layout(cp=2)), "cpu", "gloo") == "ddp does not support cp=2"


def test_what_a_pass_needs_is_asked_for_too() -> None:
    class Forgetful(Adapter):
        capabilities = replace(EVERYTHING, lacks={Feature.SAVE: "no disk"})

    assert Forgetful.refusal(make_case(), "cpu", "gloo") is None
    needs = frozenset({Feature.SAVE})
    assert Forgetful.refusal(make_case(), "cpu", "gloo", needs) == "ddp does not support checkpoints (no disk)"
    both = Forgetful.refusal(make_case(layout=Layout(cp=2)), "cpu", "gloo", needs)
    assert both == "ddp does not support cp=2, checkpoints (no disk)"


def test_a_missing_framework_is_a_reason_with_the_pip_command() -> None:
    class Exotic(Adapter):
        capabilities = EVERYTHING
        requires = (
            Requirement(module="json", distribution="json"),
            Requirement(module="no_such_module", distribution="no-such"),
        )

    assert Exotic.refusal(make_case(), "cpu", "gloo") == "no-such is not installed: pip install no-such"


@pytest.mark.parametrize("module, missing", [("json", False), ("json.decoder", False), ("no_such.part", True)])
def test_requirements_see_dotted_names(module: str, missing: bool) -> None:
    assert (Requirement(module=module, distribution="x").missing is not None) == missing


@pytest.mark.parametrize(
    "field, value, expected",
    [
        ("degrees", {"data"}, "degrees holds 'data'; expected dp, tp, pp, cp"),
        ("precisions", {"bf16"}, "precisions holds 'bf16'; expected such as Precision.FP32"),
        ("families", {"mamba"}, "families holds 'mamba'; expected gpt"),
    ],
)
def test_a_capability_that_no_case_has_is_an_error_and_no_skip(field: str, value: set[str], expected: str) -> None:
    with pytest.raises(AdapterError, match=re.escape(expected)):
        Capabilities(**{field: frozenset(value)})


@pytest.mark.parametrize(
    ("name", "layout", "reason"),
    [
        ("deepspeed-recommended", Layout(dp=2, zero_stage=2), "sum the gradients of micro-batches"),
        ("megatron-gpt-recommended", Layout(dp=2, zero_stage=1), "cuts float32 masters by elements of a buffer"),
        ("megatron-gpt-overlap", Layout(dp=2, pp=2, num_micro_batches=4), "bf16 was not tried with pipelines"),
        ("megatron-gpt-overlap", Layout(dp=2), None),
    ],
)
def test_recommended_tracks_say_why_they_refuse_bf16(name: str, layout: Layout, reason: str | None) -> None:
    case = make_case(name, layout, workload=workload("gpt-tiny"), precision=Precision.BF16)
    refusal = load_adapter(builtin_adapters()[name]).refusal(case, "cpu", "gloo")
    assert refusal is None if reason is None else reason in (refusal or "")


def test_records_name_the_version_of_every_framework_that_an_adapter_takes() -> None:
    """A record of another version is not resumed from, nor compared."""
    taken = {
        requirement.distribution
        for target in builtin_adapters().values()
        for requirement in load_adapter(target).requires
    }
    assert taken <= {*PACKAGES}, taken - {*PACKAGES}

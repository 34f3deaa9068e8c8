"""Run a case of an engine, and judge it: one process, one model, every load and clause that the variant is for."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshmark import environment
from meshmark.adapter.registry import inference_adapters
from meshmark.errors import ResultsError
from meshmark.inference.clauses import Setting, judge_engine
from meshmark.inference.contract import EngineOptions
from meshmark.inference.judge import Judge
from meshmark.inference.model import PRECISIONS, shape_of, write_model
from meshmark.inference.process import EngineError, EngineProcess, UnfinishedError, load_engine
from meshmark.launch.folders import means_no_space
from meshmark.records.judged_case import CaseVerdict, JudgedCase, expect_writable, read_newest
from meshmark.spec.known_gap import KnownGap
from meshmark.text import describe_error

VARIANTS: dict[str, Mapping[str, object]] = {
    "plain": {},
    "chunked": {"max_step_tokens": 48},
    "prefix": {"prefix_caching": True},
    "small-cache": {"num_blocks": 12},
    "large-blocks": {"block_size": 64},
    "all-at-once": {"max_step_tokens": 48, "prefix_caching": True, "num_blocks": 12},
}
"""Options of engines that differ from the default, by what they are for."""


@dataclass(frozen=True, kw_only=True)
class InferenceCase:
    """An engine, and what it serves."""

    engine: str
    target: str
    model: str = "llama-tiny"
    precision: str = "fp32"
    variant: str = "plain"

    @property
    def id(self) -> str:
        return f"{self.engine}-{self.variant}-{self.model}-{self.precision}"

    def options(self) -> EngineOptions:
        adapter = load_engine(self.target)
        base = EngineOptions(precision=self.precision, tp=adapter.tp, block_size=adapter.block_sizes[0])
        return dataclasses.replace(base, **VARIANTS[self.variant])  # type: ignore[arg-type]

    def setting(self, num_leak: int = 1000) -> Setting:
        """Return what the engine is judged by."""
        return Setting(
            adapter=load_engine(self.target),
            options=self.options(),
            variant=self.variant,
            shape=shape_of(self.model),
            num_leak=num_leak,
        )


@dataclass(frozen=True, kw_only=True)
class InferenceRecord(JudgedCase):
    """Results for one engine."""

    error: str = ""
    unfinished: str = ""
    """What kept the case from its end and is no fault of the engine, such as a full disk."""

    @property
    def passed(self) -> bool:
        """True if the engine ran to the end and no verdict fails."""
        return not self.error and not self.unfinished and super().passed


def read_inference(path: Path, complaints: list[str] | None = None) -> list[InferenceRecord]:
    """Return the records of a file, of each case the last, with the known gaps that adapters declare now.

    Engines from outside keep the gaps that they declared when they ran. Complaints about lines that cannot be read are
    added to `complaints`; without it, such a line raises `ResultsError`.
    """
    engines = inference_adapters()

    def now(record: InferenceRecord) -> InferenceRecord:
        if not (target := engines.get(record.case["engine"])):
            return record
        gaps = load_engine(target).known_gaps
        verdicts = [with_gap(dataclasses.replace(verdict, gap=""), gaps) for verdict in record.verdicts]
        return dataclasses.replace(record, verdicts=verdicts)

    return read_newest(path, InferenceRecord, complaints, now)


def with_gap(verdict: CaseVerdict, gaps: Sequence[KnownGap]) -> CaseVerdict:
    """Return a verdict with the known gap that covers it. A failure without the gap's symptom is another one."""
    covering = [gap for gap in gaps if gap.clause == verdict.name and (verdict.passed or gap.symptom in verdict.text)]
    return dataclasses.replace(verdict, gap=covering[0].reproducer) if covering else verdict


def run_case(case: InferenceCase, results: Path, num_leak: int = 1000) -> InferenceRecord:
    """Run a case and append its record to `results`/records.jsonl. One clause serves `num_leak` requests.

    Raises `ResultsError` if the record cannot be written.
    """
    expect_writable(results)
    verdicts, versions, error, unfinished = list[CaseVerdict](), dict[str, str](), "", ""
    temporary = Path(tempfile.gettempdir())
    try:
        for verdict in _verdicts(case, results, num_leak, versions):
            verdicts.append(verdict)  # what was judged before an engine fails is kept
    except EngineError as failed:
        error = str(failed)
    except UnfinishedError as failed:
        unfinished = str(failed)
    except Exception as failed:
        if not means_no_space(failed, [temporary, results]):
            raise
        unfinished = describe_error(failed)
    around = environment.describe("cpu", "", 1)
    record = InferenceRecord(
        case={"engine": case.engine, "variant": case.variant, "model": case.model, "precision": case.precision},
        verdicts=verdicts,
        error=error,
        unfinished=unfinished,
        versions=versions,
        commit=around.commit,
        machine=around.machine,
        date=around.date,
    )
    try:
        record.append_to(results)
    except ResultsError as failed:
        ended = error or unfinished or ("right" if record.passed else "wrong")
        raise ResultsError(f"{failed}. {case.id} was: {ended}") from failed
    return record


def _verdicts(case: InferenceCase, results: Path, num_leak: int, versions: dict[str, str]) -> Iterator[CaseVerdict]:
    """Yield the verdicts of a case, and add the versions of the engine's packages to `versions`.

    Each case writes its own model: one that an ended run or older code left would be judged as if it were this one.
    """
    with tempfile.TemporaryDirectory(prefix="meshmark-model-") as name:
        folder = write_model(case.model, Path(name) / case.model, weight_bits=PRECISIONS[case.precision].weight_bits)
        with EngineProcess(case.target, folder, case.options(), results / "logs" / f"{case.id}.log") as engine:
            versions.update(engine.versions)
            judge = Judge(folder, case.precision, load_engine(case.target).cache_rounding)
            setting = case.setting(num_leak)
            for verdict in judge_engine(engine, judge, setting):
                yield with_gap(verdict, setting.adapter.known_gaps)

"""Do engines generate correctly? Log probabilities, tokens, the KV cache and clauses, against float64.

pytest suites/test_inference.py --adapters transformers-generate,vllm --precision fp32,bf16 --results results/inference
"""

import warnings
from pathlib import Path

import pytest

from meshmark.adapter.registry import inference_adapters
from meshmark.errors import ResultsError
from meshmark.inference.process import load_engine
from meshmark.inference.run import VARIANTS, InferenceCase, run_case
from meshmark.pytest_plugin.plugin import StaleGapWarning
from meshmark.pytest_plugin.selection import chosen_engines, chosen_precisions


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "inference_case" not in metafunc.fixturenames:
        return
    chosen = chosen_engines(metafunc.config)
    cases = []
    for name, target in chosen.items():
        adapter = load_engine(target)
        precisions = [each for each in chosen_precisions(metafunc.config) if each in adapter.precisions]
        cases += [
            InferenceCase(engine=name, target=target, precision=precision, variant=variant)
            for precision in precisions
            for variant in VARIANTS
            if variant == "plain" or (adapter.pages and (precision == precisions[0] or variant == "all-at-once"))
        ]
    if not cases:
        known = inference_adapters() | chosen
        engines = "; ".join(f"{name} has {', '.join(load_engine(at).precisions)}" for name, at in known.items())
        given = ",".join(chosen_precisions(metafunc.config))
        raise pytest.Collector.CollectError(f"--adapters names no engine with a precision of {given}: {engines}")
    metafunc.parametrize("inference_case", cases, ids=lambda case: case.id)


def test_inference(inference_case: InferenceCase, pytestconfig: pytest.Config) -> None:
    """Every verdict holds: those of the variant, and in "plain" the clauses."""
    if reason := load_engine(inference_case.target).refusal():
        pytest.skip(reason)
    try:
        record = run_case(inference_case, Path(pytestconfig.getoption("--results")).resolve())
    except ResultsError as error:  # no later case could be recorded
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
    failed = [f"{verdict.name}: {verdict.text}" for verdict in record.verdicts if verdict.fails]
    if record.unfinished:
        text = f"{inference_case.id}: unfinished: {record.unfinished}"
        pytest.fail("\n".join([text, *failed]), pytrace=False)
    assert not record.error, record.error
    assert not failed, "\n".join(failed)
    for verdict in record.verdicts:
        if verdict.gap and verdict.passed:
            text = f"{inference_case.id}, {verdict.name}: passes, take the known gap out of its adapter"
            warnings.warn(text, StaleGapWarning, stacklevel=1)

"""Engines that generate text: the judge sees what is wrong, and a real engine passes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from pathlib import Path

import pytest

from benchmarks.inference_power import failures
from meshmark.adapter.registry import inference_adapters
from meshmark.inference.contract import CacheUse, EngineOptions, Request, Served
from meshmark.inference.judge import Judge, cache_bytes, peak_blocks
from meshmark.inference.model import prompts, shape_of, write_model
from meshmark.inference.process import EngineError, EngineProcess, load_engine
from meshmark.inference.run import InferenceCase, read_inference, run_case, with_gap
from meshmark.inference.serving import serve
from meshmark.records.judged_case import CaseVerdict
from tests.broken.paged import BY_NAME

GENERATE = inference_adapters()["transformers-generate"]
REQUESTS = [Request(name=f"p{len(p)}", prompt=p, max_new_tokens=6) for p in prompts([1, 7, 20])]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama-tiny", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(model: Path) -> Served:
    return serve(load_engine(GENERATE)().build(model, EngineOptions()), REQUESTS)


@pytest.mark.parametrize(
    "engine, variant",
    [("transformers-generate", "plain"), ("paged-tp2", "plain"), ("paged", "prefix"), ("paged", "small-cache")],
)
def test_a_real_engine_in_its_own_process_passes_every_verdict(tmp_path: Path, engine: str, variant: str) -> None:
    case = InferenceCase(engine=engine, target=inference_adapters()[engine], variant=variant)
    record = run_case(case, tmp_path, num_leak=20)
    assert record.passed, record.error or [verdict for verdict in record.verdicts if not verdict.passed]
    if variant == "plain":
        assert len(record.verdicts) >= 12 and record.speed["decode"] > 0
    assert read_inference(tmp_path / "records.jsonl") == [record]


def test_wrong_log_probabilities_tokens_and_results_are_seen(model: Path, served: Served) -> None:
    judge = Judge(model, "fp32")
    noise = judge.noise(REQUESTS, served.completions)
    assert judge.logprobs(REQUESTS, served.completions, noise).passed
    assert judge.greedy(REQUESTS, served.completions, noise).passed
    assert judge.same("again", REQUESTS, (served, served), noise).passed
    off = copy.deepcopy(served)
    off.completions[1].logprobs[3] += 1.5 * noise.tolerance
    found = judge.logprobs(REQUESTS, off.completions, noise)
    assert not found.passed and "token 10 of p7" in found.text
    off.completions[1].logprobs.pop()
    assert not judge.logprobs(REQUESTS, off.completions, noise).passed
    second = copy.deepcopy(served)
    row = judge.truth.logprobs([*REQUESTS[2].prompt, *second.completions[2].tokens[:2]])[-1]
    second.completions[2].tokens[2] = int(row.argsort()[-2])
    assert not judge.greedy(REQUESTS, second.completions, noise).passed
    assert not judge.same("other", REQUESTS, (served, second), noise).passed


def test_wrong_bytes_blocks_and_leaks_are_seen(served: Served) -> None:
    shape, use = shape_of("llama-tiny"), served.cache
    assert use is not None and cache_bytes(served, shape, "fp32", 1, 3 * 25).passed
    more = dataclasses.replace(use, bytes_by_rank=(use.bytes_by_rank[0] + 1,))
    assert not cache_bytes(dataclasses.replace(served, cache=more), shape, "fp32", 1, 3 * 25).passed
    halves = CacheUse(block_size=16, num_blocks=8, bytes_by_rank=(8 * 16 * 512,) * 2)
    assert cache_bytes(dataclasses.replace(served, cache=halves), shape, "fp32", 2, 8).passed
    paged = dataclasses.replace(served, used_blocks=(3, 4, 0), blocks_after=0)
    assert peak_blocks(paged, REQUESTS, 16).passed
    assert not peak_blocks(dataclasses.replace(paged, blocks_after=1), REQUESTS, 16).passed
    assert not peak_blocks(dataclasses.replace(paged, used_blocks=(5,)), REQUESTS, 16).passed


@pytest.mark.parametrize(
    "name, verdict",
    [
        ("PositionsAfterBlock", "log probabilities"),
        ("NotGreedy", "greedy tokens"),
        ("KeyWithoutPast", "prompts that look alike"),
        ("EvictedDraws", "eviction"),
        ("StaleKey", "prefix cache under eviction"),
    ],
)
def test_a_planted_defect_fails_its_verdict_first(model: Path, name: str, verdict: str) -> None:
    """`make inference-power` runs them all."""
    mutant = BY_NAME[name]
    with contextlib.closing(failures(mutant.target, mutant.variant, Judge(model, "fp32"), model)) as failed:
        assert next(failed, None) == verdict


def test_a_known_gap_covers_its_own_symptom_alone() -> None:
    gaps = load_engine(inference_adapters()["vllm"]).known_gaps
    found = CaseVerdict(name="a token that is unknown", passed=False, text="IndexError: index out of range in self")
    assert with_gap(found, gaps).gap == "vllm_unknown_token" and not with_gap(found, gaps).fails
    assert with_gap(dataclasses.replace(found, text="the engine hangs"), gaps).fails
    assert with_gap(dataclasses.replace(found, name="alone"), gaps).fails
    stale = with_gap(dataclasses.replace(found, passed=True), gaps)
    assert stale.gap and stale.passed and not stale.fails


def test_an_engine_that_cannot_be_built_says_why(model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="could not be built: KeyError"):
        EngineProcess(GENERATE, model, EngineOptions(precision="fp7"), tmp_path / "log")


def test_an_engine_without_its_environment_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHMARK_ENVIRONMENTS", str(tmp_path))
    assert "make env NAME=vllm" in (load_engine(inference_adapters()["vllm"]).refusal() or "")

"""Engines that generate text: the judge sees what is wrong, and a real engine passes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import studies.inference
from benchmarks.inference_power import failures
from meshmark.adapter.registry import ENGINE_PRECISIONS, inference_adapters
from meshmark.adapters.paged.engine import PagedEngine
from meshmark.cli.commands import main
from meshmark.inference import quantized, speed
from meshmark.inference.clauses import ClauseContext, judge_engine, parallel_samples, requests_of, seeds
from meshmark.inference.contract import CacheUse, Completion, EngineOptions, Request, Served
from meshmark.inference.judge import Judge, Noise, cache_bytes, chance_of_parting, peak_blocks
from meshmark.inference.local import LocalEngine
from meshmark.inference.model import FOLLOWED, PRECISIONS, Truth, narrowed, prompts, shape_of, write_model
from meshmark.inference.process import EngineError, EngineProcess, load_engine
from meshmark.inference.run import InferenceCase, read_inference, run_case, with_gap
from meshmark.inference.serving import serve
from meshmark.inference.waste import load, measure_sharing, measure_waste, waste_options
from meshmark.launch.processes import process_state
from meshmark.records.judged_case import CaseVerdict
from tests.broken.paged import BY_NAME
from tests.correct.paged import EndsRefusedEngine, ReservingEngine

ROOT = Path(__file__).parents[1]
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
    [
        ("paged", "prefix"),
        ("paged", "small-cache"),
        pytest.param("transformers-generate", "plain", marks=pytest.mark.slow),
        pytest.param("paged-tp2", "plain", marks=pytest.mark.slow),
    ],
)
def test_a_real_engine_in_its_own_process_passes_every_verdict(tmp_path: Path, engine: str, variant: str) -> None:
    case = InferenceCase(engine=engine, target=inference_adapters()[engine], variant=variant)
    record = run_case(case, tmp_path, num_leak=20)
    assert record.passed, record.error or [verdict for verdict in record.verdicts if not verdict.passed]
    if variant == "plain":
        assert len(record.verdicts) >= 12
    assert read_inference(tmp_path / "records.jsonl") == [record]
    assert {path.name for path in tmp_path.iterdir()} == {"records.jsonl", "logs"}


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
    assert "6, then 5 log probabilities" in judge.same("less", REQUESTS, (served, off), noise).text
    off = copy.deepcopy(served)
    off.completions[1].logprobs[3] = float("nan")
    assert not judge.same("nan", REQUESTS, (served, off), noise).passed
    off.completions[1] = dataclasses.replace(served.completions[1], prompt_logprobs=[])
    assert "6 log probabilities of 12 tokens" in judge.logprobs(REQUESTS, off.completions, noise).text
    assert not judge.same("no prompt", REQUESTS, (served, off), noise).passed
    off.completions[1] = Completion(request="p7", error="ValueError: no seeds")
    assert "p7: no tokens; ValueError: no seeds" in judge.logprobs(REQUESTS, off.completions, noise).text
    second = copy.deepcopy(served)
    row = judge.truth.logprobs([*REQUESTS[2].prompt, *second.completions[2].tokens[:2]])[-1]
    second.completions[2].tokens[2] = int(row.argsort()[-2])
    assert not judge.greedy(REQUESTS, second.completions, noise).passed
    assert not judge.same("other", REQUESTS, (served, second), noise).passed


def test_precisions_of_engines_alone_are_those_that_no_training_has() -> None:
    assert set(ENGINE_PRECISIONS) == set(PRECISIONS) - {"fp32", "bf16"}


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
        pytest.param("EvictedDraws", "eviction", marks=pytest.mark.slow),
        pytest.param("StaleKey", "prefix cache under eviction", marks=pytest.mark.slow),
        pytest.param("ChunksTruncate", "log probabilities", marks=pytest.mark.slow),
        pytest.param("ScaleOfNextGroup", "log probabilities", marks=pytest.mark.slow),
        pytest.param("WeightOffset", "log probabilities", marks=pytest.mark.slow),
        pytest.param("BeamsForget", "beams", marks=pytest.mark.slow),
        pytest.param("SeedsEveryToken", "temperature", marks=pytest.mark.slow),
        pytest.param("TemperatureOfFirst", "temperature", marks=pytest.mark.slow),
        pytest.param("TemperatureOfBatch", "temperatures in one batch", marks=pytest.mark.slow),
        pytest.param("DrawsForAll", "temperatures in one batch", marks=pytest.mark.slow),
        pytest.param("TemperatureOfEight", "temperatures in one batch", marks=pytest.mark.slow),
        pytest.param("KeyWithoutLast", "prompts that look alike", marks=pytest.mark.slow),
        pytest.param("KeyOfThirdAlone", "prompts that look alike", marks=pytest.mark.slow),
        pytest.param("OneTooFew", "prompts that look alike", marks=pytest.mark.slow),
        pytest.param("EvictedDrawsOfCopies", "eviction", marks=pytest.mark.slow),
        pytest.param("EvictedScore", "eviction of beams", marks=pytest.mark.slow),
        pytest.param("NoStopOfDraws", "stop tokens of draws", marks=pytest.mark.slow),
        pytest.param("NoStopOfCopies", "stop tokens of draws", marks=pytest.mark.slow),
        pytest.param("NeverInChunks", "tokens of a step", marks=pytest.mark.slow),
        ("NoPromptLogprobs", "log probabilities"),
        pytest.param("SharedSeedBf16", "seeds", marks=pytest.mark.slow),
        pytest.param("SeedAndNumber", "seeds", marks=pytest.mark.slow),
        pytest.param("StreamsChangePlaces", "parallel samples", marks=pytest.mark.slow),
        pytest.param("LowestCode", "log probabilities", marks=pytest.mark.slow),
        ("StopsByFirst", "stop tokens"),
        pytest.param("StopNotAtOnce", "stop tokens", marks=pytest.mark.slow),
        pytest.param("GreedyFromThird", "seeds", marks=pytest.mark.slow),
        pytest.param("NegativeToken", "a token that is unknown", marks=pytest.mark.slow),
        pytest.param("NoRoom", "a prompt that is too long", marks=pytest.mark.slow),
    ],
)
def test_a_planted_defect_fails_its_verdict_first(model: Path, tmp_path: Path, name: str, verdict: str) -> None:
    """`make inference-power` runs them all."""
    mutant, folder = BY_NAME[name], model
    if bits := PRECISIONS[mutant.precision].weight_bits:
        folder = write_model("llama-tiny", tmp_path, weight_bits=bits)
    judge = Judge(folder, mutant.precision)
    with contextlib.closing(failures(mutant.target, mutant.variant, judge, folder, mutant.precision)) as failed:
        assert next(failed, None) == verdict


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers_are_the_weights_rounded_to_their_scales(bits: int) -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    packed = quantized.quantize({"a.q_proj.weight": weight, "norm.weight": weight[0]}, bits, 32)
    assert packed["a.q_proj.weight_packed"].shape == (6, 64 * bits // 32)
    found = quantized.dequantize(packed)
    assert set(found) == {"a.q_proj.weight", "norm.weight"} and torch.equal(found["norm.weight"], weight[0])
    scale = packed["a.q_proj.weight_scale"]
    off = (found["a.q_proj.weight"] - weight).view(*scale.shape, -1).abs() / scale[..., None]
    room = 0.5 + 2 ** (bits - 1) * 2.0**-9  # half a step, and what the largest code is off by a scale of 8 bits
    assert scale.shape == (6, 2 if bits == 4 else 1) and 0.4 < off.max() <= room
    codes = quantized.unpack(packed["a.q_proj.weight_packed"], bits)
    assert bits == 8 or (codes.min(), codes.max()) == (-8, 7)


def test_an_fp8_cache_is_judged_by_the_roundings_that_the_engine_took(model: Path) -> None:
    """A value near the middle of two numbers may be either; one that is not may not."""
    tokens, dtype = prompts([40])[0], torch.float8_e4m3fn
    truth, exact = Truth(model, dtype), Truth(model)
    rows, ties = truth._pass(tokens)
    assert ties and (rows - exact.logprobs(tokens)).abs().max() > 1e-2
    taken = torch.tensor(tokens[1:])[:, None]
    others = (truth._pass(tokens, frozenset([tie]))[0] for tie in ties)
    other = next(found for found in others if (found - rows)[:-1].gather(1, taken).abs().max() > 1e-4)
    followed = truth.logprobs(tokens, other[:-1].gather(1, taken)[:, 0].tolist())
    assert (followed - other).abs().max() < 2e-5
    unrounded = exact.logprobs(tokens)[:-1].gather(1, taken)[:, 0]
    followed = truth.logprobs(tokens, unrounded.tolist())
    assert (followed[:-1].gather(1, taken)[:, 0] - unrounded).abs().max() > 1e-2


def test_beams_of_transformers_are_those_of_float64(model: Path) -> None:
    request = Request(name="beams", prompt=prompts([30], seed=9)[0], max_new_tokens=6, beams=3, wants_prompt=False)
    engine, judge = load_engine(GENERATE)().build(model, EngineOptions()), Judge(model, "fp32")
    done = serve(engine, [REQUESTS[0], request, REQUESTS[1]]).completions
    assert [len(c.tokens) for c in done if c.request != "beams"] == [6, 6]
    beams = [c for c in done if c.request == "beams"]
    noise = judge.noise([request], beams)
    assert judge.beams(request, beams, noise).passed and judge.logprobs([request], beams, noise).passed
    beams[0].tokens, beams[1].tokens = beams[1].tokens, beams[0].tokens
    assert not judge.beams(request, beams, noise).passed


def test_a_rounding_whose_error_would_fail_is_looked_for_however_small_the_noise_is(model: Path) -> None:
    tokens, last = prompts([150])[0], 16
    truth = Truth(model, torch.float8_e4m3fn)
    rows, ties = truth._pass(tokens)
    at, taken = torch.arange(len(tokens) - 1)[-last:], torch.tensor(tokens[-last:])
    others = (truth._pass(tokens, frozenset([tie]))[0][at, taken] for tie in ties)
    told = next(other for other in others if 5e-6 < (other - rows[at, taken]).abs().max() < FOLLOWED)
    noise = Noise(rms=1e-6, largest=1e-6)
    assert noise.unexplained == noise.tolerance < Noise(rms=1e-5, largest=1e-5).unexplained == FOLLOWED
    found = truth.logprobs(tokens, told.tolist(), noise.unexplained)[at, taken]
    assert (found - told).abs().max() <= noise.tolerance


@pytest.mark.parametrize("apart", [30, 45])
def test_several_roundings_that_an_engine_took_are_found_among_many_that_explain_a_little(
    model: Path, apart: int
) -> None:
    """A search that takes each rounding that lowers the errors, not the best, is left with 1e-4."""
    tokens, last = prompts([150])[0], 16
    truth = Truth(model, torch.float8_e4m3fn)
    _, ties = truth._pass(tokens)
    others = frozenset(ties[5::apart])
    assert len(others) > 1
    at, taken = torch.arange(len(tokens) - 1)[-last:], torch.tensor(tokens[-last:])
    told = truth._pass(tokens, others)[0][at, taken]
    assert (truth.logprobs(tokens)[at, taken] - told).abs().max() > 1e-4
    assert (truth.logprobs(tokens, told.tolist())[at, taken] - told).abs().max() <= FOLLOWED


def test_waste_and_sharing_of_blocks_are_their_closed_forms(tmp_path: Path) -> None:
    folder, adapter = write_model("llama-tiny-2k", tmp_path), load_engine(inference_adapters()["paged"])()
    plain, prefix = (LocalEngine(adapter.build(folder, waste_options(16, caching))) for caching in (False, True))
    requests, shape = load(6, scale=0.2), shape_of("llama-tiny-2k")
    served = plain.serve(requests)
    waste = measure_waste(served, 16, shape)
    # After step t, of requests that all came at once, each that has not ended holds its prompt and t - 1 more tokens.
    held = [
        [len(r.prompt) + t - 1 for r in requests if t < r.max_new_tokens]
        for t in range(1, max(r.max_new_tokens for r in requests) + 1)
    ]
    blocks = sum(-(-tokens // 16) for live in held for tokens in live) / len(held)
    assert waste.reserved_bytes == pytest.approx(blocks * 16 * shape.token_bytes("fp32"))
    assert waste.used_bytes == pytest.approx(sum(map(sum, held)) / len(held) * shape.token_bytes("fp32"))
    assert 0 < waste.waste < waste.contiguous_waste
    leaking = dataclasses.replace(served, used_blocks=(*served.used_blocks[:-1], 1))
    with pytest.raises(ValueError, match="1 blocks of 16 in use after step"):
        measure_waste(leaking, 16, shape)
    for found in measure_sharing(plain, prefix, 16):
        assert found.blocks == found.closed_form < found.unshared


def test_the_page_names_engines_that_were_not_judged() -> None:
    records = read_inference(studies.inference.KEPT)
    assert "Not judged" not in studies.inference.page(records)
    less = [record for record in records if not record.case["engine"].startswith("vllm")]
    said = "**Not judged: vllm, vllm-tp2.** They could not run where this page was made. It takes `make env NAME=vllm`"
    assert said in studies.inference.page(less)


def test_a_known_gap_covers_its_own_symptom_alone() -> None:
    gaps = load_engine(inference_adapters()["vllm"]).known_gaps
    found = CaseVerdict(name="a token that is unknown", passed=False, text="IndexError: index out of range in self")
    assert with_gap(found, gaps).gap == "vllm_unknown_token" and not with_gap(found, gaps).fails
    assert with_gap(dataclasses.replace(found, text="the engine hangs"), gaps).fails
    assert with_gap(dataclasses.replace(found, name="alone"), gaps).fails
    stale = with_gap(dataclasses.replace(found, passed=True), gaps)
    assert stale.gap and stale.passed and not stale.fails


@pytest.mark.slow
def test_an_engine_that_ended_says_so_when_it_is_asked_again(model: Path, tmp_path: Path) -> None:
    fatal = [Request(name="fatal", prompt=(5,), max_new_tokens=2, temperature=1.0, seed=2**70)]
    with EngineProcess(GENERATE, model, EngineOptions(), tmp_path / "log") as engine:
        with pytest.raises(EngineError, match="the engine failed: ValueError"):
            engine.serve(fatal)
        engine._process.wait(20)
        with pytest.raises(EngineError, match="the engine's process ended"):
            engine.serve(REQUESTS)


def test_blocks_that_evicted_sequences_keep_are_left_over_and_lack_for_beams(model: Path) -> None:
    mutant = BY_NAME["EvictedLeak"]
    assert list(failures(mutant.target, mutant.variant, Judge(model, "fp32"), model)) == [
        "eviction of beams",
        "blocks left over",
    ]


def test_an_engine_that_refuses_what_is_not_greedy_is_judged_to_the_end(model: Path) -> None:
    class Greedy(PagedEngine):
        def submit(self, request: Request) -> None:
            if request.temperature or request.num_sequences > 1:
                raise ValueError("no draws, no copies")
            super().submit(request)

    setting = InferenceCase(engine="paged", target=inference_adapters()["paged"]).setting(num_leak=20)
    with LocalEngine(Greedy(model, EngineOptions())) as engine:
        found = {verdict.name: verdict for verdict in judge_engine(engine, Judge(model, "fp32"), setting)}
    failed = {name for name, verdict in found.items() if not verdict.passed}
    assert failed == {
        "seeds",
        "temperature",
        "temperatures in one batch",
        "parallel samples",
        "stop tokens of draws",
        "beams",
    }
    assert "no draws, no copies" in found["temperature"].text
    assert "a token that is unknown" in found


@pytest.mark.slow
@pytest.mark.parametrize("target", ["RoundsByBatch", "RoundsByBatchInverseCdf"])
def test_an_engine_that_rounds_by_its_batch_is_not_accused(model: Path, target: str) -> None:
    """Its drawn tokens part in bf16. `make inference-power` serves many models with it."""
    judge, parted = Judge(model, "bf16"), 0.0
    case = InferenceCase(engine="paged", target=f"tests.correct.paged:{target}", precision="bf16")
    with LocalEngine(load_engine(case.target)().build(model, case.options())) as engine:
        served = engine.serve(requests_of())
        noise = judge.noise(requests_of(), served.completions)
        context = ClauseContext(engine=engine, judge=judge, setting=case.setting(), served=served, noise=noise)
        for found in (seeds(context), parallel_samples(context)):
            assert found.passed, found.text
            parted += found.numbers["tokens"]
    assert parted > 0


def test_drawn_tokens_of_fp32_part_in_no_run_that_passes(model: Path) -> None:
    judge, options = Judge(model, "fp32"), EngineOptions()
    requests = [
        Request(name=f"d{i}", prompt=p, max_new_tokens=8, temperature=1.0, seed=i)
        for i, p in enumerate(prompts([5] * 16))
    ]
    with LocalEngine(PagedEngine(model, options)) as engine:
        served = engine.serve(requests)
        noise = judge.noise(requests, served.completions)
        other = engine.serve([dataclasses.replace(requests[3], seed=99)])
    one = copy.deepcopy(served)
    one.completions[3] = other.completions[0]
    assert judge.same("again", requests, (served, served), noise).passed
    found = judge.same("again", requests, (served, one), noise)
    assert not found.passed and "1 of 16 drawn sequences part" in found.text


def test_the_chance_of_parting_is_how_often_the_same_random_numbers_draw_two_tokens() -> None:
    drawn = torch.Generator().manual_seed(0)
    one = torch.randn(40, generator=drawn, dtype=torch.float64)
    other = one + 0.05 * torch.randn(40, generator=drawn, dtype=torch.float64)
    chance, p, q = chance_of_parting(one, other), one.softmax(-1), other.softmax(-1)
    numbers = torch.rand(200_000, generator=drawn, dtype=torch.float64)
    side_by_side = (torch.searchsorted(p.cumsum(0), numbers) != torch.searchsorted(q.cumsum(0), numbers)).double()
    assert float(side_by_side.mean()) == pytest.approx(chance, rel=0.05)
    race = torch.empty(20_000, 40, dtype=torch.float64).exponential_(generator=drawn)
    assert 0 < float(((p / race).argmax(-1) != (q / race).argmax(-1)).double().mean()) < chance
    assert chance_of_parting(one, one) < 1e-12


@pytest.mark.slow
def test_a_refusal_by_an_error_at_the_end_is_one(model: Path) -> None:
    case, judge = InferenceCase(engine="paged", target=inference_adapters()["paged"]), Judge(model, "fp32")
    with LocalEngine(EndsRefusedEngine(model, EngineOptions())) as engine:
        found = {verdict.name: verdict for verdict in judge_engine(engine, judge, case.setting(num_leak=20))}
    assert all(verdict.passed for verdict in found.values()), found
    assert "negative token: refused" in found["a token that is unknown"].text


@pytest.mark.slow
def test_an_engine_that_never_evicts_is_right_and_its_eviction_not_judged(model: Path) -> None:
    case = InferenceCase(engine="paged", target=inference_adapters()["paged"], variant="small-cache")
    with LocalEngine(ReservingEngine(model, case.options())) as engine:
        found = {v.name: v for v in judge_engine(engine, Judge(model, "fp32"), case.setting(num_leak=20))}
    assert all(verdict.passed for verdict in found.values()), found
    assert found["eviction"].numbers["evicted"] == 0 and "eviction is not judged" in found["eviction"].text


def test_stop_tokens_have_room_for_near_ties(model: Path, served: Served) -> None:
    """A run with stop tokens may take another near tie, and then ends by its own tokens."""
    judge, requests = Judge(model, "bf16"), [dataclasses.replace(REQUESTS[2], stop=(7,))]
    noise = judge.noise(REQUESTS, served.completions)
    one = dataclasses.replace(served, completions=[served.completions[2]])
    other = copy.deepcopy(one)
    row = judge.truth.logprobs([*REQUESTS[2].prompt, *one.completions[0].tokens[:2]])[-1]
    near = int(row.argsort()[-2])
    behind = float(row.max() - row[near])
    with LocalEngine(PagedEngine(model, EngineOptions(precision="bf16"))) as engine:
        begun = dataclasses.replace(REQUESTS[2], prompt=(*REQUESTS[2].prompt, *one.completions[0].tokens[:2], near))
        (rest,) = engine.serve([dataclasses.replace(begun, max_new_tokens=3)]).completions
    other.completions[0].tokens[2:] = [near, *rest.tokens]
    told = judge.truth.logprobs([*REQUESTS[2].prompt, *other.completions[0].tokens])[19:-1]
    other.completions[0].logprobs = [float(r[t]) for r, t in zip(told, other.completions[0].tokens, strict=True)]
    wide = dataclasses.replace(noise, largest=behind)
    assert judge.same("near", requests, (one, other), wide).passed
    assert not judge.same("far", requests, (one, other), dataclasses.replace(noise, largest=behind / 10)).passed


def test_keys_and_values_towards_zero_are_the_next_smaller_number() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, nearest = narrowed(x, torch.float8_e4m3fn, "towards zero"), narrowed(x, torch.float8_e4m3fn)
    assert (found.abs() <= x.abs()).all() and (found != nearest).any()
    assert torch.equal(found.to(torch.float8_e4m3fn).double(), found)  # numbers of the format
    between = (nearest - x).abs() < (found - x).abs()
    assert torch.equal(between, found != nearest)


@pytest.mark.slow
def test_an_engine_that_answers_too_late_is_ended(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its late answer is not taken for that of the next requests."""
    with EngineProcess(GENERATE, model, EngineOptions(), tmp_path / "log") as engine:
        monkeypatch.setattr("meshmark.inference.process.SERVE_SECONDS", 0.01)
        with pytest.raises(EngineError, match=r"did not answer within .* and was ended"):
            engine.serve([dataclasses.replace(REQUESTS[0], max_new_tokens=100)])
        monkeypatch.undo()
        with pytest.raises(EngineError, match="the engine's process ended"):
            engine.serve(REQUESTS)


def test_an_engine_that_cannot_be_built_says_why(model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="could not be built: KeyError"):
        EngineProcess(GENERATE, model, EngineOptions(precision="fp7"), tmp_path / "log")


def test_an_engine_without_its_environment_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHMARK_ENVIRONMENTS", str(tmp_path))
    assert "make env NAME=vllm" in (load_engine(inference_adapters()["vllm"]).refusal() or "")


@pytest.mark.slow
def test_an_engine_from_outside_is_judged_and_reported_in_any_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text((ROOT / "examples" / "generate.py").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "--pyargs", "meshmark.suites.test_inference"]
    options = ["--adapter", "mine.py:Generate", "--results", "out"]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
    assert main(["report", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.md").read_text()
    assert "**1 of 1 case is right**" in page and "| generate | plain     | fp32        | off by" in page


@pytest.mark.slow
def test_a_report_tells_records_of_engines_from_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Engines have a page of their own beside that of training; of smaller models the command is named."""
    records = ROOT / "reports" / "records"
    engines, training = records / "inference.jsonl", ROOT / "baselines" / "epyc-2cpu" / "records.jsonl"
    (tmp_path / "records.jsonl").write_text(engines.read_text() + training.read_text())
    assert main(["report", str(tmp_path)]) == 0
    assert {"report.md", "report-inference.md"} <= {path.name for path in tmp_path.iterdir()}
    assert "left out" not in capsys.readouterr().err
    assert main(["report", str(engines), "-o", str(tmp_path / "page.html")]) == 2
    assert "name a .md file" in capsys.readouterr().err
    assert main(["report", str(records / "compression.jsonl")]) == 2
    assert "make compression" in capsys.readouterr().err
    assert main(["show", "paged", str(engines)]) != 0
    assert "`meshmark report DIR` reads it" in capsys.readouterr().err


@pytest.mark.slow
def test_engines_are_timed_in_rounds_while_the_others_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(speed, "WARM_UP", 0)
    options = ["--adapters", "paged", "--adapter", str(ROOT / "examples" / "generate.py:Generate")]
    assert speed.main([*options, "--precision", "fp32", "--rounds", "3", "-o", "speed.jsonl"]) == 0
    found = speed.read_speeds(tmp_path / "speed.jsonl")
    assert [each.engine for each in found] == ["transformers-generate", "paged", "generate"]
    for each in found:
        assert len(each.prefill) == len(each.decode) == len(each.first_token) == 3
        assert min(each.prefill) > min(each.decode) > 0
    base, paged, uncached = speed.ratios(found)
    assert base["decode"] == (pytest.approx(1.0), pytest.approx(0.0)) and paged["decode"][1] > 0
    assert uncached["decode"][0] < 1  # it computes every sequence anew for each token
    assert "generate fp32: " in capsys.readouterr().out
    assert speed.main(["--adapters", "paged", "--precision", "bf16x"]) == 2


@pytest.mark.slow
def test_an_engine_that_is_paused_answers_after_it_goes_on(model: Path, tmp_path: Path) -> None:
    with EngineProcess(GENERATE, model, EngineOptions(), tmp_path / "log") as engine:
        engine.pause()
        state = Path(f"/proc/{engine._process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state == "T"
        engine.resume()
        assert engine.serve(REQUESTS[:1]).completions[0].tokens


def _collected(suite: str, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", f"suites/test_{suite}.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "suite, options, said",
    [
        ("inference", ["--adapters", "ddp"], "unknown engine 'ddp': known: paged, paged-tp2, transformers-generate"),
        ("inference", ["--adapters", "transformers-generate", "--precision", "int4-weights"], "no engine with a"),
        ("equivalence", ["--adapters", "vllm"], "unknown adapter 'vllm'"),
        ("equivalence", ["--adapter", "examples/generate.py:Generate"], "is judged by pytest --pyargs"),
        ("inference", ["--adapter", "examples/generate.py:Nobody"], "cannot be imported: AttributeError"),
        ("inference", ["--adapter", "meshmark.adapters.paged:Paged"], "would stand for two engines"),
        ("equivalence", ["--precision", "int8-weights"], "unknown precision 'int8-weights'"),
    ],
)
def test_engines_and_their_precisions_are_never_replaced_by_others(suite: str, options: list[str], said: str) -> None:
    status, output = _collected(suite, *options)
    assert status and said in output


@pytest.mark.slow
def test_each_engine_has_its_variants_in_the_first_chosen_precision_that_it_has() -> None:
    status, output = _collected("inference", "--adapters", "paged, vllm", "--precision", "int8-weights, bf16")
    assert not status and "[paged-chunked-llama-tiny-int8-weights]" in output
    assert "[paged-all-at-once-llama-tiny-bf16]" in output  # in every precision
    assert "[vllm-chunked-llama-tiny-bf16]" in output and "[paged-chunked-llama-tiny-bf16]" not in output


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, complaint",
    [
        (["--adapters", "vllmm"], "unknown engine 'vllmm': did you mean 'vllm'"),
        (["--precision", "fp7"], "unknown precision 'fp7'"),
        (["--adapters", "paged-tp2", "--world", "3"], "an engine has the ranks of its name"),
        (["--adapter", "meshmark.adapters.ddp:DDP"], "expected a subclass of meshmark.inference.contract"),
    ],
)
def test_what_the_suite_cannot_heed_is_refused(options: list[str], complaint: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:benchmark",
        "suites/test_inference.py",
        "--collect-only",
        *options,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and complaint in done.stderr, done.stderr


def test_an_engine_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Also while it hangs in a step, where it reads nothing, and with what it has put into a session of its own."""
    (tmp_path / "hangs.py").write_text(
        "import os, subprocess, time\n"
        "from meshmark.inference.contract import InferenceAdapter\n"
        "class Hangs(InferenceAdapter):\n"
        "    precisions = ('fp32',)\n"
        "    def build(self, model, options):\n"
        "        server = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "        (model / 'engine.part').write_text(f'{os.getpid()} {server.pid}')\n"
        "        (model / 'engine.part').rename(model / 'engine')\n"
        "        time.sleep(600)\n"
    )
    (tmp_path / "parent.py").write_text(
        "from pathlib import Path\n"
        "from meshmark.inference.contract import EngineOptions\n"
        "from meshmark.inference.process import EngineProcess\n"
        "EngineProcess('hangs.py:Hangs', Path('.').resolve(), EngineOptions(), Path('log'))\n"
    )
    parent = subprocess.Popen([sys.executable, "parent.py"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    _until((tmp_path / "engine").exists)
    started = [Path("/proc") / pid for pid in (tmp_path / "engine").read_text().split()]
    assert all(process.exists() for process in started)
    parent.kill()
    parent.wait()
    _until(lambda: not any(process.exists() for process in started))


def test_what_an_engine_left_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(
        "import subprocess\n"
        "from meshmark.inference.contract import InferenceAdapter\n"
        "class Leaves(InferenceAdapter):\n"
        "    precisions = ('fp32',)\n"
        "    def build(self, model, options):\n"
        "        server = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "        (model / 'server').write_text(str(server.pid))\n"
        "        raise RuntimeError('planted')\n"
    )
    with pytest.raises(EngineError, match="planted"):
        EngineProcess(f"{tmp_path}/leaves.py:Leaves", tmp_path, EngineOptions(), tmp_path / "log")
    assert process_state(int((tmp_path / "server").read_text())) in ("", "Z")


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)

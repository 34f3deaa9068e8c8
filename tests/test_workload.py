"""Training problems by name."""

from __future__ import annotations

import dataclasses

import pytest

from meshmark.errors import InputError, UnknownNameError
from meshmark.models.config import Dataset, digit_models
from meshmark.models.mixture import MIXTURE_MINI
from meshmark.models.transformer import MODELS
from meshmark.spec.workload import WORKLOADS, workload
from tests.factories import make_model, make_workload


def test_presets_stand_under_their_own_names_and_name_known_models() -> None:
    assert {"gpt-tiny", "llama-tiny", "gpt-1.3b", "resnet-digits", "vit-digits-bn"} <= set(WORKLOADS)
    known = {**MODELS, MIXTURE_MINI.name: MIXTURE_MINI}
    for name, preset in WORKLOADS.items():
        assert preset.name == name
        assert preset.model == (known | digit_models())[preset.model.name if preset.model.name in known else name]


def test_a_preset_is_changed_by_copy() -> None:
    changed = dataclasses.replace(workload("gpt-tiny"), seed=7)
    assert (changed.seed, WORKLOADS["gpt-tiny"].seed) == (7, 0)


def test_an_unknown_workload_has_near_matches() -> None:
    with pytest.raises(UnknownNameError, match="unknown workload 'gpt-tny': did you mean 'gpt-tiny'"):
        workload("gpt-tny")


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(InputError, match="'mini': global_batch is 0, expected at least 1"):
        make_workload(global_batch=0)


def test_an_encoder_is_given_hidden_tokens_and_a_decoder_the_next_ones() -> None:
    """Who sees the next token has nothing to learn."""
    for name, dataset in (("gpt-mini", Dataset.MASKED_TEXT), ("bert-mini", Dataset.TEXT)):
        with pytest.raises(InputError, match=f"data set is {dataset}: next tokens take a causal model"):
            dataclasses.replace(WORKLOADS[name], dataset=dataset)


def test_tokens_of_a_step_are_all_positions() -> None:
    assert make_workload(global_batch=6, model=make_model(seq_len=10), masked=True).tokens_per_step == 60


def test_clipping_is_active_in_the_tiny_workloads() -> None:
    """The first gradient is longer than the clip norm, so a wrong norm changes the parameters."""
    from meshmark.judge.deviation import global_norm
    from meshmark.judge.truth import exact_gradients, initial_values
    from meshmark.reference.data import make_batch

    for name in ("gpt-tiny", "llama-tiny", *(n for n in WORKLOADS if "digits" in n)):
        tiny = WORKLOADS[name]
        gradients = exact_gradients(tiny, initial_values(tiny), make_batch(tiny, 0)).gradients
        assert tiny.optimizer.clip_norm is not None
        assert global_norm(gradients) > 2 * tiny.optimizer.clip_norm

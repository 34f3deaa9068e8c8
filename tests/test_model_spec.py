"""Parameter counts in closed form, against the real modules and against publications; impossible dimensions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from meshmark.errors import InputError, UnknownNameError
from meshmark.models.module import parameter_shapes
from meshmark.models.transformer import MODELS, Family, ModelSpec, model_spec
from meshmark.models.transformer.module import Transformer
from tests.factories import make_model

VARIANTS = {
    "gpt": make_model(),
    "gpt tied": make_model(tied_embeddings=True),
    "gpt grouped queries": make_model(num_kv_heads=2),
    "llama": make_model(family=Family.LLAMA),
    "llama tied": make_model(family=Family.LLAMA, tied_embeddings=True),
    "llama one kv head": make_model(family=Family.LLAMA, num_kv_heads=1),
    **{name: MODELS[name] for name in ("gpt-tiny", "llama-tiny", "gpt2-124m", "gpt-1.3b", "gpt3-350m", "llama-7b")},
}


@pytest.mark.parametrize("spec", VARIANTS.values(), ids=VARIANTS)
def test_the_closed_form_counts_what_the_modules_hold(spec: ModelSpec) -> None:
    assert spec.num_parameters == sum(math.prod(shape) for shape in parameter_shapes(spec).values())


@pytest.mark.parametrize("spec", VARIANTS.values(), ids=VARIANTS)
def test_the_parts_of_the_closed_form_are_the_layers(spec: ModelSpec) -> None:
    """A planner that splits a model into stages adds these up."""
    import torch

    def count(layer: int) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in Transformer(spec, [layer]).parameters())

    own_output = 0 if not spec.tied_embeddings else spec.vocab_size * spec.hidden  # alone, a tied head holds a copy
    assert count(0) == spec.embedding_parameters
    assert count(1) == spec.block_parameters
    assert count(spec.num_layers + 1) == spec.head_parameters + own_output


@pytest.mark.parametrize(
    "name, published",
    [
        ("gpt3-125m", 125e6),
        ("gpt3-350m", 356e6),
        ("gpt3-175b", 175e9),
        ("gpt2-124m", 124e6),
        ("llama-7b", 6.7e9),
        ("llama-13b", 13.0e9),
        ("llama-33b", 32.5e9),
        ("llama-65b", 65.2e9),
    ],
)
def test_presets_have_the_published_size(name: str, published: float) -> None:
    """arXiv:2005.14165 table 2.1 (where 350M stands for 356M), arXiv:2302.13971 table 2."""
    assert MODELS[name].num_parameters == pytest.approx(published, rel=0.01)


def test_presets_for_the_cpu_are_small() -> None:
    assert MODELS["gpt-tiny"].num_parameters < 1e6
    assert MODELS["llama-tiny"].num_parameters < 1e6


def test_a_tied_head_saves_exactly_the_embedding() -> None:
    saved = make_model().num_parameters - make_model(tied_embeddings=True).num_parameters
    assert saved == 256 * 16


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hidden": 18}, ["hidden 18", "not divisible", "num_heads 4"]),
        ({"num_kv_heads": 3}, ["num_heads 4", "not divisible", "num_kv_heads 3"]),
        ({"num_layers": 0}, ["num_layers is 0", "at least 1"]),
        ({"vocab_size": -5}, ["vocab_size is -5", "at least 1"]),
        ({"seq_len": 0}, ["seq_len is 0", "at least 1"]),
        ({"dropout": 1.0}, ["dropout is 1.0", "0 <= dropout < 1"]),
        ({"dropout": -0.1}, ["dropout is -0.1", "0 <= dropout < 1"]),
        ({"family": Family.LLAMA, "hidden": 12}, ["even head_dim", "got 3"]),
    ],
)
def test_impossible_dimensions_are_refused_with_got_and_expected(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        make_model(**changes)
    for word in ["'mini'", *words]:
        assert word in str(caught.value)


def test_an_unknown_model_has_near_matches() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown model 'gpt3-175': did you mean 'gpt3-175b'"):
        model_spec("gpt3-175")


def test_an_unknown_model_far_from_all_gets_the_list() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown model 'zzz': known: bert-mini, gpt-1.3b, gpt-mini, "):
        model_spec("zzz")


def test_a_preset_is_changed_field_by_field_and_checked_again() -> None:
    assert replace(model_spec("gpt-tiny"), num_layers=2).num_layers == 2
    assert MODELS["gpt-tiny"].num_layers == 4
    with pytest.raises(InputError, match="num_kv_heads 3"):
        replace(model_spec("gpt-tiny"), num_kv_heads=3)

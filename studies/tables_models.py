"""Published models: their parameters beside what their dimensions give."""

from __future__ import annotations

from meshmark.models.transformer import ModelSpec, gpt, model_spec
from meshmark.plan.rows import Row, number
from studies.papers import paper
from studies.table import Cell, Table

GB = 1e9


def transformer_parameters(row: Row) -> Cell | None:
    if row["model"] != "Transformer-L":
        return None
    d, f, layers, vocab = (number(row, c) for c in ("d_model", "d_ff", "layers_L", "vocab"))
    computed = layers * (4 * d * d + 2 * d * f) + 2 * vocab * d
    return Cell(published=number(row, "params") / 1e6, computed=computed / 1e6)


def llama_parameters() -> Table:
    """Yuan's estimate 12Lh^2 + 2Vh."""
    names = {
        "LLaMA-6.7B": "llama-7b",
        "LLaMA-13.0B": "llama-13b",
        "LLaMA-32.5B": "llama-33b",
        "LLaMA-65.2B": "llama-65b",
    }
    rows = []
    for row in paper("llama_param_estimates"):
        spec = model_spec(names[row["model"]])
        exact = spec.num_parameters / GB
        estimate = (12 * spec.num_layers * spec.hidden**2 + 2 * spec.vocab_size * spec.hidden) / GB
        cells = (
            Cell(published=number(row, "published_params_billion"), computed=exact),
            Cell(published=number(row, "estimated_params") / GB, computed=estimate),
        )
        rows.append(((row["model"],), cells))
    return Table(
        title="LLaMA parameters",
        source="Yuan's deck; arXiv:2302.13971 table 2",
        formula="all weights of the preset; the deck's 12 L h^2 + 2 V h",
        labels=("model",),
        columns=("published 1e9", "deck's estimate 1e9"),
        rows=rows,
    )


def gpt3_models() -> Table:
    """GPT-3 table 2.1."""
    names = ("gpt3-125m", "gpt3-350m", "gpt3-760m", "gpt3-1.3b", "gpt3-2.7b", "gpt3-6.7b", "gpt3-13b", "gpt3-175b")
    rows = []
    for row, name in zip(paper("gpt3_table2_1_models"), names, strict=True):
        spec = model_spec(name)
        width, heads = number(row, "d_model"), number(row, "heads")
        flag = (
            ""
            if width == spec.hidden
            else f"d_model {width:g} is not {heads:g} heads of {row['d_head']}: {spec.hidden}"
        )
        inner = heads * number(row, "d_head")
        other = (
            "" if inner == width or flag else f"{heads:g} heads of {row['d_head']} are {inner:g}, not d_model {width:g}"
        )
        cells = (
            Cell(published=number(row, "params_billion"), computed=spec.num_parameters / GB),
            Cell(published=width, computed=float(spec.hidden), flagged=flag),
            Cell(published=heads, computed=float(spec.num_heads), flagged=other),
        )
        rows.append(((row["model"],), cells))
    return Table(
        title="GPT-3 table 2.1",
        source="arXiv:2005.14165 table 2.1; Yuan's deck",
        formula="all weights of the preset, the head tied",
        labels=("model",),
        columns=("parameters 1e9", "d_model", "heads"),
        rows=rows,
    )


def llama_models() -> Table:
    """LLaMA table 2."""
    names = ("llama-7b", "llama-13b", "llama-33b", "llama-65b")
    rows = []
    for row, name in zip(paper("llama_table2_models"), names, strict=True):
        spec = model_spec(name)
        fields = (
            ("params_billion", spec.num_parameters / GB),
            ("d_model", spec.hidden),
            ("heads", spec.num_heads),
            ("layers", spec.num_layers),
        )
        cells = tuple(Cell(published=number(row, f), computed=float(v)) for f, v in fields)
        rows.append(((name,), cells))
    return Table(
        title="LLaMA table 2",
        source="arXiv:2302.13971 table 2; Yuan's deck",
        formula="the presets",
        labels=("model",),
        columns=("parameters 1e9", "d_model", "heads", "layers"),
        rows=rows,
    )


def megatron2019() -> Table:
    """Megatron 2019 table 1."""
    rows = []
    for row in paper("megatron2019_table1_config"):
        spec = gpt_row(row)
        cell = Cell(published=number(row, "params_billion"), computed=spec.num_parameters / GB)
        gpus = Cell(
            published=number(row, "model_plus_data_parallel_gpus"), computed=number(row, "tp") * number(row, "dp")
        )
        rows.append(((row["hidden"], row["layers"], row["tp"]), (cell, gpus)))
    return Table(
        title="Megatron-LM 2019 table 1",
        source="arXiv:1909.08053 table 1; Rostami's deck",
        formula="all weights; tp x dp",
        labels=("hidden", "layers", "tp"),
        columns=("parameters 1e9", "gpus"),
        rows=rows,
    )


def gpt_row(row: Row) -> ModelSpec:
    return gpt(
        f"h{row['hidden']}",
        int(row["layers"]),
        int(row["hidden"]),
        int(row["heads"]),
        vocab_size=int(row["vocab_padded"]),
        seq_len=int(row["seq_len"]),
        tied_embeddings=True,
    )

"""`meshmark predict` reads every field of a row's layout, and nothing that was measured."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from meshmark.cli.commands import main
from meshmark.errors import InputError
from meshmark.plan.frameworks import FRAMEWORKS, default_framework, narrowed_on
from meshmark.plan.layout_columns import OTHER_NAMES, PASSED_ON, READ
from meshmark.plan.layout_table import batches, remarks
from meshmark.plan.model_names import plan_model
from meshmark.plan.predict_file import Setting, predict_file, predict_rows
from meshmark.plan.rows import read_rows
from meshmark.plan.stacks import rates_for, stack_of
from meshmark.plan.step_time import PARTS
from meshmark.spec.hardware import gpu
from meshmark.spec.layout import parse_layout
from meshmark.theory.grid import SearchSpace, enumerate_grid
from meshmark.theory.recipe import NARROW, recipe
from studies.papers import paper
from studies.validate_fsdp import mpt_fits, mpt_rows

ROOT = Path(__file__).parent.parent
ROW = {
    "model": "gpt3-13b",
    "dp": "2",
    "tp": "2",
    "pp": "2",
    "micro_batch": "2",
    "grad_accum": "8",
    "gpu": "h100",
    "framework": "megatron",
}


def memory_gib(**changes: str) -> float:
    return float(predict_rows([{**ROW, **changes}])["predicted_memory_gib"][0])


@pytest.mark.parametrize(
    ("changes", "less"),
    [
        ({"recompute": "selective", "recompute_modules": "mlp"}, True),
        ({"recompute": "full"}, True),
        ({"zero_stage": "1"}, True),
        ({"offload": "cpu"}, True),
        ({"cp": "2"}, True),
        ({"seq_len": "1024"}, True),
        ({"sequence_parallel": "0"}, False),
        ({"schedule": "gpipe"}, False),
        ({"virtual_stages": "2"}, False),
        ({"family": "llama"}, False),  # the rotary one's gate, with the preset's own widths
        ({"framework": "", "recipe": "mixed20"}, False),
        ({"micro_batch": "4"}, False),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_every_field_of_a_layout_counts(changes: dict[str, str], less: bool) -> None:
    assert memory_gib(**changes) != pytest.approx(memory_gib(), rel=1e-3)
    assert (memory_gib(**changes) < memory_gib()) is less


def test_a_layout_s_id_is_its_degrees_and_what_is_left_out_is_one() -> None:
    degrees = {"dp": "", "tp": "", "pp": "", "grad_accum": ""}
    assert memory_gib(**degrees, layout="dp2.tp2.pp2.1f1b.sp.mb8") == memory_gib()
    (batch,) = batches([{"model": "gpt3-13b", "gpu": "h100", "dp": "4"}])
    assert batch.grid.layout(0) == parse_layout("dp4.1f1b")


def test_a_model_is_named_described_or_its_dimensions(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt2", "n_layer": 40, "n_embd": 5120, "n_head": 40, "n_positions": 2048}'
    )
    sizes = {"layers": "40", "hidden": "5120", "heads": "40", "vocab": "50257", "seq_len": "2048"}
    named = memory_gib()
    assert memory_gib(model=f"{tmp_path / 'config.json'},dropout=0") == named
    assert memory_gib(model="mine", family="gpt", tied_embeddings="true", **sizes) == named
    assert memory_gib(model="layers=40,hidden=5120,heads=40,vocab=50257,seq_len=2048,tied_embeddings=true") == named


def test_a_family_that_is_not_said_is_told() -> None:
    sizes = {"layers": "40", "hidden": "5120", "heads": "40", "ffn_hidden": "20480", "vocab": "50257", "seq_len": "512"}
    assert remarks([{**ROW, **sizes, "model": "mine"}]) == [
        "row 2: no family, so taken for llama (gated); a column family says gpt or llama"
    ]
    assert not remarks([{**ROW, **sizes, "model": "mine", "family": "gpt"}, ROW])


def test_a_model_that_its_name_tells_the_size_of_alone_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    told = "llama-9b is no preset: a llama of that size is planned, of 36 layers"
    (remark,) = remarks([{**ROW, "model": "llama-9b"}, {**ROW, "model": "gpt-175b"}])
    assert remark.startswith(told) and "llama-8b" in remark.partition("presets near that name: ")[2]
    plan = ["plan", "--gpus", "8", "--gpu", "h100", "--top", "1", "--json", "--model"]
    assert main([*plan, "llama-9b"]) == 0 and told in capsys.readouterr().err
    assert main([*plan, "gpt-175b", "--gpus", "512"]) == 0 and not capsys.readouterr().err, "Megatron's, with its shape"


def test_a_row_says_what_it_was_predicted_for(tmp_path: Path) -> None:
    """Not what the row names, where an option replaces that."""
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text(f"{','.join(ROW)}\n{','.join(ROW.values())}\n")
    predict_file(source, target)
    (plain,) = csv.DictReader(target.read_text().splitlines())
    assert (plain["predicted_gpu"], plain["predicted_recipe"]) == ("h100", "megatron-core")
    assert main(["predict", str(source), "-o", str(target), "--gpu", "a100-80", "--recipe", "mixed20"]) == 0
    (replaced,) = csv.DictReader(target.read_text().splitlines())
    assert replaced["gpu"] == "h100" and replaced["predicted_gpu"] == "a100-80"
    assert replaced["framework"] == "megatron" and replaced["predicted_recipe"] == "mixed20"


def test_the_example_is_predicted_row_by_row_by_its_frameworks(tmp_path: Path) -> None:
    source, target = ROOT / "examples" / "layouts.csv", tmp_path / "out.csv"
    assert predict_file(source, target) == len(read_rows(source)) == 9
    with target.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [b.recipe and b.recipe.name for b in batches(read_rows(source))] == [
        "fsdp-fused-loss", "megatron-core", "fsdp2-foreach", "deepspeed-bf16", "megatron-core", "megatron-core",
    ]  # fmt: skip
    assert default_framework().name not in {row["framework"] for row in rows}
    assert [float(row["predicted_memory_gib"]) > 0 for row in rows] == [True] * 9
    assert float(rows[2]["predicted_memory_gib"]) < float(rows[1]["predicted_memory_gib"])  # full recomputation


def test_fsdp_runs_of_a_fused_loss_fit_as_they_did() -> None:
    """At the micro-batches that llm-foundry's table has, without recomputation most of them the largest that ran."""
    table = mpt_rows()
    fused, plain = mpt_fits(table, "fsdp-fused-loss"), mpt_fits(table, "fsdp2")
    assert len(table) == 209 and fused.fits.all()
    whole = np.array([row["recompute"] == "none" for row in table])
    assert fused.twice[whole].mean() < 0.2 and plain.fits[whole].mean() < 0.5


@pytest.mark.parametrize("said", ["fp6", "mxfp4", "int8", "fp8-delayed", "fp32", "banana"])
def test_a_precision_that_would_be_planned_as_another_is_refused(said: str) -> None:
    """It was planned in bf16 without a word."""
    with pytest.raises(InputError, match=f"row 3: precision is '{said}'"):
        predict_rows([ROW, {**ROW, "precision": said}])
    for same in ("", "bf16", "amp_bf16", "bf16-mixed", "fp16", "bf16 (pure: reduced in bf16)"):
        assert predict_rows([{**ROW, "precision": same}])
    assert predict_rows([{**ROW, "framework": "", "recipe": "fp32", "precision": "fp32"}])


def test_shards_within_a_node_hold_more_and_wait_less_for_a_slow_network() -> None:
    """HSDP: a row's replicas each hold all shards, gather within themselves, and reduce among one another."""
    row = {"model": "llama-8b", "gpu": "a100-80", "framework": "torchtitan", "layout": "dp64.zero3"}
    rows = [{**row, "replicas": str(count)} for count in (1, 2, 8, 64)]
    found = predict_rows(rows)
    assert (np.diff(found["predicted_memory_gib"]) > 0).all()
    owners = [{**row, "framework": "internevo", "layout": "dp64.zero1", "replicas": count} for count in ("1", "2", "8")]
    beside = rates_for(gpu("a100-80"), stack_of("internevo"))
    free = Setting(rates=beside.moved({"network.contention": 0.0}))
    slowed, shown = (predict_rows(owners, each)["predicted_data_communication_seconds"] for each in (Setting(), free))
    assert shown[2] < 0.6 * shown[1] and shown[1] < shown[0], "weights stay in the node; gradients leave unseen"
    assert (slowed > shown).all(), "what is hidden slows what hides it"
    states = found["predicted_parameters_gib"][2] / found["predicted_parameters_gib"][0]
    assert states == pytest.approx(8, rel=0.01)
    alone = {**row, "layout": "dp64.zero1", "framework": "internevo", "replicas": "64"}
    whole = predict_rows([alone, {**alone, "layout": "dp64", "replicas": ""}])["predicted_optimizer_gib"]
    assert whole[0] == whole[1], "with one rank a replica nothing is sharded"
    for changed, told in (
        ({"replicas": "3"}, "3 replicas do not divide dp 64"),
        ({"layout": "dp64"}, "zero_stage is 0"),
    ):
        with pytest.raises(InputError, match=told):
            predict_rows([{**row, "framework": "", "replicas": "2", **changed}])


def test_narrow_products_are_planned_and_llm_foundry_s_runs_in_8_bits_take_as_long() -> None:
    """No number is fitted to these runs: the share of the 8-bit peak is that of an independent program."""
    table = [row for row in paper("mpt_fsdp_benchmarks") if row["precision"] == "amp_fp8"]
    found = predict_rows([{**row, "framework": "composer"} for row in table])
    rate = np.array([float(row["tokens_per_s_per_gpu"]) for row in table])
    assert len(table) == 7 and np.abs(rate / found["predicted_tokens_per_s_per_gpu"] - 1.0).max() < 0.07
    row = {"model": "llama-70b", "gpu": "gb200", "framework": "nemo", "layout": "dp16.tp4.sp.zero1.mb4"}
    times = [predict_rows([{**row, "precision": name}])["predicted_step_seconds"][0] for name in ("bf16", *NARROW)]
    assert times[0] > times[1] and times[2] > times[3], "4 bits are faster than 8, and 8 than 16"
    assert times[1] < times[2] < 1.05 * times[1], "blocks' scales cost little"
    using = recipe("megatron-core")
    gathered = [narrowed_on(gpu("b200"), using, name).wire.gather_bytes for name in NARROW]
    assert gathered == [1.0, 1.0, using.wire.gather_bytes], "no framework gathers weights in 4 bits"
    with pytest.raises(InputError, match="row 2: a100-80 computes in .*, not in fp8"):
        predict_rows([{**row, "gpu": "a100-80", "precision": "fp8"}])
    with pytest.raises(InputError, match="products in fp32"):
        predict_rows([{**ROW, "framework": "", "recipe": "fp32", "precision": "fp8"}])


def test_narrow_products_and_their_casts_take_what_transformer_engine_s_benchmark_measured() -> None:
    """The 12 products of a layer on B300 (github:NVIDIA/TransformerEngine 8f2e635 docs/examples/gemm_profiling).

    Of inputs that were cast before they took 13.102 ms in bf16, 7.161 in MXFP8 and 3.764 in NVFP4. Beside casts they
    took 1.823 and 2.689 ms more. There each input was cast for its own product, and NVFP4 was planned 5.2 times as fast
    as bf16.
    """
    layer = {"layers": "1", "hidden": "4096", "heads": "32", "ffn_hidden": "16384", "vocab": "64", "seq_len": "512"}
    row = {**layer, "family": "gpt", "gpu": "b300", "framework": "nemo", "micro_batch": "31"}
    found = {
        name: {part: predict_rows([{**row, "precision": name}])[f"predicted_{part}_seconds"][0] for part in PARTS}
        for name in ("bf16", "mxfp8", "nvfp4")
    }
    plain = found["bf16"]
    assert plain["matmul"] / found["nvfp4"]["matmul"] == pytest.approx(13.102 / 3.764, rel=0.01)
    assert plain["matmul"] / found["mxfp8"]["matmul"] == pytest.approx(13.102 / 7.161, rel=0.1)
    casts = {name: found[name]["elementwise"] - plain["elementwise"] for name in found}
    # A layer casts 1.04e9 values for rows and for columns. The benchmark casts 1.50e9 so and 0.99e9 for rows alone.
    for name, both, rows, seconds in (("mxfp8", 4.0625, 3.03125, 1.823e-3), ("nvfp4", 7.125, 4.5625, 2.689e-3)):
        share = 1.04 * both / (1.50 * both + 0.99 * rows)
        assert 0.8 < casts[name] / (share * seconds) < 1.0, name


@pytest.mark.parametrize(
    ("framework", "layout", "told"),
    [
        ("fsdp2", "dp2.tp2.pp2.1f1b.sp.zero3.mb8", "framework fsdp2, which has dp and ZeRO 3, does not train with tp"),
        ("fsdp2", "dp8", "does not train with ZeRO stage 0"),
        (
            "megatron",
            "dp8.zero3",
            "framework megatron, which has dp, tp, pp, cp and ZeRO 0, 1, does not train with ZeRO",
        ),
        ("ddp", "dp8.zero1", "does not train with ZeRO stage 1"),
    ],
)
def test_a_layout_that_a_framework_has_not_got_is_refused(framework: str, layout: str, told: str) -> None:
    row = {"model": "gpt3-13b", "gpu": "h100", "framework": framework, "layout": layout}
    with pytest.raises(InputError, match=f"row 2: .*{told}.*name another framework"):
        predict_rows([row])
    with pytest.raises(InputError, match=told):
        predict_rows([{**row, "framework": ""}], Setting(framework=FRAMEWORKS[framework]))
    assert len(predict_rows([{**row, "framework": "", "recipe": "fsdp2"}])["predicted_fits"])
    fitting = {"fsdp2": "dp8.zero3", "megatron": "dp2.tp2.pp2.1f1b.sp.zero1.mb8", "ddp": "dp8"}
    assert len(predict_rows([{**row, "layout": fitting[framework]}])["predicted_fits"])


@pytest.mark.parametrize(
    ("column", "meant"),
    [
        ("ga", "grad_accum"),
        ("mbs", "micro_batch"),
        ("vp", "virtual_stages"),
        ("GBS", "global_batch"),
        ("zero", "zero_"),
    ],
)
def test_a_column_by_a_framework_s_name_for_it_is_refused_with_ours(column: str, meant: str) -> None:
    assert not {*OTHER_NAMES} & {*READ, *PASSED_ON} and {*OTHER_NAMES.values()} <= {*READ}
    with pytest.raises(InputError, match=f"unknown column '{column}' .did you mean '{meant}"):
        predict_rows([{**ROW, column: "2"}])


def test_megatron_is_of_the_generation_of_the_gpu() -> None:
    """Unfused attention and fp16 on A100, as the papers have it; flash attention and bf16 since Hopper."""
    recipes = [batch.recipe for batch in batches([{**ROW, "gpu": name} for name in ("a100-80", "h100", "b200")])]
    assert [each.name if each else "" for each in recipes] == ["megatron", "megatron-core", "megatron-core"]
    (llama,) = batches([{**ROW, "gpu": "a100-80", "model": "llama-8b"}])
    assert llama.recipe and llama.recipe.name == "megatron-core", "the papers' trained none"
    old, new = (predict_rows([{**ROW, "gpu": "h100", "framework": name}]) for name in ("megatron-2021", "nemo"))
    assert new["predicted_memory_gib"][0] < old["predicted_memory_gib"][0]
    assert new["predicted_step_seconds"][0] < old["predicted_step_seconds"][0]


def test_embedding_and_head_count_as_layers_where_a_pipeline_is_cut() -> None:
    """Llama 3's 126 layers on 16 stages of 8 chunks (arXiv:2407.21783 section 3.3.2 has them) were said not to fit."""
    row = {
        "model": "llama-405b",
        "gpu": "h100",
        "layout": "dp128.tp8.pp16.interleaved.v8.sp.zero1.mb16.recompute_full",
    }
    assert predict_rows([{**row, "framework": "megatron"}])["predicted_fits"] == [1.0]
    assert not remarks([{**row, "framework": "megatron"}])
    more = {**row, "layout": "tp8.pp16.interleaved.v9.sp.mb16"}
    assert predict_rows([more])["predicted_fits"] == [0.0] and "more pipeline stages" in remarks([more])[0]
    cut = recipe("megatron-core").cut.stages(plan_model("llama-405b"), 16)
    assert [stage.num_layers for stage in cut] == [7, *[8] * 14, 7]
    assert sum(stage.num_layers for stage in recipe("megatron-core").cut.stages(plan_model("llama-405b"), 100)) == 126


def test_a_search_tries_every_number_of_chunks() -> None:
    """NeMo trains Llama 3 70B with five chunks a stage; more than four were never tried."""
    space = SearchSpace(num_gpus=64, global_batch=128)
    for name, chunks in (("llama-70b", {2, 4, 5, 10, 20}), ("llama-405b", {2, 4, 8, 16, 32})):
        grid = enumerate_grid(plan_model(name), space, max_tp=8, ends_count=True)
        assert chunks <= {int(v) for v in grid.virtual_stages[grid.pp == 4]}


def test_a_megatron_layout_runs_without_fragmentation_where_it_would_not_fit_with_it() -> None:
    """Its launchers have the allocator expand segments; nanotron's do not."""
    row = {"model": "llama-8b", "gpu": "h100", "layout": "dp8.zero1", "micro_batch": "4"}
    loose, tight = (
        predict_rows([{**row, "framework": "nemo", "gpu": name, "micro_batch": "1"}])["predicted_fragmentation_gib"][0]
        for name in ("h200", "h100")
    )
    assert loose > 0.0 == tight
    assert predict_rows([{**row, "framework": "nanotron"}])["predicted_fragmentation_gib"][0] > 0.0


def test_maxtext_repeats_named_modules_but_never_the_last_product() -> None:
    """XLA removes a product that nothing reads."""
    base = {"model": "llama-8b", "gpu": "h100", "framework": "maxtext", "dp": "64", "zero_stage": "3"}
    base["micro_batch"] = "2"
    none, modules, full = (
        predict_rows([{**base, **more}])
        for more in (
            {"recompute": "none"},
            {"recompute": "selective", "recompute_modules": "mlp core_attn"},
            {"recompute": "full"},
        )
    )
    held = [found["predicted_activations_gib"][0] for found in (none, modules, full)]
    took = [found["predicted_matmul_seconds"][0] for found in (none, modules, full)]
    assert held[0] > held[1] > held[2] and took[0] < took[1] < took[2]
    assert took[2] < took[0] * (4.0 / 3.0) * 0.97, "the feed-forward's second product is a third of it"
    with pytest.raises(InputError, match="does not train with recompute_modules"):
        predict_rows([{**base, "framework": "fsdp1", "recompute": "selective", "recompute_modules": "mlp"}])

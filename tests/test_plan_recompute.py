"""Recomputation of some layers and of named modules, offloaded activations and LoRA, against counts by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshmark.cli.commands import main
from meshmark.errors import InputError
from meshmark.models.transformer import llama
from meshmark.plan.layout_columns import recomputed_columns
from meshmark.plan.model_names import plan_model
from meshmark.plan.predict_file import predict_rows
from meshmark.plan.prediction import predict_grid
from meshmark.plan.rates import REACHED
from meshmark.plan.stacks import rates_for, stack_of
from meshmark.plan.step_time import step_time
from meshmark.spec.hardware import gpu
from meshmark.spec.layout import Layout, Offload, Recompute, RecomputeModule, Schedule
from meshmark.theory.activations import held_bytes, layer_activation_bytes
from meshmark.theory.grid import RECOMPUTES, Grid, make_grid, module_code
from meshmark.theory.memory import Overheads, memory
from meshmark.theory.model_theory import model_flops_per_token
from meshmark.theory.recipe import adapted, narrowed, recipe

H, F, KV, SEQ, LAYERS = 1024, 4096, 256, 2048, 12
SMALL = dataclasses.replace(llama("small", LAYERS, H, 16, F), num_kv_heads=4, seq_len=SEQ, vocab_size=32000)
CORE, H100 = recipe("megatron-core"), gpu("h100")
NO_OVERHEAD = Overheads(fragmentation=0.0, queued_collectives=0.0, overhead_bytes=0.0)
FULL, SELECTIVE = RECOMPUTES.index(Recompute.FULL), RECOMPUTES.index(Recompute.SELECTIVE)
# A layer in bf16 keeps four tensors of h, q and attention's output, k and v, the gate's two inputs and its output, and
# one fp32 statistic for each of 16 heads.
LAYER = SEQ * (2 * (4 * H + 2 * H + 2 * KV + 3 * F) + 4 * 16)
INPUT = SEQ * 2 * H


def held(grid: Grid) -> float:
    stage = CORE.cut.stages(SMALL, int(grid.pp[0]))[0]
    return float(held_bytes(SMALL, grid, CORE, stage, 0)[0])


def test_block_keeps_everything_of_the_layers_that_it_leaves() -> None:
    assert held(make_grid()) == pytest.approx(12 * LAYER + INPUT)
    assert held(make_grid(recompute=FULL)) == pytest.approx(12 * INPUT + INPUT)
    assert held(make_grid(recompute=FULL, recompute_layers=5)) == pytest.approx(5 * INPUT + 7 * LAYER + INPUT)


def test_uniform_keeps_one_input_for_each_unit_of_layers() -> None:
    assert held(make_grid(recompute=FULL, recompute_unit=4)) == pytest.approx(3 * INPUT + INPUT)
    assert held(make_grid(recompute=FULL, recompute_unit=5)) == pytest.approx(3 * INPUT + INPUT)  # 5, 5 and 2 layers
    # One unit's layers are all there when its forward pass has been repeated.
    narrow = dataclasses.replace(SMALL, vocab_size=256)  # whose logits are not its peak
    one, four = (
        memory(narrow, make_grid(dp=64, zero_stage=1, recompute=FULL, recompute_unit=unit), CORE, NO_OVERHEAD)
        for unit in (1, 4)
    )
    assert four.total_bytes - one.total_bytes == pytest.approx(3 * LAYER - 9 * INPUT)


def test_block_counts_layers_of_every_chunk() -> None:
    """Three chunks of two layers on each of two stages: 2(p - 1) + (v - 1)p + 1 = 7 passes of 3 are in flight."""
    columns = {"pp": 2, "virtual_stages": 3, "num_micro_batches": 8, "recompute": FULL, "recompute_layers": 1}
    assert held(make_grid(**columns)) == pytest.approx(7 / 3 * (3 * INPUT + 3 * LAYER) + 3 * INPUT)


@pytest.mark.parametrize(
    ("module", "kept_less"),
    [
        (RecomputeModule.CORE_ATTN, 4 * 16),  # flash attention's statistic; its output is a product's input as well
        (RecomputeModule.MLP, 2 * (3 * F + H)),  # and the norm's output, which is inside of the first product
    ],
)
def test_a_repeated_module_of_a_dense_model_keeps_its_input_alone(module: RecomputeModule, kept_less: float) -> None:
    grid = make_grid(recompute=SELECTIVE, recompute_modules=module_code([module]))
    assert layer_activation_bytes(SMALL, grid, CORE)[0] == pytest.approx(LAYER - SEQ * kept_less)


def test_selective_without_modules_is_what_the_framework_means_by_it() -> None:
    grid = make_grid(recompute=SELECTIVE)
    core = make_grid(recompute=SELECTIVE, recompute_modules=module_code([RecomputeModule.CORE_ATTN]))
    found = layer_activation_bytes(SMALL, grid, CORE)
    assert found == layer_activation_bytes(SMALL, core, CORE) == pytest.approx(LAYER - SEQ * 4 * 16)
    # torchtitan keeps two tensors of h, and every second product's output; MaxText a layer's input, and the outputs of
    # all products but the last, which nothing reads again: q, k, v, projection, gate and up.
    every_second = 2 * (2 * H + (3 * H + 2 * KV + 2 * F) / 2)
    assert layer_activation_bytes(SMALL, grid, recipe("fsdp2")) == pytest.approx(SEQ * every_second)
    products = 2 * (H + 2 * H + 2 * KV + 2 * F)
    assert layer_activation_bytes(SMALL, grid, recipe("xla")) == pytest.approx(SEQ * products)


def test_repeated_modules_of_deepseek_keep_as_much_less_as_they_hold() -> None:
    model = plan_model("deepseek-v3")
    h, heads, latents = 7168, 128, 1536 + 512
    share = 58 / 61  # three of 61 layers are dense
    less = {
        RecomputeModule.MLA_UP_PROJ: 2 * heads * (192 + 192 + 128),
        RecomputeModule.MOE_ACT: 2 * share * 8 * 2048,
        RecomputeModule.SHARED_EXPERTS: 2 * share * 3 * 2048,
        RecomputeModule.LAYERNORM: 2 * h * (1 + share),
        RecomputeModule.MOE: 2 * share * (3 * (8 * 2048 + 2048) + 2 * 8 * h),
        RecomputeModule.MLP: 2 * (1 - share) * (3 * 18432 + h),
    }
    plain = layer_activation_bytes(model, make_grid(), CORE)[0] / model.seq_len
    attention = heads * (192 + 192 + 128 + 128) + 2 * latents + 64
    ffn = 3 * ((1 - share) * 18432 + share * 9 * 2048) + 2 * share * 8 * h
    assert plain == pytest.approx(2 * (4 * h + attention + ffn) + 4 * heads)
    for module, bytes_less in less.items():
        grid = make_grid(recompute=SELECTIVE, recompute_modules=module_code([module]))
        kept = layer_activation_bytes(model, grid, CORE)[0] / model.seq_len
        assert plain - kept == pytest.approx(bytes_less), module


def matmul_seconds(grid: Grid) -> float:
    """Products alone: rates without an extra time for narrow models."""
    given = rates_for(H100, stack_of("megatron-core")).moved({"kernels.gemm_half_width": 0.0})
    return float(step_time(SMALL, grid, H100, CORE, given).matmul[0])


def test_products_are_repeated_for_the_layers_and_modules_that_say_so() -> None:
    layer = 2 * H * (H + KV) + 3 * H * F
    head = 32000 * H
    plain = matmul_seconds(make_grid())
    for columns, more in (
        ({"recompute": FULL}, 12 * layer),
        ({"recompute": FULL, "recompute_layers": 5}, 5 * layer),
        ({"recompute": FULL, "recompute_unit": 3}, 12 * layer),
        ({"recompute": SELECTIVE, "recompute_modules": module_code([RecomputeModule.MLP])}, 12 * 3 * H * F),
        ({"recompute": SELECTIVE, "recompute_modules": module_code([RecomputeModule.CORE_ATTN])}, 0),
    ):
        again = matmul_seconds(make_grid(**columns))  # type: ignore[arg-type]
        assert again / plain == pytest.approx(1 + more / 3 / (12 * layer + head)), columns


def test_offloaded_layers_leave_the_device_but_for_two_and_are_counted_on_the_host() -> None:
    found = memory(SMALL, make_grid(offload_layers=[0, 1, 8]), CORE, NO_OVERHEAD)
    whole, one, eight = found.activations
    assert (one, eight) == (whole, pytest.approx(whole - 6 * LAYER))
    np.testing.assert_allclose(found.host_bytes, [0, LAYER, 8 * LAYER])


def test_a_layer_waits_for_its_activations_where_the_link_to_the_host_is_slower_than_it() -> None:
    given = rates_for(H100, stack_of("megatron-core"))
    assert H100.host
    slow = dataclasses.replace(H100, host=dataclasses.replace(H100.host, bandwidth=1e8))
    grid = make_grid(offload_layers=[0, 8])
    time = step_time(SMALL, grid, slow, CORE, given)
    # A layer's time, but for the two waits, is hidden: a third of it in the forward pass, the rest backward.
    layer = (time.matmul[0] + time.attention[0] + time.elementwise[0]) / 12
    expected = 8 * (2 * LAYER / (REACHED * 1e8))
    assert time.activation_offload[0] == 0
    assert expected - 8 * layer * 1.5 < time.activation_offload[1] < expected
    quick = dataclasses.replace(H100, host=dataclasses.replace(H100.host, bandwidth=1e13))
    assert step_time(SMALL, grid, quick, CORE, given).activation_offload[1] == 0


def test_lora_holds_frozen_weights_once_and_states_of_adapters_alone() -> None:
    """Two matrices beside each of four linear layers: qkv, projection, gate and up together, down."""
    rank = 16
    adapters = LAYERS * rank * ((H + H + 2 * KV) + (H + H) + (H + 2 * F) + (F + H))
    found = memory(SMALL, make_grid(), adapted(CORE, rank, SMALL), NO_OVERHEAD)
    assert found.parameters[0] == pytest.approx(2 * SMALL.num_parameters + (2 + 4) * adapters)
    assert found.gradients[0] == pytest.approx(2 * adapters)
    assert found.optimizer[0] == pytest.approx(8 * adapters)
    # Under ZeRO-1 the states of adapters are divided over the ranks; frozen weights are not.
    shared = memory(SMALL, make_grid(dp=8, zero_stage=1), adapted(CORE, rank, SMALL), NO_OVERHEAD)
    assert shared.parameters[0] == pytest.approx(2 * SMALL.num_parameters + (2 + 4 / 8) * adapters)


def test_quantized_frozen_weights_take_four_bits_and_their_scales() -> None:
    """Those of the blocks' linear layers; embedding, head and norms stay in 16 bits, as all are for a product."""
    using, rank = recipe("ddp"), 16
    plain, quantized = adapted(using, rank, SMALL), adapted(using, rank, SMALL, "nf4")
    held = [memory(SMALL, make_grid(), each, NO_OVERHEAD).parameters[0] for each in (plain, quantized)]
    linear = LAYERS * (2 * H * (H + KV) + 3 * H * F)
    assert held[0] - held[1] == pytest.approx((2.0 - (0.5 + 0.127 / 8)) * linear, rel=1e-3)
    given = rates_for(H100, stack_of("ddp"))
    took = [step_time(SMALL, make_grid(), H100, each, given).elementwise[0] for each in (plain, quantized)]
    assert took[1] > took[0]
    row = {"model": "llama-8b", "gpu": "h100", "framework": "fsdp2", "dp": "8", "zero_stage": "3", "lora_rank": "16"}
    few, many = (predict_rows([{**row, "quantize": kind}])["predicted_parameters_gib"][0] for kind in ("nf4", ""))
    assert few < 0.5 * many


def test_lora_counts_four_operations_a_frozen_weight_and_six_an_adapter_s() -> None:
    rank, layer = 16, 2 * H * (H + KV) + 3 * H * F
    adapters = rank * ((H + H + 2 * KV) + (H + H) + (H + 2 * F) + (F + H))
    scores = 12 * LAYERS * SEQ * H
    expected = 4 * (LAYERS * layer + 32000 * H) + 6 * LAYERS * adapters + scores
    assert model_flops_per_token(SMALL, adapter_rank=rank) == pytest.approx(expected)
    given = rates_for(H100, stack_of("megatron-core"))
    whole, some = (
        predict_grid(SMALL, make_grid(dp=8, zero_stage=1), H100, using, given)
        for using in (CORE, adapted(CORE, rank, SMALL))
    )
    products = LAYERS * layer + 32000 * H
    expected = (4 * products + 6 * LAYERS * adapters) / (6 * products)
    assert some.time.matmul[0] / whole.time.matmul[0] == pytest.approx(expected)
    assert some.time.optimizer[0] < whole.time.optimizer[0] / 20 and some.step_seconds_interval is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"method": "block"}, "missing column recompute_num_layers"),
        ({"count": 3}, "missing column recompute_method"),
        ({"method": "blocks", "count": 3}, "recompute_method is 'blocks', expected one of uniform, block"),
        ({"method": "block", "count": 99}, "recompute_num_layers is 99, but a chunk has 12 of 12 layers"),
        ({"modules": "mlp"}, "recompute_modules is of selective recomputation, but recompute is full"),
    ],
)
def test_recomputation_that_contradicts_itself_is_refused(changes: dict[str, object], told: str) -> None:
    said: dict[str, object] = {"method": "", "count": 0, "modules": "", **changes}
    with pytest.raises(InputError, match=told):
        recomputed_columns(Layout(recompute=Recompute.FULL), SMALL, **said)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("modules", "told"),
    [
        ("moe", "'small' has none; it has core_attn, mlp"),
        ("layernorm", "the norms of its layers are part of the products after them"),
        ("mlp, attention", "attention"),
    ],
)
def test_modules_that_a_model_has_not_got_are_refused(modules: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        recomputed_columns(Layout(recompute=Recompute.SELECTIVE), SMALL, method="", count=0, modules=modules)


def test_a_plan_of_adapters_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--model", "llama-8b", "--gpus", "8", "--framework", "fsdp2"]
    for options, told in (
        (["--lora", "16"], "frozen weights"),
        (["--lora", "8", "--quantize", "nf4"], "of 0.52 bytes"),
    ):
        assert main([*plan, *options]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"adapters of rank {options[1]} are trained beside frozen weights" in said and told in said
    assert main(plan) == 0 and "adapters" not in capsys.readouterr().out


def test_lora_that_is_not_planned_is_refused() -> None:
    for using, rank, model, told in (
        (CORE, 4096, SMALL, "a LoRA of rank 4096, expected 1 to 1024"),
        (CORE, 8, plan_model("deepseek-v3"), "not planned for experts or latent attention"),
        (narrowed(CORE, "fp8"), 8, SMALL, "not planned with fp8"),
        (recipe("eager"), 8, SMALL, "not planned with recipe 'eager'"),
    ):
        with pytest.raises(InputError, match=told):
            adapted(using, rank, model)


_HEAD = "model,gpu,framework,dp,tp,pp,recompute,recompute_method,recompute_num_layers,recompute_modules,offload_layers"


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("llama-8b,h100,fsdp2,8,1,1,selective,,,mlp,", "fsdp2, which has dp and ZeRO 3, does not train with"),
        ("llama-8b,h100,nemo,8,1,2,none,,,,4", "does not train with offload_layers in a pipeline"),
        ("llama-8b,h100,nemo,8,1,1,full,,,,4", "does not train with offload_layers beside recomputation"),
        ("llama-8b,h100,nemo,8,1,1,none,,,,40", "offload_layers is 40, but a rank has 32 of 32 layers"),
        ("llama-8b,h100,nemo,8,1,1,none,block,4,,", "recompute_method is of full recomputation, but recompute is none"),
        ("llama-8b,l40s,nemo,8,1,1,none,,,,4", "what a node of l40s could offload to is not known"),
    ],
)
def test_a_file_s_row_says_what_is_wrong_with_its_recomputation(
    row: str, told: str, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = f"{tmp_path}/rows.csv"
    with open(rows, "w", encoding="utf-8") as file:
        file.write(f"{_HEAD}\n{row}\n")
    assert main(["predict", rows, "-o", f"{tmp_path}/out.csv"]) == 2
    said = capsys.readouterr().err
    assert "row 2: " in said and told in said


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--recompute-num-layers", "3"], "come together; one is missing"),
        (["--recompute-modules", "mlp", "--recompute", "full"], "is of selective recomputation; say selective"),
        (["--recompute-modules", "moe"], "'llama-8b' has none; it has core_attn, mlp"),
        (["--framework", "torchtitan", "--lora", "8"], "does not train with LoRA; name another --framework"),
        (["--lora", "8", "--quantize", "nf4"], "does not train with quantized frozen weights"),
        (["--framework", "ddp", "--quantize", "nf4"], "none are frozen: give LoRA's rank too"),
        (["--framework", "ddp", "--lora", "8", "--quantize", "nf8"], "unknown format of frozen weights 'nf8'"),
        (["--offload-layers", "4", "--recompute", "full"], "does not train with --offload-layers beside recomputation"),
        (["--offload-layers", "4", "--gpu", "l40s"], "the host of a node of l40s is not known"),
        (["--etp", "2"], "--etp 2: 'llama-8b' has no experts"),
        (["--recompute-modules", ""], "recompute_modules names none, expected some of core_attn"),
        (["--offload-layers", "9" * 20], "expected 1 to 1,000,000,000"),
        (
            ["--recompute-method", "block", "--recompute-num-layers", "99"],
            "--recompute-num-layers 99: in no remaining layout",
        ),
        (["--recipe", "eager", "--recompute-method", "block", "--recompute-num-layers", "1"], "by recipe 'eager'"),
        (["--max-model", "--lora", "8"], "--lora with --max-model"),
        (["--replicas", "7"], "replicas 7: in no remaining layout it divides"),
        (["--lora", "-1"], "--lora is -1, expected 1 to"),
        (["--gpu", "gb200", "--offload", "nvme"], "which drives a node of gb200-nvl72 has is not known"),
    ],
)
def test_a_plan_says_what_contradicts(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-8b", "--gpus", "64", *options]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--recompute-method", "block", "--recompute-num-layers", "2"], ".recompute_full.block2"),
        (["--recompute-modules", "mlp,core_attn"], ".recompute_selective.core_attn+mlp"),
        (["--offload-layers", "8"], ".offload_layers8"),
        (["--framework", "torchtitan", "--replicas", "4", "--zero-stage", "3"], ".replicas4"),
    ],
)
def test_a_plan_s_lines_fit_a_terminal_and_name_what_was_asked(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", "llama-8b", "--gpus", "64", *options]) == 0
    said = capsys.readouterr().out
    assert named in said and "\nError bar: " in said
    assert max(map(len, said.splitlines())) <= 100


def test_lora_is_planned_without_an_error_bar(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-70b", "--gpus", "8", "--lora", "16", "--global-batch", "64"]) == 0
    assert "Error bar: none; no run that trains adapters alone has been compared." in capsys.readouterr().out


def test_gpipe_and_offloaded_states_go_with_offloaded_activations() -> None:
    """States and activations share the host's memory."""
    grid = make_grid(offload=list(Offload).index(Offload.CPU), offload_layers=[0, 8])
    none, some = memory(SMALL, grid, CORE, NO_OVERHEAD).host_bytes
    assert some - none == pytest.approx(8 * LAYER)
    gpipe = make_grid(pp=2, num_micro_batches=4, schedule=list(Schedule).index(Schedule.GPIPE), offload_layers=3)
    assert memory(SMALL, gpipe, CORE, NO_OVERHEAD).host_bytes[0] == pytest.approx(3 * 4 * LAYER)

"""`meshmark check` on real scripts: right ones pass, defects are found and named, mistakes have codes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "tests" / "scripts"


def check(*arguments: object, folder: Path | None = None) -> tuple[int, str]:
    """Return the exit code of `meshmark check ARGUMENTS` and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "meshmark", "check", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_right_script_is_right_with_its_detection_limit() -> None:
    code, printed = check("--nproc", 2, SCRIPTS / "gru_accumulation.py")
    assert code == 0, printed
    assert "RIGHT: gru_accumulation.py" in printed and "2 ranks (DDP)" in printed and "would be seen" in printed


@pytest.mark.slow
def test_an_fsdp2_script_is_right() -> None:
    code, printed = check("--nproc", 2, SCRIPTS / "fsdp2_loop.py")
    assert code == 0 and "(FSDP2)" in printed, printed


@pytest.mark.parametrize(
    "defect, words",
    [
        ("gradients_kept", "zero_grad missing"),
        pytest.param("never_synchronised", "missing reduction", marks=pytest.mark.slow),
        pytest.param("clipped_while_scaled", "call scaler.unscale_ before clip_grad_norm_", marks=pytest.mark.slow),
        ("stale_optimizer", "the optimizer holds 1 tensor that no model has"),
    ],
)
def test_a_defect_is_found_and_named(defect: str, words: str) -> None:
    code, printed = check("--nproc", 2, SCRIPTS / "defects.py", defect)
    assert code == 1 and "WRONG: defects.py" in printed and words in printed, printed


@pytest.mark.parametrize(
    "script, seen",
    [
        ("lightning_trainer.py", "a mean over targets"),
        pytest.param("fabric_loop.py", "a mean over targets", marks=pytest.mark.slow),
        pytest.param("hf_trainer.py bf16", "a mean over all targets of the global batch", marks=pytest.mark.slow),
        pytest.param("gan.py", "Adam: off by", marks=pytest.mark.slow),
        ("mixed.py fsdp2", "(FSDP2), 2 micro-batches"),
        pytest.param("mixed.py fsdp1", "(FSDP1), 2 micro-batches", marks=pytest.mark.slow),
        pytest.param("mixed.py weights", "clipping    norm", marks=pytest.mark.slow),
        pytest.param("mixed.py compiled", "(DDP), 2 micro-batches", marks=pytest.mark.slow),
    ],
)
def test_right_scripts_of_trainers_and_in_bf16_are_right(script: str, seen: str) -> None:
    name, *arguments = script.split()
    code, printed = check("--nproc", 2, SCRIPTS / name, *arguments)
    assert code == 0 and f"RIGHT: {name}" in printed and seen in printed, printed
    assert "not trained" not in printed and "gradients   off by" in printed, printed


@pytest.mark.parametrize(
    "script, code, words",
    [
        pytest.param("gan.py twice", 0, "6 steps of 2 ranks (DDP)", marks=pytest.mark.slow),
        pytest.param("gan.py twice critic_kept", 1, "zero_grad missing", marks=pytest.mark.slow),
        pytest.param("gan.py twice generator_kept", 1, "zero_grad missing", marks=pytest.mark.slow),
        pytest.param("gan.py penalty", 3, "the script differentiates a gradient", marks=pytest.mark.slow),
        ("chain.py", 0, "a mean over targets"),
        pytest.param("chain.py undivided", 1, "losses of micro-batches or ranks are added up", marks=pytest.mark.slow),
    ],
)
def test_two_models_are_judged(script: str, code: int, words: str) -> None:
    name, *arguments = script.split()
    found, printed = check("--nproc", 2, SCRIPTS / name, *arguments)
    assert found == code and words in printed and "changed between steps" not in printed, printed


def test_values_are_clipped_losses_weighed_and_buffers_compared() -> None:
    code, printed = check("--nproc", 2, "--objective", "tokens", SCRIPTS / "two_losses.py", "schedule")
    assert code == 0 and "elements clipped to 0.01" in printed, printed
    assert "a mean over targets" in printed and "ranks 0 and 1 hold other values of center" in printed, printed
    assert "takes 2 steps for one of the optimizer" in printed, printed


@pytest.mark.slow
def test_a_buffer_that_the_first_rank_broadcasts_is_that_of_all() -> None:
    code, printed = check("--nproc", 2, SCRIPTS / "two_losses.py", "broadcast")
    assert code == 0 and "ranks 0 and 1 hold other values" not in printed, printed
    assert "the first rank's center replaces rank 1's at every forward pass" in printed, printed


@pytest.mark.parametrize(
    "script, words",
    [
        ("fsdp2 reduced_early", "micro-batch 2 of 2 has no part"),
        pytest.param("fsdp2 undivided", "losses of micro-batches or ranks are added up", marks=pytest.mark.slow),
        ("weights other_masks", "random numbers are drawn anew"),
    ],
)
def test_defects_in_bf16_are_found_and_named(script: str, words: str) -> None:
    code, printed = check("--nproc", 2, SCRIPTS / "mixed.py", *script.split())
    assert code == 1 and words in printed, printed


@pytest.mark.parametrize(
    "thread, code, words",
    [
        ("fsdp_size_of_one", 1, "missing reduction"),
        pytest.param("loss_grows", 1, "losses of micro-batches or ranks are added up", marks=pytest.mark.slow),
        pytest.param("schedule_by_process", 0, "takes 2 steps for one of the optimizer", marks=pytest.mark.slow),
        pytest.param("negatives_without_gradient", 0, "no gradient passes it", marks=pytest.mark.slow),
        pytest.param("means_of_ranks", 0, "a mean of the means of ranks", marks=pytest.mark.slow),
    ],
)
def test_the_cause_that_a_thread_found_is_said(thread: str, code: int, words: str) -> None:
    found, printed = check("--nproc", 2, SCRIPTS / "threads.py", thread)
    assert found == code and words in printed, printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        "deepspeed_loop.py 0",
        "deepspeed_loop.py 1 bf16",
        "deepspeed_loop.py 2 round_robin",
        "deepspeed_loop.py 3",
        "deepspeed_loop.py 3 bf16",
        "deepspeed_loop.py 2 torch_style",
        "accelerate_loop.py zero 2",
        "hf_trainer.py zero 3",
    ],
)
def test_right_scripts_with_deepspeed_are_right(script: str) -> None:
    name, *arguments = script.split()
    code, printed = check("--nproc", 2, SCRIPTS / name, *arguments)
    assert code == 0 and f"RIGHT: {name}" in printed and "(DeepSpeed), 2 micro-batches" in printed, printed
    assert "clipping    norm" in printed and "updates     AdamW: off by" in printed, printed
    assert "a mean over" in printed, printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, words",
    [
        ("2 same_rows", "ranks read the same rows"),
        ("1 divided_twice", "the loss or its gradient is divided twice"),
        ("2 torch_style divided_twice", "the loss or its gradient is divided twice"),
        ("2 counted_twice", "only the last of 4 micro-batches"),
        ("0 never_reduced", "missing reduction"),
        ("3 predivided", "times the right gradient"),
        ("2 clipped_by_torch", "clipping has no effect"),
        ("3 bypass", "a module is called past the DeepSpeedEngine around it"),
    ],
)
def test_defects_with_deepspeed_are_found_and_named(script: str, words: str) -> None:
    code, printed = check("--nproc", 2, SCRIPTS / "deepspeed_loop.py", *script.split())
    assert code == 1 and "WRONG: deepspeed_loop.py" in printed and words in printed, printed


@pytest.mark.parametrize(
    "num_ranks, script",
    [
        (2, "sequence"),
        pytest.param(2, "", marks=pytest.mark.slow),
        pytest.param(4, "fsdp", marks=pytest.mark.slow),
        pytest.param(4, "fsdp sequence", marks=pytest.mark.slow),
    ],
)
def test_tensor_parallelism_is_right(num_ranks: int, script: str) -> None:
    code, printed = check("--nproc", num_ranks, SCRIPTS / "tensor_parallel.py", *script.split())
    assert code == 0 and "tensor parallelism over 2)" in printed, printed
    assert "updates     AdamW: off by" in printed and "a mean over targets" in printed, printed
    assert "clipping    norm" in printed or "sequence" not in script, printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_ranks, script, code, words",
    [
        (2, "sequence norms_left_out", 1, "each rank keeps its own summand"),
        (2, "sequence undivided", 1, "losses of micro-batches or ranks are added up"),
        (4, "fsdp sequence same_rows", 1, "ranks read the same rows"),
        (2, "sequence rows_by_rank", 3, "was data split by rank, not by data-parallel group?"),
    ],
)
def test_defects_with_tensor_parallelism_are_named(num_ranks: int, script: str, code: int, words: str) -> None:
    found, printed = check("--nproc", num_ranks, SCRIPTS / "tensor_parallel.py", *script.split())
    assert found == code and words in printed, printed


@pytest.mark.slow
def test_a_deepspeed_engine_with_masters_that_are_not_seen_is_refused() -> None:
    code, printed = check("--nproc", 2, SCRIPTS / "deepspeed_loop.py", 0, "bf16")
    assert code == 3 and "a DeepSpeed engine with bf16 without ZeRO" in printed, printed


def test_a_model_that_is_tried_out_before_it_is_wrapped_is_judged_as_wrapped() -> None:
    code, printed = check("--nproc", 2, SCRIPTS / "tried_first.py")
    assert code == 0 and "(FSDP2)" in printed, printed


def test_a_wrapper_that_the_script_calls_past_is_named() -> None:
    code, printed = check("--nproc", 2, SCRIPTS / "tried_first.py", "bypass")
    assert code == 1 and "missing reduction" in printed and "2 ranks (DDP)" in printed, printed
    assert "called past the DistributedDataParallel around it" in printed, printed


@pytest.mark.slow
def test_a_forward_pass_that_was_replaced_before_accelerate_wraps_it_is_recomputed(tmp_path: Path) -> None:
    source = (SCRIPTS / "accelerate_loop.py").read_text()
    source = source.replace("cpu=True)", "cpu=True, mixed_precision='bf16')").replace("import sys", "import sys, types")
    replaced = "model.forward = types.MethodType(lambda self, x: nn.Sequential.forward(self, 3 * x), model)"
    source = source.replace("    optimizer = torch", f"    {replaced}\n    optimizer = torch", 1)
    (tmp_path / "replaced.py").write_text(source)
    code, printed = check("--nproc", 2, tmp_path / "replaced.py")
    assert code == 0 and "RIGHT: replaced.py" in printed, printed


@pytest.mark.slow
def test_checkpointed_activations_are_right_also_if_the_script_clips_by_hand(tmp_path: Path) -> None:
    source = (SCRIPTS / "mixed.py").read_text()
    by_hand = (
        "own = [p.grad for p in model.parameters() if p.grad is not None and p.grad.numel()]; "
        "square = sum(g.double().square().sum() for g in own); torch.distributed.all_reduce(square); "
        "[g.mul_(0.1 / square.sqrt().item()) for g in own]; optimizer.step()"
    )
    (tmp_path / "by_hand.py").write_text(source.replace("optimizer.step()", by_hand))
    code, printed = check("--nproc", 2, tmp_path / "by_hand.py", "fsdp1")
    assert code == 0 and "scaled by the script" in printed, printed


@pytest.mark.slow
def test_rounding_that_would_hide_errors_is_noted(tmp_path: Path) -> None:
    """The gradient of a shift of all logits nearly cancels, so that little of it is left in 16 bits."""
    source = (SCRIPTS / "mixed.py").read_text()
    source = source.replace("self.keeps_masks =", "self.shift = nn.Parameter(torch.zeros(1)); self.keeps_masks =")
    slope = "(1 + 0.02 * torch.arange(61, dtype=x.dtype) / 61)"
    (tmp_path / "shift.py").write_text(source.replace("self.head(x)", f"self.head(x) + self.shift * {slope}"))
    code, printed = check("--nproc", 2, tmp_path / "shift.py", "weights")
    assert code == 0 and "in the gradient of shift, rounding would hide errors" in printed, printed


@pytest.mark.slow
def test_flat_parameters_of_fsdp1_are_judged(tmp_path: Path) -> None:
    """`use_orig_params=False`, FSDP1's default, leaves modules without parameters of their own."""
    script = tmp_path / "flat.py"
    script.write_text((SCRIPTS / "fsdp1_loop.py").read_text().replace(", use_orig_params=True", ""))
    code, printed = check("--nproc", 2, script)
    assert code == 0 and "RIGHT: flat.py" in printed, printed


def test_the_objective_that_was_asked_for_decides(tmp_path: Path) -> None:
    script = ROOT / "examples" / "scripts" / "uneven.py"
    code, printed = check("--nproc", 2, "--objective", "tokens", "-o", tmp_path / "page.md", script)
    assert code == 1 and "a mean of the means of ranks" in printed, printed
    assert "# uneven.py: wrong" in (tmp_path / "page.md").read_text()


def test_recordings_are_deleted_unless_they_are_to_be_kept(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    os.environ["TMPDIR"] = str(tmp_path / "temporary")
    try:
        assert check(SCRIPTS / "single_process.py")[0] == 0
        assert list((tmp_path / "temporary").glob("meshmark-check-*")) == []
        assert check("--keep", tmp_path / "kept", SCRIPTS / "single_process.py")[0] == 0
    finally:
        del os.environ["TMPDIR"]
    assert (tmp_path / "kept").stat().st_mode & 0o077 == 0
    assert any((tmp_path / "kept").iterdir())


@pytest.mark.parametrize(
    "source, code, words",
    [
        ("raise ValueError('no data')", 4, "ValueError: no data"),
        ("print('nothing to train')", 3, "no model with trainable parameters was called"),
    ],
    ids=["a crash", "no model"],
)
def test_a_script_that_cannot_be_judged_says_why(tmp_path: Path, source: str, code: int, words: str) -> None:
    (tmp_path / "script.py").write_text(source)
    ended, printed = check(tmp_path / "script.py")
    assert ended == code and words in printed, printed


@pytest.mark.parametrize("arguments, words", [(("nothing.py",), "nothing.py"), (("--nproc", "0", "a.py"), "--nproc")])
def test_a_mistake_in_the_command_is_an_error(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    code, printed = check(*arguments, folder=tmp_path)
    assert code == 2 and words in printed, printed


@pytest.mark.parametrize(
    "arguments, code, text",
    [((), 0, "clipped to 0.05"), (("torch",), 1, "clipping by a wrong norm")],
)
def test_clipping_of_fsdp1_is_observed(arguments: tuple[str, ...], code: int, text: str) -> None:
    found, printed = check("--nproc", 2, SCRIPTS / "fsdp1_clip.py", *arguments)
    assert found == code and text in printed, printed


def test_a_loss_that_is_no_number_is_named(tmp_path: Path) -> None:
    """And nothing else: neither the optimizer nor the objective is to blame."""
    source = (SCRIPTS / "single_process.py").read_text()
    assert "loss.backward()" in source
    (tmp_path / "nan.py").write_text(source.replace("loss.backward()", "(loss * float('nan')).backward()"))
    code, printed = check(tmp_path / "nan.py")
    assert code == 1 and "wrong: not finite (from step 0 on)" in printed and "no numbers" in printed, printed
    assert printed.count("wrong:") == 1, printed

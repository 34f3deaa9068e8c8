"""`meshmark check` on real scripts: right ones pass, defects are found and named, mistakes have codes of their own."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from meshmark.check import rank
from tests.test_cluster import free_port
from tests.test_orphans import heed_signals, processes_of, wait_until

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
        pytest.param("stepped_while_scaled", "call scaler.step(optimizer)", marks=pytest.mark.slow),
        ("stale_optimizer", "the optimizer holds 1 tensor that no model has"),
    ],
)
def test_a_defect_is_found_and_named(defect: str, words: str) -> None:
    code, printed = check("--nproc", 2, SCRIPTS / "defects.py", defect)
    assert code == 1 and "WRONG: defects.py" in printed and words in printed, printed


@pytest.mark.parametrize(
    "script, seen",
    [
        pytest.param("lightning_trainer.py", "a mean over targets", marks=pytest.mark.slow),
        pytest.param("fabric_loop.py", "a mean over targets", marks=pytest.mark.slow),
        pytest.param("hf_trainer.py bf16", "a mean over all targets of the global batch", marks=pytest.mark.slow),
        pytest.param("gan.py", "Adam: off by", marks=pytest.mark.slow),
        pytest.param("mixed.py fsdp2", "(FSDP2), 2 micro-batches", marks=pytest.mark.slow),
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
        pytest.param("chain.py", 0, "a mean over targets", marks=pytest.mark.slow),
        pytest.param("chain.py undivided", 1, "losses of micro-batches or ranks are added up", marks=pytest.mark.slow),
    ],
)
def test_two_models_are_judged(script: str, code: int, words: str) -> None:
    name, *arguments = script.split()
    found, printed = check("--nproc", 2, SCRIPTS / name, *arguments)
    assert found == code and words in printed and "changed between steps" not in printed, printed


@pytest.mark.slow
def test_values_are_clipped_losses_weighed_and_buffers_compared() -> None:
    code, printed = check("--nproc", 2, "--objective", "tokens", SCRIPTS / "two_losses.py", "schedule")
    assert code == 0 and "elements clipped to 0.01" in printed, printed
    assert "a mean over targets" in printed and "ranks 0 and 1 hold other values of center" in printed, printed
    assert "takes 2 steps for one of the optimizer" in printed, printed


@pytest.mark.parametrize(
    "way, code, words",
    [
        ("restarted", 0, "note: a new optimizer (from step 3 on)"),
        pytest.param("restored", 0, "note: optimizer state set by the script (from step 3 on)", marks=pytest.mark.slow),
        pytest.param("in_turn", 0, "RIGHT", marks=pytest.mark.slow),
        pytest.param("every_step", 1, "the optimizer is a new object at every step", marks=pytest.mark.slow),
    ],
)
def test_optimizers_that_follow_each_other(way: str, code: int, words: str) -> None:
    ended, printed = check("--nproc", 2, "--steps", 6, SCRIPTS / "optimizers.py", way)
    assert ended == code and words in printed, printed


@pytest.mark.slow
def test_a_buffer_that_the_first_rank_broadcasts_is_that_of_all() -> None:
    code, printed = check("--nproc", 2, SCRIPTS / "two_losses.py", "broadcast")
    assert code == 0 and "ranks 0 and 1 hold other values" not in printed, printed
    assert "the first rank's center replaces rank 1's at every forward pass" in printed, printed


@pytest.mark.parametrize(
    "script, words",
    [
        pytest.param("fsdp2 reduced_early", "micro-batch 2 of 2 has no part", marks=pytest.mark.slow),
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
        "deepspeed_loop.py 2 cpu_adam",
        "accelerate_loop.py zero 2",
        "hf_trainer.py zero 3",
    ],
)
def test_right_scripts_with_deepspeed_are_right(script: str) -> None:
    name, *arguments = script.split()
    code, printed = check("--nproc", 2, SCRIPTS / name, *arguments)
    assert code == 0 and f"RIGHT: {name}" in printed and "(DeepSpeed), 2 micro-batches" in printed, printed
    assert "clipping    norm" in printed and "a mean over" in printed, printed
    rule = "DeepSpeedCPUAdam" if "cpu_adam" in arguments else "AdamW"
    assert f"updates     {rule}: off by" in printed, printed


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_ranks, script",
    [
        (2, "sequence"),
        (2, ""),
        (4, "fsdp"),
        (4, "fsdp sequence"),
        (2, "loss_parallel"),
        (4, "fsdp sequence loss_parallel"),
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
        (2, "loss_parallel undivided", 1, "losses of micro-batches or ranks are added up"),
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


@pytest.mark.slow
def test_a_model_that_is_tried_out_before_it_is_wrapped_is_judged_as_wrapped() -> None:
    code, printed = check("--nproc", 2, SCRIPTS / "tried_first.py")
    assert code == 0 and "(FSDP2)" in printed, printed


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_objective_that_was_asked_for_decides(tmp_path: Path) -> None:
    script = ROOT / "examples" / "scripts" / "uneven.py"
    code, printed = check("--nproc", 2, "--objective", "tokens", "-o", tmp_path / "page.md", script)
    assert code == 1 and "a mean of the means of ranks" in printed, printed
    assert "# uneven.py: wrong" in (tmp_path / "page.md").read_text()


@pytest.mark.slow
def test_recordings_are_deleted_unless_they_are_to_be_kept(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    os.environ["TMPDIR"] = str(tmp_path / "temporary")
    try:
        assert check(SCRIPTS / "single_process.py")[0] == 0
        assert check("--nproc", 2, SCRIPTS / "gru_accumulation.py")[0] == 0
        assert [path.name for path in (tmp_path / "temporary").iterdir() if "inductor" not in path.name] == []
        assert check("--keep", tmp_path / "kept", SCRIPTS / "single_process.py")[0] == 0
    finally:
        del os.environ["TMPDIR"]
    assert (tmp_path / "kept").stat().st_mode & 0o077 == 0
    assert any((tmp_path / "kept").iterdir())


ANNOUNCES = """
import os, pathlib, sys, time, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(300):
    model(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    pathlib.Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(0.2)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending, num_ranks",
    [
        (signal.SIGKILL, 2),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.slow),
        (signal.SIGHUP, 1),
        pytest.param(signal.SIGKILL, 1, marks=pytest.mark.slow),
    ],
)
def test_neither_ranks_nor_recordings_outlive_the_command(
    tmp_path: Path, ending: signal.Signals, num_ranks: int
) -> None:
    """What `timeout`, CI's cancel, a closed terminal and the out-of-memory killer do."""
    for folder in ("temporary", "ranks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "announces.py").write_text(ANNOUNCES)
    command = [sys.executable, "-m", "meshmark", "check", "--nproc", str(num_ranks), "--steps", "200"]
    running = subprocess.Popen(
        [*command, "announces.py", "ranks"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(tmp_path / "temporary"),
            "MESHMARK_TEST": str(tmp_path),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=heed_signals,
    )

    try:
        wait_until(lambda: len(list((tmp_path / "ranks").iterdir())) == num_ranks, seconds=120)
        wait_until(lambda: any((tmp_path / "temporary").glob("meshmark-check-*/rank*-step*.pt")), seconds=60)
        running.send_signal(ending)
        running.wait(timeout=180)
        wait_until(lambda: not processes_of(str(tmp_path)), seconds=30)
        assert list((tmp_path / "temporary").glob("meshmark-check-*")) == []
    finally:
        for process in processes_of(str(tmp_path)):
            process.kill()


def test_processes_that_the_script_leaves_are_ended(tmp_path: Path) -> None:
    """They held the command's output open, so that whoever reads it waited for them."""
    leaves = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    (tmp_path / "leaves.py").write_text(leaves + (SCRIPTS / "gru_accumulation.py").read_text())
    code, printed = check("--nproc", 2, tmp_path / "leaves.py")
    assert code == 0 and "RIGHT: leaves.py" in printed, printed
    assert "meshmark check: ended 2 processes of the script" in printed, printed


@pytest.mark.slow
def test_recordings_go_when_torchrun_ends_the_first_rank(tmp_path: Path) -> None:
    """As it does where another rank has failed."""
    (tmp_path / "temporary").mkdir()
    source = ANNOUNCES.replace(
        "    time.sleep", "    assert step < 2 or os.environ['RANK'] == '0', 'ill'\n    time.sleep"
    )
    (tmp_path / "ill.py").write_text(source)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "meshmark.check", "--steps", "200", "ill.py", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "the script raised: on rank 1: AssertionError: ill" in done.stdout, done.stderr
    wait_until(lambda: not list((tmp_path / "temporary").glob("meshmark-check-*")), seconds=10)


@pytest.mark.slow
def test_torchruns_agent_listens_on_no_port(tmp_path: Path) -> None:
    """It would unpickle what a stranger writes there."""
    (tmp_path / "looks.py").write_text(
        "import os, psutil\n"
        "found = psutil.Process(os.getppid()).net_connections('inet')\n"
        "raise SystemExit(f'listens at {[c.laddr for c in found if c.status == psutil.CONN_LISTEN]}')\n"
    )
    code, printed = check("--nproc", 2, tmp_path / "looks.py")
    assert code == 4 and "listens at []" in printed, printed


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


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nothing_is_imported_from_the_working_directory(tmp_path: Path, num_ranks: int) -> None:
    """It may be a stranger's. What lies beside the script is the script's."""
    for folder in ("here", "scripts"):
        (tmp_path / folder).mkdir()
    (tmp_path / "here" / "numpy.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "scripts" / "beside.py").write_text("")
    (tmp_path / "scripts" / "script.py").write_text("import beside, sys\nprint('the path begins with', sys.path[0])\n")
    code, printed = check("--nproc", num_ranks, tmp_path / "scripts" / "script.py", folder=tmp_path / "here")
    assert code == 3 and f"the path begins with {tmp_path / 'scripts'}" in printed, printed
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_recordings_stay_where_the_command_was_given(tmp_path: Path) -> None:
    """A script may work in another folder. Its verdict was lost then: *its ranks ended without a word*."""
    (tmp_path / "elsewhere").mkdir()
    source = (SCRIPTS / "single_process.py").read_text()
    (tmp_path / "script.py").write_text(f"import os\nos.chdir('elsewhere')\n{source}")
    code, printed = check("--keep", "kept", tmp_path / "script.py", folder=tmp_path)
    assert code == 0 and list((tmp_path / "kept").iterdir()), printed


@pytest.mark.slow
def test_a_closed_output_is_no_wrong_script() -> None:
    command = f"exec {sys.executable} -m meshmark.check {SCRIPTS / 'single_process.py'} >&- 2>&-"
    done = subprocess.run(["sh", "-c", command], env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=240)
    assert done.returncode == 0


def test_a_folder_that_cannot_be_made_is_no_wrong_script(tmp_path: Path) -> None:
    """Its code was 1; with torchrun's own `-m meshmark.check` too, where another user may take the folder's name."""
    (tmp_path / "script.py").write_text("")
    keep = ["--keep", tmp_path / "no" / "folder", tmp_path / "script.py"]
    code, printed = check(*keep)
    assert code == 2 and "for recordings cannot be made: No such file" in printed, printed
    command = [sys.executable, "-m", "meshmark.check", *map(str, keep)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 2 and "for recordings cannot be made: No such file" in done.stderr, done.stderr


@pytest.mark.parametrize("taken", [False, True])
def test_ranks_meet_though_somebody_has_taken_the_folder_s_name(
    taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody who sees the launcher's number can make the folder before the ranks do."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(rank, "_remove_at_end", lambda _: None)
    first, second = rank._meeting_places()
    if taken:
        first.symlink_to(tmp_path)  # as a stranger's own folder, which root cannot make here for a test
    asked = argparse.Namespace(keep=None)
    place = rank.meeting_folder(asked, 0)
    assert place == (second if taken else first) and rank.meeting_folder(asked, 1) == place
    assert place.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("nothing.py",), "nothing.py"),
        (("--nproc", "0", "a.py"), "--nproc"),
        (("--nproc", "100000", "a.py"), "that many ranks need 9766 GiB before they import a model"),
    ],
)
def test_a_mistake_in_the_command_is_an_error(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    code, printed = check(*arguments, folder=tmp_path)
    assert code == 2 and words in printed, printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, code, text",
    [((), 0, "clipped to 0.05"), (("torch",), 1, "each rank clips by the norm of its own part of the gradients")],
)
def test_clipping_of_fsdp1_is_observed(arguments: tuple[str, ...], code: int, text: str) -> None:
    found, printed = check("--nproc", 2, SCRIPTS / "fsdp1_clip.py", *arguments)
    assert found == code and text in printed, printed


@pytest.mark.parametrize(
    "script, code, words",
    [
        pytest.param("averages.py restored", 0, "gradients   off by", marks=pytest.mark.slow),
        pytest.param(
            "averages.py kept",
            1,
            "set 0.weight and 3 more to 0.1 x the optimizer's + 0.09 x its value after step 0 + 0.81",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "averages.py swapped", 1, "to 0.9 x the optimizer's + 0.1 x its value before", marks=pytest.mark.slow
        ),
        pytest.param("averages.py clipped", 0, "to its own value, clipped to 0.1", marks=pytest.mark.slow),
        pytest.param(
            "penalties.py l2",
            0,
            "an L2 penalty of 0.003 x the sum of squares of first.weight and 1 more",
            marks=pytest.mark.slow,
        ),
        pytest.param("penalties.py large", 0, "an L2 penalty of 5 x the sum of squares", marks=pytest.mark.slow),
        pytest.param("penalties.py l1", 0, "an L1 penalty of 0.001 x the sum of absolute", marks=pytest.mark.slow),
        pytest.param("penalties.py norms", 0, "a penalty of 0.01 x the sum of the norms", marks=pytest.mark.slow),
        pytest.param("penalties.py l2 undivided", 1, "losses of micro-batches or ranks", marks=pytest.mark.slow),
        pytest.param("penalties.py kept", 3, "not by a penalty on weights", marks=pytest.mark.slow),
        ("sharpness.py", 0, "moved by 0.05 along the gradient of the first (sharpness-aware minimization)"),
        pytest.param("sharpness.py fsdp1", 0, "(sharpness-aware minimization)", marks=pytest.mark.slow),
        pytest.param("sharpness.py kept", 1, "zero_grad missing between the passes", marks=pytest.mark.slow),
        pytest.param("rates.py mean", 0, "AdamW: off by", marks=pytest.mark.slow),
        pytest.param("rates.py local", 1, "ReduceLROnPlateau is given 1.6", marks=pytest.mark.slow),
        pytest.param("rates.py by_rank", 1, "0.weight with lr = 0.01, and rank 1's with 0.02", marks=pytest.mark.slow),
        pytest.param("lightning_manual.py", 0, "clipping    norm", marks=pytest.mark.slow),
        pytest.param("lightning_manual.py kept", 1, "zero_grad missing", marks=pytest.mark.slow),
        pytest.param("lightning_manual.py two", 0, "6 steps of 2 ranks (DDP)", marks=pytest.mark.slow),
        pytest.param("coarse.py", 0, "judged by those of one process in the same precision", marks=pytest.mark.slow),
        pytest.param("coarse.py undivided", 1, "losses of micro-batches or ranks are added up", marks=pytest.mark.slow),
        pytest.param("coarse.py kept", 3, "only an error of", marks=pytest.mark.slow),
    ],
)
def test_what_a_script_does_to_weights_losses_and_rates_is_named(script: str, code: int, words: str) -> None:
    name, *arguments = script.split()
    found, printed = check("--nproc", 2, SCRIPTS / name, *arguments)
    assert found == code and words in printed and "bypassed" not in printed, printed


@pytest.mark.parametrize(
    "option, code, words",
    [
        ("first_only", 1, "of 2 micro-batches only number 1 is reduced over ranks"),
        pytest.param("local_norm", 1, "each rank scales its own part of the gradients", marks=pytest.mark.slow),
        pytest.param("by_parts", 3, "the model itself communicates between ranks", marks=pytest.mark.slow),
        pytest.param("transformed", 3, "torch.func calls the model", marks=pytest.mark.slow),
        pytest.param("functional", 3, "torch.func calls the model", marks=pytest.mark.slow),
        pytest.param("skips", 1, "wrong: a step of some ranks only (from step 1 on)", marks=pytest.mark.slow),
        pytest.param("fewer", 0, "steps that all ranks have ended are judged", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_act_apart(option: str, code: int, words: str) -> None:
    found, printed = check("--nproc", 2, SCRIPTS / "apart.py", option)
    assert found == code and words in printed, printed
    assert code == 1 or "wrong:" not in printed, printed


@pytest.mark.slow
def test_a_gather_with_a_right_backward_pass_is_not_noted_and_a_prepared_schedule_is_explained() -> None:
    code, printed = check("--nproc", 2, SCRIPTS / "factors.py", "gathered_back")
    assert code == 0 and "note:" not in printed, printed
    code, printed = check("--nproc", 2, SCRIPTS / "accelerate_loop.py")
    assert code == 0 and printed.count("note:") == 1 and "as Accelerate's prepared schedules do" in printed, printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "way, most, code, words",
    [
        ("in two", 0.25, 0, "all gradients are scaled to a norm of 0.25"),
        ("on parts", 0.25, 0, "all gradients are scaled to a norm of 0.25"),
        ("on parts", 0.1234, 3, "the script changes gradients in a hook or after the backward pass"),
    ],
)
def test_shards_that_are_clipped_by_hand_are_not_wrong(way: str, most: float, code: int, words: str) -> None:
    found, printed = check("--nproc", 2, SCRIPTS / "norm_by_hand.py", way, most)
    assert found == code and words in printed and "wrong:" not in printed, printed


@pytest.mark.slow
def test_two_agents_of_torchrun_meet_in_one_folder(tmp_path: Path) -> None:
    """Each node has an agent, whose process number is another."""
    port = str(free_port())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    meeting = ["--master-addr", "127.0.0.1", "--master-port", port, "-m", "meshmark.check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    agents = [
        subprocess.Popen(
            [*torchrun, "--node-rank", str(node), *meeting, str(SCRIPTS / "gru_accumulation.py")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    printed = [agent.communicate(timeout=120)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], printed
    assert "RIGHT: gru_accumulation.py" in printed[0] and "2 ranks (DDP)" in printed[0], printed
    wait_until(lambda: not [*tmp_path.glob("meshmark-check-*")], seconds=30)


@pytest.mark.slow
def test_ranks_of_torchrun_keep_their_recordings_in_a_new_folder(tmp_path: Path) -> None:
    """The first rank makes the folder, and others may come later."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [
        *torchrun,
        "-m",
        "meshmark.check",
        "--keep",
        str(tmp_path / "kept"),
        str(SCRIPTS / "gru_accumulation.py"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for code, words in ((0, "RIGHT: gru_accumulation.py"), (1, "it exists, and recordings need a new folder")):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == code and words in done.stdout + done.stderr, done


@pytest.mark.slow
def test_a_remainder_is_no_mean_that_was_asked_for() -> None:
    code, printed = check("--nproc", 2, "--objective", "rows", SCRIPTS / "factors.py", "remainder")
    assert code == 1 and "wrong: a remainder of micro-batches" in printed, printed


@pytest.mark.slow
def test_an_outer_step_is_no_defect_and_an_order_that_repeats_is_noted() -> None:
    code, printed = check("--nproc", 2, "--steps", 5, SCRIPTS / "averages.py", "lookahead")
    assert code == 0 and "to 0.5 x the optimizer's + 0.5 x its value before step 0" in printed, printed
    code, printed = check("--nproc", 2, "--steps", 4, SCRIPTS / "rates.py", "same_order")
    assert code == 0 and "begins epoch 0 again" in printed, printed
    code, printed = check("--nproc", 2, "--steps", 4, SCRIPTS / "rates.py", "mean")
    assert code == 0 and "again" not in printed, printed


@pytest.mark.slow
def test_a_loss_that_is_divided_by_more_than_its_targets_is_explained(tmp_path: Path) -> None:
    source = (SCRIPTS / "single_process.py").read_text()
    loss, divided = "labels[rows]) / ACCUMULATION", 'labels[rows], reduction="sum") / (13 * ACCUMULATION)'
    assert loss in source  # and a micro-batch has 10 rows
    (tmp_path / "shifted.py").write_text(source.replace(loss, divided))
    code, printed = check(tmp_path / "shifted.py")
    assert "it counts 0.7692 times: the loss of 30 targets is divided by 39" in printed, printed
    assert code == 0 and "note: divided by another number" in printed, printed


POSITIONS = """
import os
import torch
import torch.distributed as dist
import torch.nn.functional as F
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20))
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(4):
    words = torch.randint(20, (8, 16), generator=generator)
    targets = words.roll(1, 1)
    targets[:, 8:] = -100
    single = F.cross_entropy(model(words).flatten(0, 1), targets.flatten(), reduction="none")
    optimizer.zero_grad()
    (single.sum() / COUNT).backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "count, code, words",
    [
        ("targets.numel()", 0, "divided by 256, the number of all positions, of which the others do not count"),
        ("32", 1, "weights of targets add up to 2 ="),
    ],
)
def test_a_mean_over_all_positions_is_no_loss_divided_twice(tmp_path: Path, count: str, code: int, words: str) -> None:
    """Half of the positions count, on two ranks."""
    (tmp_path / "positions.py").write_text(POSITIONS.replace("COUNT", count))
    ended, printed = check("--nproc", 2, tmp_path / "positions.py")
    assert ended == code and words in printed, printed


@pytest.mark.slow
def test_labels_that_are_counted_before_they_are_shifted_are_named(tmp_path: Path) -> None:
    """Transformers' Trainer counts those of `GPT2LMHeadModel` so, whose name does not say that it is a causal model."""
    source = (SCRIPTS / "hf_trainer.py").read_text()
    model = "LlamaForCausalLM(config)"
    assert model in source
    source = source.replace(model, "GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=2))")
    (tmp_path / "gpt2.py").write_text("from transformers import GPT2Config, GPT2LMHeadModel\n" + source)
    code, printed = check("--nproc", 2, tmp_path / "gpt2.py")
    assert code == 0 and "one more for each row (are labels counted before they are shifted?)" in printed, printed
    code, printed = check("--nproc", 2, "--objective", "tokens", tmp_path / "gpt2.py")
    assert code == 1 and "wrong: divided by another number" in printed, printed


@pytest.mark.slow
def test_a_time_out_is_told_once_and_an_objective_has_a_reason(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    code, printed = check("--timeout", 3, tmp_path / "slow.py")
    assert code == 4 and "time-out: no verdict within the 3 seconds of --timeout" in printed, printed
    source = (SCRIPTS / "fsdp2_loop.py").read_text()
    line = "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
    assert line in source  # made too early, it holds tensors that no model has
    source = source.replace(line, "").replace("    model = Net()\n", f"    model = Net()\n{line}")
    (tmp_path / "early.py").write_text(source)
    code, printed = check("--nproc", 2, tmp_path / "early.py")
    assert code == 1 and "not judged: the optimizer steps on no gradient of the model" in printed, printed


def test_a_loss_that_is_no_number_is_named(tmp_path: Path) -> None:
    """And nothing else: neither the optimizer nor the objective is to blame."""
    source = (SCRIPTS / "single_process.py").read_text()
    assert "loss.backward()" in source
    (tmp_path / "nan.py").write_text(source.replace("loss.backward()", "(loss * float('nan')).backward()"))
    code, printed = check(tmp_path / "nan.py")
    assert code == 1 and "wrong: not finite (from step 0 on)" in printed and "no numbers" in printed, printed
    assert printed.count("wrong:") == 1, printed


@pytest.mark.parametrize(
    "option, code, words",
    [
        pytest.param("half", 0, "the script multiplies its loss by 0.5", marks=pytest.mark.slow),
        pytest.param("columns", 0, "it counts 2 times", marks=pytest.mark.slow),
        pytest.param("group", 0, "AdamW: off by", marks=pytest.mark.slow),
        pytest.param("remainder", 0, "a step of 1 of 2 micro-batches counts 0.5 times", marks=pytest.mark.slow),
        pytest.param("centred", 3, "the script changes gradients in a hook or after", marks=pytest.mark.slow),
        pytest.param("adaptive", 0, "each tensor by its own (clipping one by one", marks=pytest.mark.slow),
        pytest.param("slowed", 0, "0.bias and 1 more are the right gradient", marks=pytest.mark.slow),
        pytest.param("divided", 0, "a mean over targets, of rows and of ranks alike", marks=pytest.mark.slow),
        pytest.param("compressed", 0, "hook fp16_compress_hook, which may change them", marks=pytest.mark.slow),
        pytest.param("averaged", 0, "AdamW: off by", marks=pytest.mark.slow),
        pytest.param("halved", 1, "0.5 = 1 / the number of ranks times the right", marks=pytest.mark.slow),
        pytest.param(
            "gathered",
            1,
            "the gradient that passes it is 0.5 = 1 / the number of ranks times the right one",
            marks=pytest.mark.slow,
        ),
        pytest.param("gathered_own", 0, "takes other ranks' values for constants", marks=pytest.mark.slow),
        pytest.param("clipped_early", 1, "wrong: clipped before reduction", marks=pytest.mark.slow),
        pytest.param("evaluates", 1, "ranks 0 and 1 call modules in other modes", marks=pytest.mark.slow),
        pytest.param("stale", 1, "rank 1 reads the batch of the step before at every step", marks=pytest.mark.slow),
    ],
)
def test_factors_groups_and_gradients_of_a_script_s_own_are_no_defects(option: str, code: int, words: str) -> None:
    found, printed = check("--nproc", 2, SCRIPTS / "factors.py", option)
    assert found == code and words in printed and "not trained" not in printed, printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "way, code, words",
    [
        ("skips", 0, "RIGHT"),
        ("heads", 0, "2 terms weigh 1, 1"),
        ("parametrized", 0, "RIGHT"),
        ("mixup", 0, "a mean over targets, of rows and of ranks alike"),
        ("projects", 0, "RIGHT"),
        ("metric", 0, "a mean over targets, of rows and of ranks alike"),
        ("half", 1, "where a mean has 1: 2 calls of the model without a backward pass"),
        ("remembers", 0, "RIGHT"),
        ("reverses", 0, "RIGHT"),
        ("hides a state", 3, "it keeps a state that is not recorded. Recorded are parameters, buffers"),
        ("few rows", 0, "ranks read different rows"),
        ("parts", 0, "equal bit for bit before every step"),
        ("gathered", 0, "all_gather is called between forward and backward, and no gradient passes it"),
        ("faint", 0, "RIGHT"),
        ("faint left out", 1, "rank 0 steps on the gradient of its own rows only (faint)"),
        ("masters", 3, "the script steps on copies, such as masters in float32"),
        ("thawed", 1, "and 1 more: 2 = the number of ranks times the right gradient"),
        ("twice", 1, "gradient scaled (from step 0 on): 2.bias: 2 = the number of ranks"),
        ("unscaled", 1, "a GradScaler divides gradients by 65536, and the loss was not multiplied by it"),
        ("own counts", 1, "each rank scales the gradients by its own factor (0.5, 0.3333)"),
    ],
)
def test_unusual_ways_are_judged(way: str, code: int, words: str) -> None:
    ended, printed = check("--nproc", 2, SCRIPTS / "odd_ways.py", way)
    assert ended == code and words in " ".join(printed.split()), printed
    assert "not trained" not in printed and "the same rows" not in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "way, words",
    [
        ("same", ""),
        ("rows by rank", ""),
        ("chance", ""),
        ("temperature", "before its loss rank 0 has a division by 1, and rank 1 has a division by 2"),
        ("smoothing", "the loss of rank 0 alone has "),
        ("term", "the loss of rank 0 alone has AddBackward0, MeanBackward0, MulBackward0 and 1 more"),
        ("class weights", "classes or targets have weights on rank 0 alone"),
        ("dropout", "2.p is 0.1 on rank 0 and 0.5 on rank 1"),
    ],
)
def test_ranks_that_train_different_functions_are_noted(way: str, words: str) -> None:
    ended, printed = check("--nproc", 2, SCRIPTS / "rank_functions.py", way)
    assert ended == 0, printed
    told = " ".join(printed.split())
    assert words in told and ("ranks train different functions" in told) == bool(words), printed
    assert ("trains as one process would" in told) != bool(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way, words",
    [
        ("none", ""),
        ("ignored", ""),
        ("left out", ""),
        ("half", "8 of 16 targets of a step count in the loss"),
        ("half of one rank", "4 of 16 targets of a step count in the loss"),
        ("multiplied by 0", "6 of 16 targets of a step count in the loss"),
    ],
)
def test_rows_whose_outputs_are_detached_are_noted(way: str, words: str) -> None:
    ended, printed = check("--nproc", 2, SCRIPTS / "detached_rows.py", way)
    assert ended == 0, printed
    assert words in " ".join(printed.split()) and ("rows without a gradient" in printed) == bool(words), printed
    if words:
        ended, printed = check("--nproc", 2, "--objective", "tokens", SCRIPTS / "detached_rows.py", way)
        assert ended == 1, printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "way, num_ranks, code, words",
    [
        ("grid", 2, 0, "RIGHT"),
        ("mask first", 2, 0, "ranks read different rows"),
        ("pairs of ranks", 3, 1, "ranks 0 and 1 read the same rows at every step"),
        ("adversarial", 2, 0, "a pass for the gradients of inputs is no step either"),
        ("norm told", 2, 0, "clipped 2 times a step, without effect"),
        ("nan", 2, 0, "a step skipped (from step 1 on)"),
        ("adapted copies", 2, 3, "copies of a model are made and trained within a step"),
        ("clipped in a loop", 2, 0, "clipped to 0.01 (first step)"),
        ("clipped in hooks", 2, 0, "clipped to 0.01 (first step)"),
        ("last micro-batch", 2, 1, "2 calls of the model without a backward pass"),
        ("last micro-batch whole", 2, 1, "a backward pass after the loop over micro-batches?"),
        ("one micro-batch twice", 2, 0, "note: the same rows twice in a step"),
        ("real and made up", 2, 0, "its 2 terms weigh 1, 1"),
        ("loss told", 2, 0, "note: losses without a backward pass"),
        ("no pass on rank 1", 2, 1, "most of them on rank 1 (no backward pass there?)"),
        ("no pass on rank 1, blind", 2, 1, "rank 1 calls the model with gradients switched off"),
        ("cleared", 2, 1, "gradients are absent when the optimizer steps"),
        ("own rule", 2, 0, "has the gradients of one process in float64"),
        ("sharded rule", 2, 3, "a norm or a matrix function of a part"),
    ],
)
def test_rows_passes_and_clippings_of_other_kinds_are_judged(way: str, num_ranks: int, code: int, words: str) -> None:
    ended, printed = check("--nproc", num_ranks, SCRIPTS / "rows_and_passes.py", way)
    assert ended == code and words in " ".join(printed.split()), printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "way, code, words",
    [
        ("infinite norm", 0, "below 1e+06"),
        ("infinite norm, then halved", 1, "scaled by 0.5, as by a norm of 2e+06"),
        ("infinite norm, then random", 1, "steps on other gradients than those that were clipped"),
        ("infinite norm of a shard", 1, "each rank clips by the norm of its own part"),
        ("norm of order 1, then halved", 1, "scaled by 0.5, as by a norm of 2e+06"),
        ("a part clipped, another zeroed", 3, "the script changes gradients in a hook or after the backward pass"),
        ("a part clipped, another dropped", 1, "head"),
        ("weights shrink", 0, "between the gradients and the update, something other than the optimizer has set"),
        ("clips in a hook", 0, "clipped to 0.05"),
        ("warms up in a hook", 0, "RIGHT"),
        ("rounds in a hook after the step", 0, "the optimizer has set first.weight and 3 more to another value"),
        ("begins again", 0, "something other than the optimizer's steps has set its state of first.weight and 3 more"),
        ("state emptied", 1, "the optimizer's state is emptied before every step"),
        ("group taken out", 0, "RIGHT"),
        ("sparse", 0, "RIGHT"),
        ("sparse, not reduced", 1, "rank 0 steps on the gradient of its own rows only (words.weight)"),
        ("complex", 3, "parameters are complex numbers, such as filter"),
        ("compiled", 0, "RIGHT"),
        ("a small tensor lost", 1, "steps on other gradients than those that were clipped"),
        ("shares rows", 0, "up to 4 rows of one rank are read by another too"),
        ("hands rows on", 0, "one rank reads the rows that another has read in the step before"),
        ("asks for the norm first", 0, "clipped to 0.1"),
        ("clips twice", 0, "2 clippings, one after the other"),
        ("clips twice, then halves", 1, "gradients are not those that 2 clippings, one after the other, leave"),
        ("skips", 0, "gradients of 1 call of the model are cleared without a step of the optimizer, on all ranks"),
        ("another's gradient", 1, "no call of this step uses spare.weight, and the optimizer steps on a gradient"),
        ("communication hook", 0, "gradients pass DDP's communication hook"),
        ("communication hook that shifts", 3, "gradients pass DDP's communication hook"),
        ("summed in bfloat16", 0, "the script sums gradients over ranks in bfloat16, which rounds them"),
        ("summed in bfloat16, shifted", 1, "WRONG"),
        ("tiny gradients, divided by hand", 0, "RIGHT"),
        ("tiny gradients, divided twice by hand", 1, "0.5 = 1 / the number of ranks"),
        ("tiny steps", 0, "the direction alone is judged"),
        ("tiny steps, never made", 1, "4 of 4 wrong parameters did not move at all"),
        ("tiny steps upwards", 1, "first.weight and 3 more is not where the optimizer's rule leads"),
    ],
)
def test_what_comes_before_the_update_is_judged(way: str, code: int, words: str) -> None:
    ended, printed = check("--nproc", 2, "--steps", 4, SCRIPTS / "before_the_update.py", way)
    assert ended == code and words in " ".join(printed.split()), printed


@pytest.mark.slow
@pytest.mark.parametrize("option, code, words", [("right", 0, "RIGHT"), ("stale", 1, "gradient not cleared")])
def test_gradients_that_wait_for_their_optimizer_are_no_stale_ones(option: str, code: int, words: str) -> None:
    ended, printed = check("--nproc", 2, "--steps", 6, SCRIPTS / "heads_in_turn.py", option)
    assert ended == code and words in " ".join(printed.split()), printed


def test_a_script_that_catches_everything_and_never_ends_is_ended(tmp_path: Path) -> None:
    """As one does that skips bad batches."""
    loop = """
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    try:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 2)).backward()
        optimizer.step()
    except BaseException:
        pass
"""
    (tmp_path / "skips.py").write_text(loop)
    ended, printed = check("--nproc", 1, tmp_path / "skips.py")
    assert ended == 0 and "3 steps of 1 rank" in printed, printed


@pytest.mark.slow
def test_a_loss_that_weighs_targets_itself_is_no_wrong_mean() -> None:
    ended, printed = check("--nproc", 2, "--objective", "tokens", SCRIPTS / "odd_ways.py", "focal")
    assert ended == 3 and "the loss weighs single targets by itself, as a focal loss does" in printed, printed


PLAIN = """
import torch
from torch import nn
model = nn.Linear(WIDTH, WIDTH)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    inputs = torch.randn(8, WIDTH)
    loss = (model(inputs) - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_page_that_cannot_be_written_takes_no_verdict_away(tmp_path: Path) -> None:
    """The judge had run, and the command said that the script could not be."""
    (tmp_path / "plain.py").write_text(PLAIN.replace("WIDTH", "8"))
    (tmp_path / "folder").mkdir()
    code, printed = check("-o", tmp_path / "folder", tmp_path / "plain.py")
    assert code == 2 and "it is a folder, and the page is a file" in printed, printed
    code, printed = check("-o", "/proc/page.md", tmp_path / "plain.py")
    assert code == 2 and "RIGHT: plain.py" in printed, printed
    assert "/proc/page.md cannot be written" in printed and "Traceback" not in printed


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_is_no_fault_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wide.py").write_text(PLAIN.replace("WIDTH", "1200"))
    (tmp_path / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", tmp_path / "small"], check=True)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "small"))
    try:
        code, printed = check(tmp_path / "wide.py")
    finally:
        subprocess.run(["umount", "-l", tmp_path / "small"], check=True)
    assert code == 4 and "no space: no space for recordings in" in printed and "Traceback" not in printed, printed


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf"])
def test_a_size_of_recordings_that_cannot_be_is_refused(size: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    code, printed = check(f"--max-disk={size}", tmp_path / "script.py")
    assert code == 2 and "--max-disk must be a number of GB above 0" in printed, printed


REPLACED = """
import sys
import torch
import torch.nn.functional as F

if sys.argv[1] == "optimizer":  # as a library of fused optimizers does, wrongly
    own = torch.optim.AdamW.step

    def step(self, closure=None):
        for group in self.param_groups:
            group["betas"] = (0.5, 0.5)
        done = own(self, closure)
        for group in self.param_groups:
            group["betas"] = (0.9, 0.999)
        return done

    torch.optim.AdamW.step = step
if sys.argv[1] == "function":
    F.gelu = lambda inputs, approximate="none": F.silu(inputs)
if sys.argv[1] == "kernel":
    library = torch.library.Library("aten", "IMPL")
    library.impl("gelu", lambda inputs, *, approximate="none": torch.relu(inputs), "CPU", allow_override=True)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)

    def forward(self, inputs):
        return self.second(F.gelu(self.first(inputs)))


torch.manual_seed(0)
model = Network()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(5):
    loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "which, expected, words",
    [
        ("optimizer", 1, "replaced torch.optim.adamw.AdamW.step"),
        ("function", 0, "replaced torch.nn.functional.gelu; losses and gradients are judged by what is there now"),
        ("kernel", 3, "PyTorch's operators have other kernels, such as gelu/CPU; float64 would use them too"),
        ("nothing", 0, "RIGHT: replaced.py"),
    ],
)
def test_what_of_pytorch_a_script_replaces_is_told_and_no_update_is_judged_by_it(
    which: str, expected: int, words: str, tmp_path: Path
) -> None:
    """An update by a patched AdamW was compared with the patched AdamW."""
    (tmp_path / "replaced.py").write_text(REPLACED)
    code, printed = check(tmp_path / "replaced.py", which)
    assert code == expected, printed
    assert words in " ".join(printed.split()), printed
    assert ("replaced torch" in printed or "computes otherwise" in printed) == (which != "nothing"), printed

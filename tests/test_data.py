"""Batches: by (seed, step) alone, real text, unequal token counts; corpora that cannot serve."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshmark.errors import CorpusError
from meshmark.reference.data import HIDDEN, IGNORED, Batch, check_data, load_corpus, make_batch, standard_text
from meshmark.spec.workload import workload
from tests.factories import make_model, make_workload

WORKLOAD = make_workload(global_batch=12, model=make_model(seq_len=20))


def equal(one: Batch, two: Batch) -> bool:
    same = torch.equal(one.inputs, two.inputs) and torch.equal(one.targets, two.targets)
    return same and one.total_weight == two.total_weight


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    """Nothing that another layout, rank or run does to PyTorch's generators changes it."""
    first = make_batch(WORKLOAD, 3)
    torch.manual_seed(99)
    torch.randn(7)
    make_batch(WORKLOAD, 4)
    assert equal(first, make_batch(dataclasses.replace(WORKLOAD, name="other"), 3))


@pytest.mark.parametrize("seed, step", [(0, 4), (1, 3), (3, 0)])
def test_another_seed_or_step_is_another_batch(seed: int, step: int) -> None:
    first, other = make_batch(WORKLOAD, 3), make_batch(dataclasses.replace(WORKLOAD, seed=seed), step)
    assert not torch.equal(first.inputs, other.inputs)
    assert not torch.equal(first.targets == IGNORED, other.targets == IGNORED)


def test_rows_are_distinct_stretches_of_the_named_corpus() -> None:
    batch = make_batch(dataclasses.replace(WORKLOAD, corpus=__file__), 0)
    text = Path(__file__).read_bytes()
    rows = [bytes(row.tolist()) for row in batch.inputs.to(torch.uint8)]
    assert all(row in text for row in rows)
    assert len(set(rows)) == len(rows)


def test_targets_are_the_next_tokens() -> None:
    batch = make_batch(dataclasses.replace(WORKLOAD, masked=False), 0)
    assert torch.equal(batch.targets[:, :-1], batch.inputs[:, 1:])
    text = standard_text()
    assert all(bytes([*t.tolist(), int(y[-1])]) in text for t, y in zip(batch.inputs, batch.targets, strict=True))


def test_masking_hides_a_tail_and_changes_no_other_target() -> None:
    whole = make_batch(dataclasses.replace(WORKLOAD, masked=False), 0).targets
    masked = make_batch(WORKLOAD, 0).targets
    kept_BT = masked != IGNORED
    assert torch.equal(masked[kept_BT], whole[kept_BT])
    lengths = kept_BT.sum(1)
    assert torch.equal(kept_BT, torch.arange(20) < lengths[:, None]), "what is kept is a head of each row"
    assert ((lengths >= 5) & (lengths <= 20)).all()


def test_of_masked_text_some_bytes_are_to_be_found_again_most_of_them_hidden() -> None:
    encoder = dataclasses.replace(workload("bert-mini"), global_batch=64)
    masked, whole = make_batch(encoder, 0), make_batch(dataclasses.replace(encoder, masked=False), 0)
    assert torch.equal(masked.inputs, whole.inputs), "what counts changes nothing that the model sees"
    found_BT, hidden_BT = masked.targets != IGNORED, masked.inputs == HIDDEN
    changed_BT = masked.inputs != whole.targets
    assert torch.equal(masked.targets[found_BT], whole.targets[found_BT])
    assert not (changed_BT & ~found_BT).any(), "other bytes are as they were"
    num_found = int(found_BT.sum())
    assert 0.12 < num_found / found_BT.numel() < 0.18
    assert 0.7 < int(hidden_BT.sum()) / num_found < 0.9
    assert 0.04 < int((found_BT & ~changed_BT).sum()) / num_found < 0.18
    assert len(set(found_BT.sum(1).tolist())) > 3, "rows hold unequal numbers of targets"
    assert all(bytes(row.tolist()) in standard_text() for row in whole.targets)


def test_rows_shards_and_micro_batches_hold_unequal_numbers_of_tokens() -> None:
    """So that a mean of means is not the mean over all tokens."""
    batch = make_batch(WORKLOAD, 0)

    def counts(parts: list[Batch]) -> set[int]:
        return {int((part.targets != IGNORED).sum()) for part in parts}

    assert len(counts([batch.shard(rank, 2) for rank in range(2)])) == 2
    assert len(counts(list(batch.shard(0, 2).micro_batches(2)))) == 2
    assert len(counts([batch.rows(i, i + 1) for i in range(12)])) > 5


def test_the_total_weight_counts_the_unmasked_of_the_whole_batch_whichever_part_it_is() -> None:
    batch = make_batch(WORKLOAD, 0)
    assert batch.total_weight == int((batch.targets != IGNORED).sum()) < 12 * 20
    assert {part.total_weight for part in batch.micro_batches(4)} == {batch.total_weight}
    assert batch.to(torch.device("cpu")).total_weight == batch.total_weight
    assert make_batch(dataclasses.replace(WORKLOAD, masked=False), 0).total_weight == 12 * 20


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_shards_and_micro_batches_partition_the_batch_in_order(num_ranks: int, micro_batches: int) -> None:
    batch = make_batch(WORKLOAD, 0)
    if 12 % (num_ranks * micro_batches):
        micro_batches = 1
    parts = [m for r in range(num_ranks) for m in batch.shard(r, num_ranks).micro_batches(micro_batches)]
    assert torch.equal(torch.cat([p.inputs for p in parts]), batch.inputs)
    assert torch.equal(torch.cat([p.targets for p in parts]), batch.targets)
    assert {len(p.inputs) for p in parts} == {12 // num_ranks // micro_batches}


def test_the_default_corpus_is_english_text_of_some_size() -> None:
    text = standard_text()
    assert len(text) > 400_000
    assert text.count(b" the ") > 3000
    assert max(text) < 256 and len(set(text)) > 80
    assert load_corpus(None, 10).dtype is torch.uint8


def test_every_window_lies_within_the_corpus(tmp_path: Path) -> None:
    """Also when there is only one: the shortest corpus that will do gives the same row always."""
    file = tmp_path / "short.txt"
    file.write_bytes(bytes(range(65, 65 + 21)))
    batch = make_batch(dataclasses.replace(WORKLOAD, corpus=str(file), masked=False), 0)
    assert batch.inputs.tolist() == [list(range(65, 85))] * 12
    assert batch.targets.tolist() == [list(range(66, 86))] * 12


def test_a_corpus_that_is_one_byte_too_short_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_bytes(b"x" * 20)
    with pytest.raises(CorpusError, match="short.txt.* has 20 bytes; one sequence takes 21: name a longer file"):
        check_data(dataclasses.replace(WORKLOAD, corpus=str(file)))


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty.txt"
    file.touch()
    with pytest.raises(CorpusError, match="empty.txt' is empty; name a file with text"):
        check_data(dataclasses.replace(WORKLOAD, corpus=str(file)))


@pytest.mark.parametrize("name, reason", [("missing.txt", "No such file"), (".", "Is a directory")])
def test_a_corpus_that_cannot_be_read_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(CorpusError, match=f"cannot be read: {reason}.*; name an existing file"):
        check_data(dataclasses.replace(WORKLOAD, corpus=str(tmp_path / name)))


READ_WITHIN = """
import resource, sys
from meshmark.errors import CorpusError
from meshmark.reference.data import read_corpus
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + 100 * 2**20,) * 2)
try:
    read_corpus(sys.argv[1])
except CorpusError as error:
    print(error)
"""


def test_a_corpus_that_is_too_long_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A sparse file of 20 GB was read whole."""
    file = tmp_path / "sparse.txt"
    with file.open("wb") as sparse:
        sparse.truncate(20 * 10**9)
    command = [sys.executable, "-c", READ_WITHIN, str(file)]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "sparse.txt' has 20,000,000,000 bytes; expected at most 1,073,741,824" in done.stdout


def test_a_vocabulary_without_all_bytes_is_refused() -> None:
    with pytest.raises(CorpusError, match="vocabulary of 255; byte-level data needs 256"):
        check_data(make_workload(model=make_model(vocab_size=255)))


def test_a_good_corpus_is_accepted() -> None:
    assert check_data(WORKLOAD) is None

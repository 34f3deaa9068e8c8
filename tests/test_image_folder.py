"""Images of the user's in the place of the digits."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from meshmark.adapter.registry import load_adapter
from meshmark.adapters import ADAPTERS
from meshmark.conformance.scenario import plain_cells
from meshmark.errors import CorpusError, InputError
from meshmark.models.module import build_model
from meshmark.reference.data import check_data, data_digest, load_images, make_batch, on_corpus, shown
from meshmark.spec.workload import Workload, workload

ROOT = Path(__file__).parent.parent
VIT = workload("vit-digits")


@pytest.fixture(autouse=True)
def _afresh() -> None:
    load_images.cache_clear()


def image(path: Path, shade: int | tuple[int, int, int], side: int | tuple[int, int] = 16) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    size = side if isinstance(side, tuple) else (side, side)
    Image.new("L" if isinstance(shade, int) else "RGB", size, shade).save(path)


def folder_of(path: Path) -> Path:
    """Two classes of grey images, 16 x 16, and what file managers leave."""
    for name, shades in {"cats": (0, 51), "dogs": (255,)}.items():
        for shade in shades:
            image(path / name / f"{shade:03}.png", shade)
    (path / ".DS_Store").touch()
    (path / "cats" / ".hidden").touch()
    return path


def on(path: Path, base: Workload = VIT) -> Workload:
    return on_corpus(base, str(path))


def test_images_come_in_the_order_of_names_with_their_classes(tmp_path: Path) -> None:
    images, labels = load_images(str(folder_of(tmp_path)))
    assert images.shape == (3, 1, 16, 16)
    images = shown(images)
    assert images[:, 0, 0, 0].tolist() == [0.0, 51 / 256, 255 / 256]
    assert labels.tolist() == [0, 0, 1]
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(images.to(dtype).float(), images)


def test_coloured_images_have_three_channels_and_grey_ones_among_them_too(tmp_path: Path) -> None:
    folder_of(tmp_path)
    image(tmp_path / "dogs" / "red.png", (128, 0, 64))
    images, _ = load_images(str(tmp_path))
    assert shown(images)[:, :, 3, 5].tolist() == [[0.0] * 3, [51 / 256] * 3, [255 / 256] * 3, [0.5, 0.0, 0.25]]


@pytest.mark.parametrize("name", ["vit-digits", "resnet-digits", "coatnet-digits", "amoebanet-digits"])
def test_a_model_takes_the_size_and_the_classes_of_the_images(tmp_path: Path, name: str) -> None:
    found = on(folder_of(tmp_path / "my pets"), workload(name))
    assert re.fullmatch(rf"{name}\.my_pets\.[0-9a-f]{{8}}", found.name)
    assert (found.model.image_size, found.model.num_channels, found.model.num_classes) == (16, 1, 2)  # type: ignore[union-attr]
    check_data(found)
    batch = make_batch(found, 0)
    model = build_model(found.model)
    model.initialize(0)
    assert model(batch.inputs).shape == (32, 2)
    assert {int(label) for label in batch.targets.unique()} <= {-100, 0, 1}


def test_other_images_are_another_workload(tmp_path: Path) -> None:
    one, same, other = (folder_of(tmp_path / name / "pets") for name in ("a", "b", "c"))
    image(other / "dogs" / "255.png", 254)
    assert on(one).name == on(same).name != on(other).name
    assert data_digest(on(one)) == data_digest(on(same)) != data_digest(on(other))
    assert data_digest(on(one)) != data_digest(VIT)


def test_a_workload_on_images_keeps_its_name(tmp_path: Path) -> None:
    """Published records go by the digest of images in float32, in whatever way they are kept."""
    folder_of(tmp_path / "pets")
    assert on(tmp_path / "pets").name == "vit-digits.pets.9d6150c4"
    image(tmp_path / "pets" / "dogs" / "red.png", (128, 0, 64))
    load_images.cache_clear()
    assert on(tmp_path / "pets").name == "vit-digits.pets.8a9b4147"
    assert data_digest(on(tmp_path / "pets")).startswith("8a9b4147")
    assert make_batch(on(tmp_path / "pets"), 0).inputs.dtype is torch.float32


LIMITED = """
import resource, sys
from meshmark.errors import CorpusError
from meshmark.reference.data import on_corpus
from meshmark.spec.workload import workload
from PIL import BmpImagePlugin, PngImagePlugin
workload("vit-digits")
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + int(sys.argv[2]) * 2**20,) * 2)
try:
    on_corpus(workload("vit-digits"), sys.argv[1])
except CorpusError as error:
    print(error)
"""


def told_within(megabytes: int, path: Path) -> str:
    """Take a folder of images with so much memory, in a process of its own, and return what it prints."""
    command = [sys.executable, "-c", LIMITED, str(path), str(megabytes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def copies(folder: Path, side: int, count: int, colour: int | tuple[int, int, int]) -> Path:
    """Two classes, in each `count` times one image."""
    image(folder / "a" / "0.png", colour, side)
    (folder / "b").mkdir()
    for name, start in {"a": 1, "b": 0}.items():
        for i in range(start, count):
            os.link(folder / "a" / "0.png", folder / name / f"{i}.png")
    return folder


def test_an_image_that_is_too_large_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    """Two files of 258 kB took 3.5 GB."""
    told = told_within(100, copies(tmp_path, 9000, 1, (1, 2, 3)))
    assert "0.png has 9000 x 9000 pixels; expected at most 1024 x 1024: scale the images down" in told


MEASURED = """
import re, sys
from meshmark.reference.data import load_images, on_corpus
from meshmark.spec.workload import workload
from PIL import BmpImagePlugin, PngImagePlugin
def peak_kb():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
before = peak_kb()
on_corpus(workload("vit-digits"), sys.argv[1])
print((peak_kb() - before) * 1024, *load_images(sys.argv[1])[0].shape)
"""


def test_images_take_a_byte_a_value(tmp_path: Path) -> None:
    """Eighty copies of 3 MB, and no other of all of them at once. What is freed of single images, up to 75 MB, may
    stay with the process."""
    command = [sys.executable, "-c", MEASURED, str(copies(tmp_path, 1000, 40, (1, 2, 3)))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    peak, *shape = map(int, done.stdout.split())
    assert shape == [80, 3, 1000, 1000]
    assert math.prod(shape) <= peak < 1.5 * math.prod(shape)


def test_images_that_are_too_large_together_are_refused_before_any_is_decoded(tmp_path: Path) -> None:
    told = told_within(100, copies(tmp_path, 1024, 513, 7))
    assert "1026 images of 1024 x 1024 pixels have 1,075,838,976 values; expected at most 1,073,741,824" in told


def test_what_cannot_be_trained_on_is_refused_with_its_reason(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CorpusError, match="empty' is empty; expected a subfolder a class"):
        on(empty)
    image(tmp_path / "flat" / "one.png", 1)
    with pytest.raises(CorpusError, match="flat' has no class folders; expected a subfolder a class"):
        on(tmp_path / "flat")
    image(tmp_path / "single" / "cats" / "one.png", 1)
    with pytest.raises(CorpusError, match="has one class folder, 'cats'.*at least two classes"):
        on(tmp_path / "single")
    with pytest.raises(CorpusError, match="nowhere' cannot be read: No such file"):
        on(tmp_path / "nowhere")
    with pytest.raises(CorpusError, match="one.png' cannot be read: Not a directory; images are a folder"):
        on(tmp_path / "flat" / "one.png")


def test_a_class_without_images_is_refused(tmp_path: Path) -> None:
    (folder_of(tmp_path) / "birds").mkdir()
    with pytest.raises(CorpusError, match="class folder 'birds' is empty"):
        on(tmp_path)


@pytest.mark.parametrize(
    "side, message", [(8, "unequal size: .*000.png has 16 .* side, .*odd.png 8"), ((16, 8), "odd.png has 16 x 8")]
)
def test_images_that_do_not_go_together_are_refused(tmp_path: Path, side: int | tuple[int, int], message: str) -> None:
    image(folder_of(tmp_path) / "dogs" / "odd.png", 1, side)
    with pytest.raises(CorpusError, match=message):
        on(tmp_path)


@pytest.mark.parametrize("content", [b"no image", b""], ids=["text", "empty"])
def test_a_file_that_is_no_image_is_named(tmp_path: Path, content: bytes) -> None:
    (folder_of(tmp_path) / "dogs" / "notes.txt").write_bytes(content)
    with pytest.raises(CorpusError, match=r"notes.txt cannot be read as an image \(.*\): cannot identify image file"):
        on(tmp_path)


def test_an_image_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = folder_of(tmp_path) / "dogs" / "255.png"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(CorpusError, match="255.png cannot be read as an image"):
        on(tmp_path)


@pytest.mark.parametrize("kind, mode", [("uint16", "I;16"), ("int32", "I"), ("float32", "F")])
def test_pixels_of_more_than_eight_bits_are_refused(tmp_path: Path, kind: str, mode: str) -> None:
    """Pillow makes nearly all of them white."""
    Image.fromarray(np.arange(256, dtype=kind).reshape(16, 16)).save(folder_of(tmp_path) / "dogs" / "deep.tiff")
    with pytest.raises(CorpusError, match=f"deep.tiff cannot .*: its pixels have .* mode {mode!r}; expected 8 bits"):
        on(tmp_path)


def test_grey_images_that_tell_how_opaque_they_are_are_grey(tmp_path: Path) -> None:
    Image.new("LA", (16, 16), (7, 128)).save(folder_of(tmp_path) / "dogs" / "thin.png")
    images, _ = load_images(str(tmp_path))
    assert images.shape == (4, 1, 16, 16) and shown(images)[3].unique().tolist() == [7 / 256]


def test_a_format_that_is_not_read_is_told_with_those_that_are(tmp_path: Path) -> None:
    path = folder_of(tmp_path) / "dogs" / "odd.dds"
    Image.new("RGB", (16, 16)).save(path)
    with pytest.raises(CorpusError, match=r"odd.dds cannot be read as an image \(BMP, .* or WEBP\): cannot identify"):
        on(tmp_path)


def test_clauses_which_train_text_leave_a_corpus_of_images_alone(tmp_path: Path) -> None:
    ddp = load_adapter(ADAPTERS["ddp"])
    assert plain_cells("ddp", ddp, 2, corpus=str(folder_of(tmp_path))) == plain_cells("ddp", ddp, 2)


def test_a_size_that_a_model_cannot_take_is_refused(tmp_path: Path) -> None:
    for name in ("cats", "dogs"):
        image(tmp_path / name / "one.png", 1, side=7)
    with pytest.raises(InputError, match="image_size 7 is not divisible by patch_size 2"):
        on(tmp_path)

"""containers/: what can be known of them without building one, which takes a network and an hour."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "containers" / "Dockerfile").read_text()
APPTAINER = (ROOT / "containers" / "meshmark.def").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
(PROJECT_BUILD,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
INSTRUCTIONS = ("ARG", "FROM", "RUN", "COPY", "WORKDIR", "ENTRYPOINT", "ENV")
SECTIONS = ("files", "post", "runscript", "help", "environment", "labels", "test")


def instructions() -> list[tuple[str, str]]:
    lines = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    words = [line.split(maxsplit=1) for line in lines if line.strip()]
    return [(name, rest) for name, rest in words]


def sections() -> dict[str, str]:
    parts = re.split(r"^%(\w+)$", APPTAINER, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_a_dockerfile_is_instructions_whose_shell_is_shell() -> None:
    assert {name for name, _ in instructions()} <= set(INSTRUCTIONS)
    assert [name for name, _ in instructions()][:2] == ["ARG", "FROM"]
    for name, rest in instructions():
        if name == "RUN":
            subprocess.run(["bash", "-n"], input=rest, text=True, check=True)
        if name == "ENTRYPOINT":
            assert json.loads(rest)[:3] == ["pytest", "--pyargs", "meshmark.suites"]


def test_an_apptainer_recipe_is_sections_whose_shell_is_shell() -> None:
    assert set(sections()) <= set(SECTIONS) and APPTAINER.startswith("Bootstrap: docker\nFrom: ")
    for name in ("post", "runscript"):
        subprocess.run(["bash", "-n"], input=sections()[name], text=True, check=True)
    assert 'pytest --pyargs meshmark.suites "$@"' in sections()["runscript"]


@pytest.mark.parametrize("text", [DOCKERFILE, APPTAINER], ids=["docker", "apptainer"])
def test_packages_go_into_an_environment_over_the_images_own(text: str) -> None:
    """PyTorch's images since 2.10 are Debian's Python, which pip refuses to change, without ensurepip, and with a
    setuptools that cannot read pyproject.toml."""
    (made,) = re.findall(r"python3 -m venv --system-site-packages --without-pip (\S+)", text)
    assert f"PATH={made}/bin:" in text
    installs = [match.start() for match in re.finditer(r"pip install", text)]
    assert installs and text.index("-m venv") < min(installs)
    assert all(text[:start].endswith("python -m ") for start in installs), "another pip is another Python's"
    assert text.index(f'"{PROJECT_BUILD}"') < text.index("--no-build-isolation")


@pytest.mark.parametrize("text", [DOCKERFILE, APPTAINER], ids=["docker", "apptainer"])
def test_what_is_installed_is_there_to_install(text: str) -> None:
    """Extras, and files of the checkout; every framework but the one that is installed by itself."""
    (extras,) = re.findall(r'"\.\[([\w,-]+)\]"', text)
    everything = re.findall(r"[\w-]+", PROJECT["optional-dependencies"]["all"][0].partition("[")[2])
    assert {*extras.split(","), "megatron-core"} == set(everything) and "--no-deps megatron-core" in text
    assert all((ROOT / name).exists() for name in re.findall(r" -c ([\w.]+\.txt)", text))


def test_base_images_are_pinned_and_new_enough() -> None:
    """A tag that moves is another machine next week. CUDA's is the one that docs/containers.md names."""
    page = (ROOT / "docs" / "containers.md").read_text()
    bases = re.findall(r"(?:^ARG BASE=|^From: |BASE=)(\S+)", DOCKERFILE + APPTAINER + page, re.MULTILINE)
    tags = [base.partition(":") for base in bases if "TAG" not in base]
    assert tags and all(colon and tag and tag != "latest" for _, colon, tag in tags)
    (least,) = [one.partition(">=")[2] for one in PROJECT["dependencies"] if one.startswith("torch>=")]
    for image, _, tag in tags:
        wanted, found = (
            (least, tag.partition("-")[0]) if image == "pytorch/pytorch" else (PROJECT["requires-python"][2:], tag)
        )
        assert tuple(map(int, found.split(".")[:2])) >= tuple(map(int, wanted.split(".")[:2])), (image, tag)
        assert image != "pytorch/pytorch" or tag.endswith("-devel"), "frameworks compile"
    assert {tag for image, _, tag in tags if image == "pytorch/pytorch"} == {"2.11.0-cuda12.8-cudnn9-devel"}

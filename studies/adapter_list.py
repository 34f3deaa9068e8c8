"""The page docs/adapters.md: every adapter in a line, in the words of its class or module.

python -m studies.adapter_list
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from meshmark.adapter.contract import Adapter
from meshmark.adapter.registry import builtin_adapters, core_adapters, load_adapter
from meshmark.spec.algorithm import SYNCHRONOUS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "adapters.md"
TITLES = {
    "PyTorch": (),
    "DeepSpeed": ("deepspeed",),
    "Megatron-Core": ("megatron",),
    "Accelerate": ("accelerate",),
    "FairScale": ("fairscale",),
    "Lightning Fabric": ("fabric",),
    "Horovod": ("horovod",),
    "torchtitan": ("torchtitan",),
    "Trainers and loops": ("hf_trainer", "plain_loop", "pytorch_lightning", "trl"),
}
"""Modules or folders of adapters/ by the title that they stand under. The first title has all others."""
_ALGORITHMS = "Algorithms that are not synchronous"
_INTRODUCTION = """# Adapters

Every adapter that Meshmark ships. Those in **bold** run by default. The others run where you name them, for example by
`pytest suites --adapters fsdp2-hsdp`, or all together by `make roster`. Names may be patterns, such as `'fsdp2*'`.
`meshmark doctor` says which of them can run on this machine. [Systems](systems.md) has what is not supported of each
framework, and [the conformance table](../reports/conformance.md) which clauses each adapter keeps.

Made by `python -m studies.adapter_list` from the docstrings of the adapters; edit those."""


def page() -> str:
    """Return the page: a list for each title, in the order of the registry."""
    lists: dict[str, list[str]] = {title: [] for title in (*TITLES, _ALGORITHMS)}
    for name, target in builtin_adapters().items():
        adapter = load_adapter(target)
        lists[_title(adapter)].append(_item(name, adapter))
    return (
        "\n\n".join([_INTRODUCTION, *(f"## {title}\n\n" + "\n".join(items) for title, items in lists.items())]) + "\n"
    )


def summary(adapter: type[Adapter]) -> str:
    """Return the first paragraph of the class's own docstring, or of its module's if the class has none."""
    text = adapter.__dict__.get("__doc__") or sys.modules[adapter.__module__].__doc__ or ""
    return " ".join(text.partition("\n\n")[0].split())


def _title(adapter: type[Adapter]) -> str:
    place = adapter.__module__.removeprefix("meshmark.adapters.").partition(".")[0]
    other = next(iter(TITLES)) if SYNCHRONOUS.kind in adapter.capabilities.algorithms else _ALGORITHMS
    return next((title for title, places in TITLES.items() if place in places), other)


def _item(name: str, adapter: type[Adapter]) -> str:
    file = Path(sys.modules[adapter.__module__].__file__ or "").resolve().relative_to(ROOT)
    shown = f"**{name}**" if name in core_adapters() else name
    text = f"- [{shown}](../{file.as_posix()}): {summary(adapter)}"
    return textwrap.fill(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE.relative_to(ROOT))

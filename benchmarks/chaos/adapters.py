"""Real adapters under many names, each of which is one case of a session: `ddp_7` is `ddp` for the seventh time.

Each tells when its case begins, in the process that launches it: what has begun must leave a record.
"""

from __future__ import annotations

import os
from typing import Any

from meshmark.adapter.contract import Adapter
from meshmark.adapter.registry import builtin_adapters, load_adapter

BEGUN = "MESHMARK_CHAOS_BEGUN"
"""Variable with the file that the names of cases are appended to as they begin."""


def __getattr__(name: str) -> type[Adapter]:
    base, _, number = name.rpartition("_")
    target = builtin_adapters().get(base.replace("_", "-"))
    if not target or not number.isdigit():
        raise AttributeError(name)
    whole = load_adapter(target)

    class Numbered(whole):  # type: ignore[misc, valid-type]
        @classmethod
        def modules(cls) -> list[str]:
            with open(os.environ[BEGUN], "a") as begun:
                begun.write(f"{name}\n")
            named: list[str] = whole.modules()
            return named

    found: Any = Numbered
    return found  # type: ignore[no-any-return]

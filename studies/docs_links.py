"""A hook of mkdocs: pages link to files of the repository, which are no pages of the site; they become their paths."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
_OUTWARD = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Raises `FileNotFoundError` for a link to a file that is not there."""
    return _OUTWARD.sub(_as_path, markdown)


def _as_path(link: re.Match[str]) -> str:
    label, path = link[1], link[2].removeprefix("../")
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"a page of docs/ links to {path}, which is not there")
    return label if path.endswith(label.strip("`")) else f"{label} ({path})"

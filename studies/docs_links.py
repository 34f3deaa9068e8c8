"""A hook of mkdocs: links to files of the repository that are no pages of the site become the paths of these files.

Pages of docs/ stand at the top of the site, those of reports/ in a folder of that name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_OUTWARD = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(#[^)]*)?\)")
_PAGES = re.compile(r"reports/[\w-]+\.(?:md|svg)")


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:  # noqa: ANN401
    """Return the page with its links as the site has them.

    Raises `FileNotFoundError` for a link to a file that is not there.
    """
    folder = page.file.src_uri.rpartition("/")[0]
    return markdown if folder == "frameworks" else _OUTWARD.sub(lambda link: _rewritten(link, folder), markdown)


def _rewritten(link: re.Match[str], folder: str) -> str:
    label, path, anchor = link[1], link[2].removeprefix("../"), link[3] or ""
    if not folder and _PAGES.fullmatch(path) and (ROOT / path).exists():
        return f"[{label}]({path}{anchor})"
    if folder and path.startswith("docs/") and (ROOT / path).exists():
        return f"[{label}](../{path.removeprefix('docs/')}{anchor})"
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"a page links to {path}, which is not there")
    return label if path.endswith(label.strip("`")) else f"{label} ({path})"

"""Build the site of this version into results/site/VERSION, beside the sites of other versions.

    python -m studies.docs_versions

Folders of other versions stay as they are. What is built works from `file://` and as it is on GitHub Pages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version

from meshmark import __version__

ROOT = Path(__file__).parents[1]
SITE = ROOT / "results" / "site"


def write_list(site: Path) -> list[str]:
    """Write the list of the versions in a folder, and the page that leads to the newest. Returns them, newest first."""
    versions = sorted(filter(_is_version, (page.parent.name for page in site.glob("*/index.html"))), key=Version)[::-1]
    (site / "versions.js").write_text(f"window.MESHMARK_VERSIONS = {json.dumps(versions)};\n", encoding="utf-8")
    newest = f"{versions[0]}/index.html"
    (site / "index.html").write_text(
        '<!doctype html><meta charset="utf-8"><title>Meshmark</title>'
        f'<meta http-equiv="refresh" content="0; url={newest}">'
        f'<a href="{newest}">Meshmark {versions[0]}</a>\n',
        encoding="utf-8",
    )
    (site / ".nojekyll").touch()  # GitHub Pages then serves all files as they are
    return versions


def _is_version(name: str) -> bool:
    try:
        Version(name)
    except InvalidVersion:
        return False
    return True


def main() -> int:
    folder = SITE / __version__
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(build, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=False)
    if built.returncode:
        return built.returncode
    print(f"{SITE / 'index.html'}: {', '.join(write_list(SITE))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The list of the site's versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from studies.docs_versions import write_list
from tests.browser import chromium


def test_versions_are_listed_the_newest_first_and_other_folders_are_not(tmp_path: Path) -> None:
    for name in ("0.9.0", "0.10.0", "assets"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text(name)
    (tmp_path / "1.0.0").mkdir()  # holds no site
    assert write_list(tmp_path) == ["0.10.0", "0.9.0"]
    assert json.loads((tmp_path / "versions.js").read_text().partition(" = ")[2].rstrip(";\n")) == ["0.10.0", "0.9.0"]
    assert "url=0.10.0/index.html" in (tmp_path / "index.html").read_text()
    assert (tmp_path / "0.9.0" / "index.html").read_text() == "0.9.0"


@pytest.mark.slow
def test_the_list_leads_to_another_version(tmp_path: Path) -> None:
    switcher = (Path(__file__).parents[1] / "docs" / "versions.js").read_text()
    for name in ("0.9.0", "0.10.0"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "versions.js").write_text(switcher)
        for page, script in (("index.html", "versions.js"), ("deep/index.html", "../versions.js")):
            (tmp_path / name / page).write_text(f"<div class=md-header__title></div><script src={script}></script>")
    write_list(tmp_path)
    with chromium() as browser:
        page = browser.new_page()
        page.goto((tmp_path / "index.html").as_uri())
        page.wait_for_url("**/0.10.0/index.html")
        page.goto((tmp_path / "0.10.0" / "deep" / "index.html").as_uri())
        page.wait_for_selector("select.version")
        assert page.input_value("select.version") == "0.10.0"
        page.select_option("select.version", "0.9.0")
        page.wait_for_url("**/0.9.0/index.html")

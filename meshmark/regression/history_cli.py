"""The command `history`: change points in words, and a plot per case."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshmark.errors import InputError, MeshmarkError, ResultsError
from meshmark.regression.history import ChangePoint, Series, change_points, series_of
from meshmark.regression.run_file import Run, read_run
from meshmark.report.table import one_line, visible
from meshmark.text import pluralize

if TYPE_CHECKING:
    from matplotlib.text import Text  # takes half a second, and no plot is usual

_LONGEST = 150
"""Characters of a case in a plot's title and file name."""


def add_history(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="results folders of runs, in any order")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="write a plot per case there (default: none)")
    parser.add_argument("--case", metavar="TEXT", default="", help="only cases whose id holds this")
    parser.set_defaults(run=_history)


def _history(parsed: argparse.Namespace) -> None:
    runs = _read(parsed.folders)
    machines = sorted({run.machine for run in runs})
    all_series = [series for series in series_of(runs) if parsed.case in series.case]
    if not all_series:
        raise ResultsError(f"--case {parsed.case!r}: no case of {len(runs)} runs holds it")
    found = change_points(all_series)
    print(
        f"{pluralize(len(runs), 'run')}, {pluralize(len({s.case for s in all_series}), 'case')}, "
        f"{len(all_series)} series"
    )
    if len(machines) > 1:
        print(f"of {len(machines)} machines, so that times may change with them: {one_line(', '.join(machines))}")
    for point in found:
        print(one_line(str(point)))
    print(pluralize(len(found), "change"))
    if parsed.output:
        try:
            paths = plot(all_series, found, parsed.output)
        except OSError as error:
            raise InputError(f"cannot write {str(parsed.output)!r}: {error.strerror}; -o takes a folder") from error
        for path in paths:
            print(path)


def _read(folders: Sequence[Path]) -> list[Run]:
    """Return the runs that can be read. Raises `ResultsError` if fewer than two can."""
    runs = list[Run]()
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except MeshmarkError as error:
            print(f"meshmark: left out {one_line(str(error))}", file=sys.stderr)
            continue
        if runs[-1].left_out:
            print(f"meshmark: {folder}: left out {one_line(runs[-1].left_out)}", file=sys.stderr)
    if len(runs) < 2:
        raise ResultsError(
            f"{len(runs)} of {pluralize(len(folders), 'folder')} can be read: a history takes at least 2"
        )
    return runs


def plot(all_series: Sequence[Series], found: Sequence[ChangePoint], folder: Path) -> list[Path]:
    """Write one file per case, with a panel per metric and a line at every change."""
    import matplotlib

    matplotlib.rcdefaults()  # a matplotlibrc in the working directory may be a stranger's, and ask for LaTeX
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    paths = list[Path]()
    for case in dict.fromkeys(series.case for series in all_series):
        own = [series for series in all_series if series.case == case]
        figure, axes = plt.subplots(len(own), 1, figsize=(8, 1.8 * len(own)), squeeze=False, sharex=False)
        for panel, series in zip(axes[:, 0], own, strict=True):
            panel.plot(range(len(series.values)), series.values, ".-", markersize=3, linewidth=0.7)
            panel.set_ylabel(series.metric, fontsize=7)
            for point in found:
                if point.series is series:
                    panel.axvline(point.index - 0.5, color="tab:red", linewidth=0.8)
                    text = panel.annotate("", (point.index, panel.get_ylim()[1]), fontsize=6, va="top")
                    _say(text, point.run.commit[:10])
        _say(figure.suptitle("", fontsize=8), case[:_LONGEST])
        figure.tight_layout()
        path = folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', case)[:_LONGEST]}.svg"
        if path in paths:  # of ids that differ in what no file's name may hold, or far behind
            path = path.with_stem(f"{path.stem}-{len(paths) + 1}")
        figure.savefig(path)
        plt.close(figure)
        paths.append(path)
    return paths


def _say(place: Text, text: str) -> None:
    """Set a text from a record: without math parsing, and without characters that no file can hold."""
    place.set_parse_math(False)
    place.set_text(visible(text))

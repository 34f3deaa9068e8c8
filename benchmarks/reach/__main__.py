"""`python -m benchmarks.reach`: run judged passes under coverage.py, and write the page reports/reach.md.

Passes stay in results/reach, so that a run goes on where it was cut off. The summary, from which the page is made, is
baselines/reach/measured.json. `--page` runs nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.reach.attempts import read_readings, tried_before
from benchmarks.reach.measured import MEASURED, added, load, measure, save
from benchmarks.reach.page import page
from benchmarks.reach.runs import keep, run, units

PAGE = Path("reports/reach.md")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reach", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="begin no more after that (default: 20)")
    parser.add_argument("--adapters", default="", metavar="NAME,...", help="only these (default: all of the list)")
    parser.add_argument("--page", action="store_true", help=f"run nothing: write the page of {MEASURED}")
    parser.add_argument("--summary", action="store_true", help="run nothing: sum up the passes that are there")
    parser.add_argument("--add", action="store_true", help=f"keep what {MEASURED} has reached, and add to it")
    parser.add_argument("-o", "--output", type=Path, default=PAGE)
    parsed = parser.parse_args(arguments)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # introspection imports DeepSpeed, which would look for accelerators
    if not parsed.page:
        chosen = filter(None, parsed.adapters.split(","))
        left = 0 if parsed.summary else run(units(chosen), 60 * parsed.minutes)
        if left:
            print(f"{left} units are left: the same command goes on")
        elif not parsed.adapters:
            keep()
        found = measure()
        save(added(found, load()) if parsed.add else found)
    parsed.output.write_text(page(load(), tried_before(), read_readings()))
    print(f"{parsed.output}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`meshmark predict` on the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from meshmark.errors import InputError
from meshmark.plan.arguments import GPU_HELP, add_setting, framework_given, given_by
from meshmark.plan.calibration_file import calibrated_at
from meshmark.plan.frameworks import default_framework
from meshmark.plan.layout_table import remarks
from meshmark.plan.predict_file import Setting, predict_file, rate_origins
from meshmark.plan.rows import read_rows
from meshmark.text import pluralize


def add_predict(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `predict`."""
    parser.add_argument("layouts", type=Path, help="CSV file with one layout per row")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the same with predicted columns")
    parser.add_argument("--gpu", help=f"{GPU_HELP}, in place of the file's column gpu")
    add_setting(parser)
    parser.set_defaults(run=run_predict)


def run_predict(arguments: argparse.Namespace) -> int:
    """Predict a file of layouts. Raises `InputError` for an output that would replace the file."""
    if arguments.output.exists() and arguments.layouts.exists() and arguments.output.samefile(arguments.layouts):
        raise InputError(f"-o {str(arguments.output)!r} is the file of layouts itself: name another file")
    changes = (arguments.gpus_per_node, arguments.link_bandwidth, arguments.network_bandwidth)
    if not arguments.gpu and any(change is not None for change in changes):
        raise InputError("--gpus-per-node and bandwidths change a GPU, and each row names its own: give --gpu too")
    given = given_by(arguments)
    # Rows name their own GPU, unless one is given or comes with the rates of a calibrated machine.
    machine = given.machine if arguments.gpu or calibrated_at(arguments.rates) else None
    using = given.recipe if machine or not arguments.framework else None
    named = framework_given(arguments)
    nearest = given.nearest if machine else None
    setting = Setting(
        recipe=using,
        framework=named,
        rates=given.given_rates,
        machine=machine,
        nearest=nearest,
        precision=given.precision,
        overlap=given.overlap,
    )
    count, table = predict_file(arguments.layouts, arguments.output, setting), read_rows(arguments.layouts)
    for remark in remarks(table):
        print(f"meshmark: {remark}", file=sys.stderr)
    print(f"{pluralize(count, 'layout')} predicted: {arguments.output}")
    unsaid = sum(not (row.get("recipe") or row.get("framework")) for row in table)
    if unsaid and not (named or given.recipe):
        told = f"{unsaid} of them by {default_framework(machine).name}'s recipe"
        print(f"{told}, as nothing says another: --framework, or a column framework")
    for line in rate_origins(table, setting):
        print(line)
    return 0

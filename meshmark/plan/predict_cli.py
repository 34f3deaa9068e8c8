"""`meshmark predict` on the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from meshmark.counted import counted
from meshmark.errors import InputError
from meshmark.plan.arguments import GPU_HELP, add_setting, machine_given, recipe_given
from meshmark.plan.calibration_file import calibrated_at
from meshmark.plan.layout_table import remarks
from meshmark.plan.predict_file import Setting, predict_file, rates_for
from meshmark.plan.provenance import provenance
from meshmark.plan.rows import read_rows
from meshmark.spec.hardware import gpu


def add_predict(parser: argparse.ArgumentParser) -> None:
    """Arguments of `predict`."""
    parser.add_argument("layouts", type=Path, help="CSV file, one layout a row")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the same with predicted columns")
    parser.add_argument("--gpu", help=f"{GPU_HELP}, in place of the file's column gpu")
    add_setting(parser)
    parser.set_defaults(run=run_predict)


def run_predict(arguments: argparse.Namespace) -> int:
    """Predict a file of layouts."""
    machine, given = None, None
    changes = (arguments.gpus_per_node, arguments.link_bandwidth, arguments.network_bandwidth)
    if not arguments.gpu and any(change is not None for change in changes):
        raise InputError("--gpus-per-node and bandwidths change a GPU, and each row names its own: give --gpu too")
    if arguments.gpu or arguments.rates:
        machine, given = machine_given(arguments)
    if not arguments.gpu and not calibrated_at(arguments.rates):
        machine = None  # each row names its own
    using = recipe_given(arguments)
    setting = Setting(recipe=using, rates=given, machine=machine)
    count, table = predict_file(arguments.layouts, arguments.output, setting), read_rows(arguments.layouts)
    for remark in remarks(table):
        print(f"meshmark: {remark}", file=sys.stderr)
    print(f"{counted(count, 'layout')} predicted: {arguments.output}")
    if using is None and (unsaid := sum(not (row.get("recipe") or row.get("framework")) for row in table)):
        print(f"{unsaid} of them by nanotron's recipe, as nothing says another: --framework, or a column framework")
    names = {gpu(row["gpu"]).name for row in table} if machine is None else set()
    for there in [machine] if machine else map(gpu, sorted(names)):
        print(provenance(there, given or rates_for(there, as_measured=True)))
    return 0

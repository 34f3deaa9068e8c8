"""`meshmark report` over many records, cold: seconds and memory of the whole command; `meshmark --help`; and what
`pytest suites` takes before its first launch, without the plugins of others.

The records are the committed baseline's, with their evidence beside them, as a run leaves it: 5,000 and 100,000 under
ever new names of workloads, so that each case has rows of its own; and 100,000 as 2,000 runs of the same cases into one
folder, of which the report shows the last. Seconds are the processor's, which another's work does not lengthen much.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.goal import verdict
from meshmark.records.record_file import EvidenceFolder, migrate

ROOT = Path(__file__).parent.parent
BASELINE = ROOT / "baselines" / "epyc-2cpu" / "records.jsonl"
COLLECT = ("pytest", "suites", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")
TRIES = 5
START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def main() -> int:
    met = []
    for name, command, goal in (("help", ("meshmark", "--help"), 0.3), ("collect", COLLECT, 1.5)):
        took = min(processor_seconds(*command)[0] for _ in range(TRIES))
        met.append(verdict(f"{name}_seconds", took, goal, at_least=False))
    sizes = (("5000_cases", 5_000, 5.0), ("100000_runs", 100_000, 60.0), ("100000_cases", 100_000, 60.0))
    for name, count, seconds in sizes:
        with tempfile.TemporaryDirectory() as folder:
            write_records(Path(folder), count, new_cases=name.endswith("cases"))
            took, held = processor_seconds("meshmark", "report", folder)
        met.append(verdict(f"report_{name}_seconds", took, seconds, at_least=False))
        met.append(verdict(f"report_{name}_gigabytes", held / 1e9, 1.0, at_least=False))
    return 0 if all(met) else 1


def write_records(folder: Path, count: int, new_cases: bool) -> None:
    """`count` records of many workloads, or of many runs."""
    records = [migrate(json.loads(line)) for line in BASELINE.read_text().splitlines()]
    records = [record for record in records if "session" not in record]
    evidence = EvidenceFolder(folder)
    for record in records:
        evidence.put_aside(record)
    names = [record["case"]["workload"]["name"] for record in records]
    with (folder / "records.jsonl").open("w") as file:
        for number in range(count):
            time, which = divmod(number, len(records))
            record = records[which]
            if new_cases:
                record["case"]["workload"]["name"] = f"{names[which]}.{time}"
            else:
                date = START + datetime.timedelta(hours=time)
                record["environment"]["date"] = date.isoformat(timespec="seconds")
            file.write(json.dumps(record) + "\n")


def processor_seconds(*arguments: str) -> tuple[float, int]:
    """Processor seconds and the most bytes of memory that one command takes; bytecode is kept, as it is by default."""
    command = [sys.executable, "-m", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment, cwd=ROOT)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())

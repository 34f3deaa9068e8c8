"""`meshmark history` of 1,000 runs of 50 cases: less than a minute.

python -m benchmarks.history
"""

from __future__ import annotations

import copy
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

RUNS, CASES, LIMIT_SECONDS = 1000, 50, 60.0
BASELINE = Path(__file__).parent.parent / "baselines" / "epyc-2cpu" / "records.jsonl"
FACTORS = 256
"""Different times of a case: each is written once and used again."""


def write(folder: Path) -> str:
    """Runs of the baseline's records under CASES seeds, their times scattered by 3 %; from the 700th on the first case,
    which is returned, is 10 % slower."""
    records = [json.loads(line) for line in BASELINE.read_text().splitlines()]
    good = [r for r in records if "case" in r and r["outcome"]["status"] == "ok" and r["task"] in ("observe", "time")]
    passes: dict[str, list[dict[str, Any]]] = {}
    for record in good:
        passes.setdefault(json.dumps(record["case"]), []).append(record)
    whole = [own for own in passes.values() if {r["task"] for r in own} == {"observe", "time"}]
    chosen = []
    for i in range(CASES):
        own = copy.deepcopy(whole[i % len(whole)])
        for record in own:
            record["case"]["workload"]["name"] += f"-{i // len(whole)}"
        chosen.append(own)
    rng, written = np.random.default_rng(0), dict[tuple[int, int, bool], str]()

    def text(i: int, factor: int, slow: bool) -> str:
        if (i, factor, slow) not in written:
            own = copy.deepcopy(chosen[i])
            scale = float(np.exp(0.03 * rng.standard_normal())) * (1.1 if slow else 1.0)
            for record in own:
                record["environment"]["date"] = "DATE"
                if record["task"] == "time":
                    ranks = record["timing"]["rank_step_seconds"]
                    record["timing"]["rank_step_seconds"] = [[s * scale for s in rank] for rank in ranks]
            written[i, factor, slow] = "".join(json.dumps(record) + "\n" for record in own)
        return written[i, factor, slow]

    for number in range(RUNS):
        date = (datetime.date(2026, 1, 1) + datetime.timedelta(days=number)).isoformat()
        lines = [text(i, int(rng.integers(FACTORS)), i == 0 and number >= 700) for i in range(CASES)]
        (folder / f"{number:04}").mkdir()
        (folder / f"{number:04}" / "records.jsonl").write_text("".join(lines).replace("DATE", date))
    return (datetime.date(2026, 1, 1) + datetime.timedelta(days=700)).isoformat()


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        expected = write(Path(name))
        folders = sorted(str(path) for path in Path(name).iterdir())
        started = time.monotonic()
        command = [sys.executable, "-m", "meshmark", "history", *folders]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        took = time.monotonic() - started
    print(done.stdout, end="")
    named = [line for line in done.stdout.splitlines() if " -> " in line]
    good = took < LIMIT_SECONDS and len(named) == 1 and "seconds a step" in named[0]
    print(f"{RUNS} runs of {CASES} cases in {took:.1f} s (at most {LIMIT_SECONDS:.0f}); the slow-down is of {expected}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())

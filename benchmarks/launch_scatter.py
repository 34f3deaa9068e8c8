"""How far launches of the same code scatter here: what `meshmark compare` takes where neither side repeats a case.

python -m benchmarks.launch_scatter DIR DIR ...    # folders of the same cases under the same code, a session each
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from meshmark.records.record_file import read_records
from meshmark.regression.runs import by_case
from meshmark.regression.samples import BUILD, LAUNCH, RECORDED, STEP, Sample, repeats_scatter, samples


def main(folders: list[Path]) -> None:
    """Pools all cases; the page of it is RECORDED."""
    records = [record for folder in folders for record in read_records(folder).records]
    groups: dict[str, list[list[Sample]]] = {STEP: [], LAUNCH: [], BUILD: []}
    for runs in by_case(records).values():
        for metric, each in samples(runs).items():
            groups[metric].append(each)
    metrics = {}
    for metric, each in groups.items():
        found = repeats_scatter(each, "")
        if found is None:
            raise SystemExit(f"no case was launched twice in {', '.join(map(str, folders))}")
        metrics[metric] = {"deviation": round(math.sqrt(found.variance), 4), "degrees": found.degrees}
        print(f"{metric:<8} launches scatter by {math.sqrt(found.variance):.1%}, {found.degrees} repeats")
    environment = records[-1].environment
    about = f"{environment.machine}, {environment.num_cpus} CPUs, {len(folders)} sessions, {environment.date[:10]}"
    RECORDED.write_text(json.dumps({"machine": about, "metrics": metrics}, indent=2) + "\n")
    print(f"written to {RECORDED.name}")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])

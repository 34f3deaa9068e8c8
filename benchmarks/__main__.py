"""`make bench`: performance claims, each held by a benchmark. Fails where one does not hold."""

from __future__ import annotations

import sys

from benchmarks import launch, overhead, plan, report, scale

if __name__ == "__main__":
    codes = [benchmark.main() for benchmark in (launch, overhead, report, plan, scale)]
    sys.exit(max(map(bool, codes)))

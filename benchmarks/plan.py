"""`meshmark plan` of the whole space of a 405B model on 16,384 GPUs, cold: every schedule, recomputation, ZeRO stage
and degree, context-parallel ones too. Seconds are the processor's, of the whole command, which another's work does not
lengthen much; at the batch that its authors trained with, and at eight times that.
"""

from __future__ import annotations

import sys

from benchmarks.goal import verdict
from benchmarks.report import processor_seconds
from meshmark.spec.layout import Schedule

WHOLE = ("--cp", "1,2,4,8,16,32,64", "--schedules", ",".join(Schedule))
MODEL = ("--model", "llama-405b", "--gpus", "16384", "--gpu", "h100")
BATCHES = (2048, 16384)
GOAL = 5.0
TRIES = 3


def main() -> int:
    met = []
    for batch in BATCHES:
        command = ("meshmark", "plan", *MODEL, *WHOLE, "--global-batch", str(batch))
        took = min(processor_seconds(*command)[0] for _ in range(TRIES))
        met.append(verdict(f"plan_405b_16384_gpus_batch_{batch}_seconds", took, GOAL, at_least=False))
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())

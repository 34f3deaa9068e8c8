# /// script
# dependencies = ["accelerate==1.15.0", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "Accelerator takes split_batches, and ignores it"
# framework = "accelerate"
# symptom = "`Accelerator(split_batches=True)` splits no batches, without a word: each process trains on whole ones."
# cause = """
# `Accelerator.__init__` still has the argument, of which `DataLoaderConfiguration` has taken the place, and reads it
# nowhere (accelerator.py)."""
# processes = 2
# ///
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True, split_batches=True)
loader = accelerator.prepare(DataLoader(torch.arange(8), batch_size=4))
rows = len(next(iter(loader)))
if rows != 2:
    sys.exit(f"expected: 2 rows of a batch of 4 on each of 2 processes, or an error; got: {rows}")

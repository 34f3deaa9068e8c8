"""Run one rank of an observed script: `torchrun --nproc-per-node 2 -m meshmark.check train.py ARGS`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from meshmark.check.rank import main

    main(sys.argv[1:])

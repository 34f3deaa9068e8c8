"""Where a rank stands in a launch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Where a rank stands in a launch."""

    rank: int
    local_rank: int
    local_world_size: int
    """Ranks of this launch on this node."""
    world_size: int
    host: str
    port: int
    """Of the run's store; 0 when all ranks are on this node: then the store is a file in `folder`."""
    prefix: str
    """Keys of this launch in the store start with it."""
    folder: Path
    """Of this launch on this node; reports, failures, logs and stacks are left there."""

    def file(self, kind: str) -> Path:
        return self.folder / f"{kind}-{self.rank}"

"""Peak memory of an operation, besides what was held when it began."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import torch

_MOST_RESIDENT, _RESIDENT = "VmHWM", "VmRSS"
_FORGET_MOST = "5"
"""Value for `/proc/PID/clear_refs` that resets the peak (proc_pid_clear_refs(5))."""


class ExtraPeak:
    """A reusable context that records the most memory any of its blocks took beyond what was held at its start.

    On a GPU this is the allocator's count. On a CPU it is resident memory, after free memory was returned to the
    system.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.num_bytes, self._before = device, 0, 0

    def __enter__(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text(_FORGET_MOST)
            self._before = _resident(_RESIDENT)

    def __exit__(self, *raised: object) -> None:
        on_gpu = self.device.type == "cuda"
        most = torch.cuda.max_memory_allocated(self.device) if on_gpu else _resident(_MOST_RESIDENT)
        self.num_bytes = max(self.num_bytes, most - self._before)


def _resident(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, f"/proc/self/status tells no {name}"
    return 1024 * int(found[1])

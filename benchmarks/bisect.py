"""`meshmark bisect` on a real repository with real engines: a planted defect of each kind must be named.

python -m benchmarks.bisect
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ENGINE = """
import time
import torch
from meshmark.adapters.ddp import DDP, DDPEngine

class Engine(DDPEngine):
    def finish_gradients(self):
        super().finish_gradients()
        {planted}

class Mine(DDP):
    engine = Engine
"""
HONEST = "pass"
PLANTED = {
    "wrong": "[p.grad.mul_(1.01) for p in self.module.parameters() if p.grad is not None]",
    "bigger:1%": "self.hoard = torch.zeros(100_000)",
    "slower:3%": "time.sleep(0.2)",
}
COMMITS = 4
"""Commits of each repository; the third plants the defect."""


def make(folder: Path, planted: str) -> list[str]:
    """Commits of a repository in `folder`."""
    run = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    made = []
    for number in range(COMMITS):
        body = ENGINE.format(planted=planted if number >= 2 else HONEST)
        (folder / "mine.py").write_text(f"{body}\n# {number}\n")
        subprocess.run([*run, "add", "-A"], check=True)
        subprocess.run([*run, "commit", "-q", "-m", f"number {number}"], check=True)
        made.append(
            subprocess.run([*run, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
        )
    return made


def main() -> int:
    wrong = 0
    suites = {"wrong": "equivalence", "bigger:1%": "memory", "slower:3%": "throughput"}
    for gate, planted in PLANTED.items():
        with tempfile.TemporaryDirectory() as name:
            commits, started = make(Path(name), planted), time.monotonic()
            command = [sys.executable, "-m", "meshmark", "bisect", "--good", commits[0], "--bad", commits[-1]]
            command += [
                "--fail-on",
                gate,
                "--launches",
                "1",
                "--",
                "--adapter",
                "mine.py:Mine",
                "--workload",
                "gpt-mini",
            ]
            command += ["--steps", "10" if "slower" in gate else "3", "--timing-budget", "0", "-k", suites[gate]]
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
            done = subprocess.run(command, cwd=name, env=environment, capture_output=True, text=True)
            found = f"first bad: {commits[2][:7]}" in done.stdout
            wrong += not found
            print(f"{gate:<10} {'named' if found else 'MISSED'} in {time.monotonic() - started:.0f} s", flush=True)
            print(done.stdout[-1500:] + done.stderr[-1500:], flush=True)
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())

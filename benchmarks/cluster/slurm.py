"""A SLURM of our own: munged, slurmctld and two slurmd, in a folder and on ports that nobody else has."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.chaos import processes
from benchmarks.chaos.nodes import HOSTS, enter
from meshmark.errors import MeshmarkError

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "examples" / "slurm" / "meshmark.sbatch"
PACKAGES = "slurmctld slurmd slurm-client munge"
KILL_SECONDS = 10
"""Between SLURM's SIGTERM and its SIGKILL; sites have 30."""
NODES = ("node1", "node2")
TOP, SWITCHES = "spine", ("leaf1", "leaf2")
"""Switches of the network's tree: each node has a switch of its own."""
_CONF = """\
ClusterName=meshmark
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2
SwitchType=switch/none
TopologyPlugin=topology/tree
ReturnToService=2
KillWait={kill}
MessageTimeout=20
SlurmdParameters=config_overrides
SlurmdTimeout=20
TmpFS={folder}/tmp-%n
StateSaveLocation={folder}/ctld
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=debug Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


class Slurm:
    """Use as a context manager, which ends all that it started, jobs too."""

    def __init__(self, folder: Path, networks: Sequence[int] = ()) -> None:
        """`networks`: a process in each node's; none puts both nodes on this host's loopback device. The folder's path
        is short, for a socket is in it."""
        self.folder, self.networks = folder, list(networks)
        self.mark = f"{os.getpid()}-{folder.name}"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True)
        (folder / "ctld").mkdir()
        (folder / "munge.key").touch(mode=0o600)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "slurm.conf").write_text(self._conf())
        leaves = [f"SwitchName={switch} Nodes={node}" for switch, node in zip(SWITCHES, NODES, strict=True)]
        tree = [*leaves, f"SwitchName={TOP} Switches={','.join(SWITCHES)}", ""]
        (folder / "topology.conf").write_text("\n".join(tree))

    def _conf(self) -> str:
        addresses = HOSTS if self.networks else ("127.0.0.1", "127.0.0.1")
        ports, host = [_free_port() for _ in range(3)], socket.gethostname().partition(".")[0]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs=4 State=UNKNOWN"
            for name, address, port in zip(NODES, addresses, ports[1:], strict=True)
        )
        return _CONF.format(
            host=host, address=addresses[0], port=ports[0], folder=self.folder, kill=KILL_SECONDS, nodes=nodes
        )

    @property
    def environment(self) -> dict[str, str]:
        """Environment of everything that is started here."""
        known = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
        own = {"SLURM_CONF": str(self.folder / "slurm.conf"), processes.MARK: self.mark, "PATH": path}
        return {**known, **own, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def __enter__(self) -> Slurm:
        if missing := [name for name in ("munged", "slurmctld", "slurmd", "srun") if not shutil.which(name)]:
            raise MeshmarkError(f"{', '.join(missing)}: not installed; apt-get install {PACKAGES}")
        try:
            at = self.folder
            names = ("socket", "key-file", "pid-file", "log-file", "seed-file")
            files = ("munge.socket", "munge.key", "munged.pid", "munged.log", "munge.seed")
            told = [f"--{name}={at / file}" for name, file in zip(names, files, strict=True)]
            self._start("munged", ["munged", "--foreground", "--force", *told])
            self.wait(lambda: (at / "munge.socket").exists(), 20)
            self._start("slurmctld", ["slurmctld", "-D", "-c"])
            for node in NODES:
                self.start_node(node)
            if not self.wait(lambda: self.states() == ["idle", "idle"], 30):
                raise MeshmarkError(f"SLURM did not start: {self.states()}; its logs are in {at}")
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """All of it, by force at last, also what left its group or its parents."""
        if self._daemons:
            self.ask("scancel", "--state=RUNNING,PENDING", "--full", "--user=root", check=False)
            self.wait(lambda: not self.ask("squeue", "--noheader", check=False).strip(), KILL_SECONDS + 5)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        self.wait(lambda: all(daemon.poll() is not None for daemon in self._daemons.values()), 10)
        for pid in self.left():
            processes.send(pid, signal.SIGKILL)
        for daemon in self._daemons.values():
            daemon.wait()
        self._daemons.clear()

    def left(self) -> list[int]:
        """Processes that descend from this, and no others: they have inherited its mark."""
        return processes.marked(self.mark)

    def start_node(self, node: str) -> None:
        self._start(node, ["slurmd", "-D", "-N", node], NODES.index(node))

    def kill_node(self, node: str) -> None:
        """All that runs there, the daemon first, without a word."""
        daemon = self._daemons[node]
        steps = [pid for pid in self.left() if self._runs_on(pid, node)]
        for pid in [daemon.pid, *processes.descendants(daemon.pid), *steps]:
            processes.send(pid, signal.SIGKILL)
        daemon.wait()

    def _runs_on(self, pid: int, node: str) -> bool:
        try:
            return f"SLURMD_NODENAME={node}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def _start(self, name: str, command: Sequence[str], network: int = 0) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            self._daemons[name] = subprocess.Popen(
                [*self._inside(network), *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.environment,
                start_new_session=True,
            )

    def _inside(self, network: int) -> list[str]:
        return enter(self.networks[network]) if self.networks else []

    def ask(self, *command: str, check: bool = True) -> str:
        """Return what a command of SLURM prints on the first node."""
        done = subprocess.run(
            [*self._inside(0), *command], capture_output=True, text=True, env=self.environment, timeout=60
        )
        if check and done.returncode:
            raise MeshmarkError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def states(self) -> list[str]:
        return self.ask("sinfo", "--noheader", "--Node", "--format=%t", check=False).split()

    def start(self, output: Path, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        """A command such as srun, on the first node."""
        with open(output, "ab") as file:
            return subprocess.Popen(
                [*self._inside(0), *command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**self.environment, **environment},
                start_new_session=True,
            )

    def submit(self, *arguments: str, **environment: str) -> str:
        """A job's number."""
        exported = f"--export={','.join(['ALL', *(f'{k}={v}' for k, v in environment.items())])}"
        return self.ask("sbatch", "--parsable", f"--chdir={ROOT}", exported, *arguments).strip()

    def job(self, number: str, field: str) -> str:
        """Return a field of `scontrol show job`."""
        told = self.ask("scontrol", "show", "job", number, check=False)
        return match[1] if (match := re.search(rf"\b{field}=(\S+)", told)) else ""

    @staticmethod
    def wait(true: Callable[[], object], seconds: float) -> bool:
        """Whether it became true in time."""
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

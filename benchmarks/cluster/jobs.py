"""Events by which SLURM ends, requeues, cancels and drains jobs, and loses their nodes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from benchmarks.cluster.row import Row
from benchmarks.cluster.slurm import SCRIPT, Slurm
from benchmarks.cluster.trial import BEGIN_SECONDS, END_SECONDS, Trial

_ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
Strike = Callable[[Slurm, str], object]
"""Does something to a job, by its number."""


class Job:
    """The shipped script, submitted for a trial."""

    def __init__(self, slurm: Slurm, trial: Trial, *options: str) -> None:
        self.trial, self.slurm, self._options = trial, slurm, options
        self.daemons = set(self.slurm.left())
        self.number = self._submit()

    def _submit(self) -> str:
        output = f"--output={self.trial.output}"
        return self.slurm.submit(output, *self._options, str(SCRIPT), *self.trial.arguments(), **self.trial.environment)

    def again(self) -> None:
        """Submitted once more, as its user would."""
        self.number = self._submit()

    def state(self) -> str:
        return self.slurm.job(self.number, "JobState")

    def leaves(self, *states: str, seconds: float) -> bool:
        return Slurm.wait(lambda: self.state() not in states, seconds)

    def ends(self) -> str:
        """Its state when it has ended."""
        Slurm.wait(lambda: self.state() in _ENDED, BEGIN_SECONDS)
        return self.state()


def struck(slurm: Slurm, fault: str, strike: Strike, *options: str) -> Row:
    """A job that is struck while its second case runs, and goes on: requeued by SLURM, or submitted again."""
    trial = Trial(slurm.folder, fault.split(",")[0].replace(" ", "-"), slurm.mark)
    job = Job(slurm, trial, *options)
    wrong = [] if trial.await_gate() else [f"did not begin: {job.state()} {trial.text()[-600:]}"]
    strike(slurm, job.number)
    job.leaves("RUNNING", seconds=BEGIN_SECONDS)
    seconds = trial.seconds_to_end(job.daemons)
    job.leaves("COMPLETING", seconds=END_SECONDS)
    wrong += [f"still there after {seconds:.0f} s: {trial.strays(job.daemons)}"] if seconds > END_SECONDS else []
    kept = [record.case.adapter for record in trial.kept()]
    wrong += [f"kept {kept} of the case before"] if kept != ["ddp_0"] else []
    ended = job.state()
    trial.open()
    if ended in _ENDED:
        job.again()
    last = job.ends()
    wrong += [f"it went on to {last}"] if last != "COMPLETED" else []
    how = "submitted again" if ended in _ENDED else "requeued"
    return Row(
        engine="SLURM, sbatch",
        shape="2 x 1 x 1, loopback",
        fault=fault,
        seconds=seconds,
        told=f"{ended}; {how}: {last}",
        lost="nothing" if kept == ["ddp_0"] else "the case before",
        wrong=wrong + trial.complaints(repeated=1),
    )


def time_limit(slurm: Slurm) -> Row:
    """Shortened to the least that SLURM knows once the job is where it is to be struck: a minute from its start, which
    a slow machine has had by then."""

    def shorten(slurm: Slurm, job: str) -> None:
        slurm.ask("scontrol", "update", f"JobId={job}", "TimeLimit=1")

    return struck(slurm, "time limit", shorten)


def scancel(slurm: Slurm) -> Row:
    return struck(slurm, "scancel", lambda slurm, job: slurm.ask("scancel", job))


def requeue(slurm: Slurm) -> Row:
    return struck(slurm, "requeued", lambda slurm, job: slurm.ask("scontrol", "requeue", job))


def drain(slurm: Slurm) -> Row:
    """The job that runs is let run to its end; none begins there."""
    trial = Trial(slurm.folder, "drained", slurm.mark)
    job = Job(slurm, trial)
    wrong = [] if trial.await_gate() else [f"did not begin: {trial.text()[-600:]}"]
    slurm.ask("scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=cluster-test")
    began = time.monotonic()
    seen = slurm.states()
    time.sleep(2)
    trial.open()
    last = job.ends()
    slurm.ask("scontrol", "update", "NodeName=node2", "State=RESUME")
    wrong += [f"node2 was {seen}"] if "drng" not in seen else []
    wrong += [f"it went on to {last}"] if last != "COMPLETED" else []
    return Row(
        engine="SLURM, sbatch",
        shape="2 x 1 x 1, loopback",
        fault="node drained in mid-run",
        seconds=time.monotonic() - began,
        told=f"node2 {seen[-1]}; {last} in one go",
        lost="" if wrong else "nothing",
        wrong=wrong + trial.complaints(),
    )


def kill_node(slurm: Slurm) -> Row:
    """Node 2 and all on it gone without a word: seconds until the record on node 1 says so."""
    trial = Trial(slurm.folder, "node-lost", slurm.mark)
    job = Job(slurm, trial)
    wrong = [] if trial.await_gate() else [f"did not begin: {trial.text()[-600:]}"]
    began = time.monotonic()
    slurm.kill_node("node2")
    Slurm.wait(lambda: len(trial.reading().records) > 1, END_SECONDS)
    seconds, last = time.monotonic() - began, trial.reading().records[-1].outcome
    kept = [record.case.adapter for record in trial.kept()]
    if not last.status.outside or "node 1 of 2" not in last.message:
        wrong.append(f"expected node lost, got {last.status}: {last.message}")
    slurm.ask("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=lost")
    job.leaves("RUNNING", "COMPLETING", seconds=BEGIN_SECONDS)
    slurm.start_node("node2")
    with back(slurm):
        trial.open()
        ended = job.state()
        if ended in _ENDED:
            job.again()
        end = job.ends()
    wrong += [f"it went on to {end}"] if end != "COMPLETED" else []
    return Row(
        engine="SLURM, sbatch",
        shape="2 x 1 x 1, loopback",
        fault="node 2 killed, daemon and all",
        seconds=seconds,
        told=f"{last.status}, {last.message.partition(' has')[0]}; {ended}, then {end}",
        lost="nothing" if kept == ["ddp_0"] else "the case before",
        wrong=wrong + trial.complaints(repeated=1),
    )


@contextlib.contextmanager
def back(slurm: Slurm) -> Iterator[None]:
    """A node that was down is given jobs again."""
    Slurm.wait(lambda: slurm.ask("scontrol", "update", "NodeName=node2", "State=RESUME", check=False) == "", 10)
    Slurm.wait(lambda: slurm.states() == ["idle", "idle"] or "alloc" in slurm.states(), 30)
    yield

"""The environment of a run: machine, versions, commit and command."""

from __future__ import annotations

import csv
import datetime
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import meshmark
from meshmark.errors import InputError
from meshmark.text import pluralize

PACKAGES = (
    "torch",
    "numpy",
    "pytest",
    "pytest-benchmark",
    "pandas",
    "deepspeed",
    "accelerate",
    "fairscale",
    "megatron-core",
    "horovod",
    "torchtitan",
    "transformers",
    "pytorch-lightning",
    "lightning-fabric",
    "safetensors",
    "greenlet",
    "bitsandbytes",
    "torch-pruning",
    "torchao",
    "trl",
)
DEFAULT_THREADS = "1"
"""OMP_NUM_THREADS of the ranks if it is not set. Ranks share the machine's cores."""


def threads_of_ranks(environment: Mapping[str, str]) -> int:
    """Return the threads of a rank, as OMP_NUM_THREADS says. Raises `InputError` if that is no whole number."""
    text = environment.get("OMP_NUM_THREADS") or DEFAULT_THREADS
    if not text.isdecimal() or not int(text):
        raise InputError(f"OMP_NUM_THREADS={text!r} in the environment: expected a whole number of at least 1")
    return int(text)


ALLOCATOR = "allocator"
"""Name of the allocator's settings, in records and among the conditions of a comparison."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
"""Variables that choose how PyTorch hands out a GPU's memory."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Everything around a case that could change its numbers."""

    date: str
    """UTC, ISO 8601."""
    command: str
    commit: str
    """Commit of Meshmark's checkout, with -dirty if it had changes. Empty if Meshmark is installed as a package."""
    machine: str
    """Name of the processor or GPU."""
    system: str
    num_cpus: int
    memory_bytes: int
    device: str
    """cpu or cuda."""
    backend: str
    nnodes: int
    versions: dict[str, str] = field(default_factory=dict)
    omp_num_threads: str = ""
    """OMP_NUM_THREADS of the ranks. Empty in older records."""
    project_commit: str = ""
    """Commit of the user's repository around the working directory.

    With changes to tracked files it is "COMMIT-dirty.DIGEST", where the digest is of the changes. Empty outside a
    repository, and before schema 4.
    """
    project_date: str = ""
    """Date of that commit, UTC, ISO 8601."""
    packages_digest: str = ""
    """Digest of the code of Meshmark and of `PACKAGES` as they are installed. Empty in older records."""


def describe(device: str, backend: str, nnodes: int, command: Iterable[str] | None = None) -> Environment:
    """Return the environment of this process."""
    project = project_of(os.getcwd())
    return Environment(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=shlex.join(command if command is not None else ["pytest", *sys.argv[1:]]),
        commit=_commit(),
        machine=machine(device),
        system=f"{platform.system()} {platform.release()}",
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=memory_bytes(),
        device=device,
        backend=backend,
        nnodes=nnodes,
        versions=versions(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS", DEFAULT_THREADS),
        project_commit=project.commit,
        project_date=project.date,
        packages_digest=packages_digest(),
    )


def code_here() -> tuple[str, str]:
    """Return what tells the code that runs: of Meshmark its commit, or a digest if it is installed as a package, and
    the commit of the user's repository around the working directory.
    """
    return _commit() or packages_digest(), project_of(os.getcwd()).commit


def packages_digest() -> str:
    """Return the digest of the code of Meshmark and of `PACKAGES` as they are installed."""
    return code_digest(("meshmark", *PACKAGES))


def memory_bytes() -> int:
    """Return the memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def allocator_settings() -> str:
    """Return how this process's environment tells PyTorch to hand out a GPU's memory.

    These settings change what is reserved and how much of it is wasted, so every record holds them, and records with
    different ones are not compared. Meshmark sets none of the variables: PyTorch's defaults are what it does without
    them, and one of their names set here could be read in place of another that the user or a framework has set.
    """
    given = {name: value for name in ALLOCATOR_VARIABLES if (value := os.environ.get(name))}
    return ", ".join(f"{name}={value}" for name, value in given.items()) or "PyTorch's defaults"


ENVIRONMENTS = "MESHMARK_ENVIRONMENTS"
"""Variable with the folder of virtual environments that adapters name; by default .environments beside this one."""


def interpreter_of(name: str) -> Path:
    """Return the Python of the virtual environment called `name`, whether or not it is there."""
    folder = os.environ.get(ENVIRONMENTS) or str(Path(sys.prefix).parent / ".environments")
    return Path(folder) / name / "bin" / "python"


def installed(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def versions() -> dict[str, str]:
    found = {"meshmark": meshmark.__version__, "python": platform.python_version()}
    return found | {name: version for name in PACKAGES if (version := installed(name))}


# --- Git, asked about the repository around a folder.

_OF_ONE_REPOSITORY = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_IMPLICIT_WORK_TREE",
    "GIT_COMMON_DIR",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_NAMESPACE",
    "GIT_PREFIX",
    "GIT_SHALLOW_FILE",
    "GIT_GRAFT_FILE",
)
"""Variables of `git rev-parse --local-env-vars` that name a repository or a part of it. Those that hold settings stay,
because CI allows folders through them."""


def without_repository(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which git finds the repository around the current folder.

    Git sets GIT_DIR for its hooks and for `rebase --exec`. A command in another folder that inherits it would read, and
    check out into, the repository of the hook.
    """
    return {name: value for name, value in environment.items() if name not in _OF_ONE_REPOSITORY}


def run_git(*words: str, folder: str | Path | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run git in `folder`, by default the current one, on the repository around it. Raises `OSError` if git cannot be
    run.
    """
    plain = ("-c", "log.showSignature=false", "-c", "color.ui=false")  # whatever the user has configured
    return subprocess.run(["git", *plain, *words], cwd=folder, env=without_repository(os.environ), capture_output=True)


@functools.cache
def _commit() -> str:
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():  # installed: a repository around it would be somebody else's
        return ""
    return _git(str(root), "describe", "--always", "--dirty", "--abbrev=12")


_WRITTEN_HERE = tuple(f":(top,exclude,glob)**/{name}" for name in ("records.jsonl", "baseline.json", "evidence/**"))
"""Files that runs and `baseline accept` write, which do not count as changes of the code."""


@dataclass(frozen=True, kw_only=True)
class Project:
    """State of a git repository; see `Environment`."""

    commit: str = ""
    date: str = ""


@functools.cache
def project_of(folder: str) -> Project:
    """Return the state of the repository around `folder`, as it was when this process first asked."""
    head = _git(folder, "log", "-1", "--format=%H %ct", "HEAD").split()
    if len(head) != 2:
        return Project()
    commit, date = head[0][:12], datetime.datetime.fromtimestamp(int(head[1]), datetime.UTC).isoformat()
    if changes := _git(folder, "diff", "--binary", "--no-ext-diff", "HEAD", "--", ":/", *_WRITTEN_HERE):
        commit = f"{commit}-dirty.{hashlib.sha256(changes.encode()).hexdigest()[:8]}"
    return Project(commit=commit, date=date)


def _git(folder: str, *words: str) -> str:
    """Return the output of git, or an empty string if git fails or is not installed."""
    try:
        done = run_git(*words, folder=folder)
    except OSError:
        return ""
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else ""


@functools.cache
def machine(device: str) -> str:
    """Return the name of the processor or GPU."""
    if device == "cuda":
        return _nvidia_smi()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _nvidia_smi() -> str:
    """Return the names of the GPUs that CUDA will see.

    Asks the driver, because this process forks and must not initialise CUDA.
    """
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        import torch  # a record is read without it

        return f"{torch.cuda.device_count()} CUDA devices"
    found = visible_gpus(listed, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return f"{len(found)} x {' and '.join(dict.fromkeys(found))}" if found else "no GPU"


_GPU = re.compile(r"GPU (\d+): (.*) \(UUID: (GPU-[^)]*)\)")
_SLICE = re.compile(r"\s+(MIG \S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]*)\)")


def visible_gpus(listed: str, chosen: str | None) -> list[str]:
    """Return the names of the devices that CUDA sees among those that `nvidia-smi -L` lists.

    These are the ones in CUDA_VISIBLE_DEVICES (`chosen`), up to the first unknown one, or all by default. CUDA sees a
    divided GPU (MIG) as one of its slices. It is named after the slice, because a slice has its own peak.
    """
    names, slices = dict[str, str](), dict[str, list[str]]()  # names by UUID; UUIDs of slices by their GPU's index
    whole = dict[str, str]()  # UUIDs of GPUs by index
    for line in listed.splitlines():
        if found := _GPU.match(line):
            index, name, uuid = found.groups()
            names[uuid], whole[index], slices[index] = name, uuid, []
        elif found := _SLICE.match(line):
            profile, uuid = found.groups()
            names[uuid] = f"{name} {profile}"
            slices[index].append(uuid)
    first = {index: slices[index][0] if slices[index] else uuid for index, uuid in whole.items()}
    if chosen is None:
        undivided = [uuid for index, uuid in whole.items() if not slices[index]]
        return [names[uuid] for uuid in undivided or list(first.values())[:1]]
    seen = list[str]()
    for token in (part.strip() for part in chosen.split(",")):
        found_uuid = first.get(token) or next((u for u in names if token and u.startswith(token)), None)
        if found_uuid is None:
            break
        seen.append(names[found_uuid])
    return seen


# --- Counting GPUs. This goes through NVML and does not touch CUDA, because the caller may fork.


@functools.cache
def num_gpus() -> int:
    """Return how many CUDA devices PyTorch will see."""
    import torch  # not at the top: readers of records have no use for it

    return torch.cuda.device_count()  # asks NVML; `is_available` would ask the CUDA runtime


def refuses_to_share(ranks: int, gpus: int) -> str | None:
    """Return why NCCL cannot serve this many ranks of a node with this many GPUs, or None if it can."""
    if ranks <= gpus:
        return None
    have = pluralize(gpus, "GPU") if gpus else "no GPU"
    return f"{pluralize(ranks, 'rank')} of a node with {have} over nccl, which takes a GPU of its own for each rank"


# --- Digests of the code of installed distributions, which two of the same version may not share. Installers list every
# file with its hash and size in `RECORD`. A file that was edited since is hashed anew.

_CODE = (".py", ".so", ".pyd")


def code_digest(distributions: Iterable[str]) -> str:
    """Return a digest of the code of these distributions. Those that are not installed are left out."""
    own = [f"{name} {digest}" for name in sorted(set(distributions)) if (digest := _digest(name))]
    return hashlib.sha256("\n".join(own).encode()).hexdigest()[:16]


def distributions_of(package: str) -> list[str]:
    """Return the names of the distributions that install a top-level package or module."""
    return _by_package().get(package, [])


@functools.cache
def _by_package() -> dict[str, list[str]]:
    return {name: sorted(set(own)) for name, own in importlib.metadata.packages_distributions().items()}


@functools.cache
def _digest(name: str) -> str:
    """Return a digest of a distribution's code, or "" where its installer has left no list of it."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
    text = found.read_text("RECORD")
    if not text:
        return ""
    root, rows = str(found.locate_file("")), [row for row in csv.reader(text.splitlines()) if len(row) == 3]
    records = [os.path.join(root, path) for path, *_ in rows if path.endswith(".dist-info/RECORD")]
    installed_ns, digest = max(map(_mtime_ns, records), default=0), hashlib.sha256()
    for path, listed, size in sorted(row for row in rows if row[0].endswith(_CODE)):
        digest.update(f"{path}\0{_hash(os.path.join(root, path), listed, size, installed_ns)}\n".encode())
    return digest.hexdigest()


def _mtime_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _hash(path: str, listed: str, size: str, installed_ns: int) -> str:
    """Return the hash of a file: the listed one, unless the file has changed since."""
    try:
        about = os.stat(path)
        if listed and str(about.st_size) == size and about.st_mtime_ns <= installed_ns:
            return listed
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return "unreadable"

"""Private folders of launches and caches, and room on disks."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import re
import resource
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import meshmark
from meshmark.errors import InputError, NoSpaceError
from meshmark.text import text_of

# --- Room on a disk. A full disk is no fault of what runs on it.

NEEDED_BYTES = 16 * 2**20
"""Bytes that a launch needs. Logs, marks and reports are a few megabytes."""
_FULL_BYTES = 2**16
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, an exhausted quota, and of a file beyond `ulimit -f`."""
_HINTS = re.compile(
    "|".join(re.escape(os.strerror(number)) for number in _FULL)
    + r"|unexpected pos \d+ vs \d+|PytorchStreamWriter failed|iostream error"
)
"""Texts of errors that have lost their number. `torch.save` says only how far it came."""


def expect_space(folder: Path) -> None:
    """Raise `NoSpaceError` where a launch would not find room."""
    free = _free_bytes(folder)
    if free < NEEDED_BYTES:
        raise NoSpaceError(
            f"{str(folder)!r} has room for {free:,} bytes, and a launch needs {NEEDED_BYTES:,}: make room there, or "
            "name another folder in TMPDIR"
        )


def is_full(folder: Path) -> bool:
    """Return whether `folder` has almost no space left."""
    return _free_bytes(folder) < _FULL_BYTES


def means_no_space(error: BaseException, folders: Iterable[Path]) -> bool:
    """Return whether a full disk, an exhausted quota or `ulimit -f` caused `error`.

    An error that only mentions it in its text, like C++ errors, counts only if one of `folders`, to which it may have
    written, is almost full, or holds a file as large as files may be. Any code can write such a text.
    """
    causes = list(_causes(error))
    if any(isinstance(cause, OSError) and cause.errno in _FULL for cause in causes):
        return True
    if not any(_HINTS.search(text_of(cause)) for cause in causes):
        return False
    there = [folder for folder in folders if folder.exists()]
    return any(_free_bytes(folder) < NEEDED_BYTES for folder in there) or any(map(_has_largest_file, there))


def _has_largest_file(folder: Path) -> bool:
    """Return whether a file below `folder` has exactly the size that `ulimit -f` sets. The kernel cuts it off there."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY:
        return False
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # other ranks remove theirs meanwhile
                if os.lstat(os.path.join(path, name)).st_size == limit:
                    return True
    return False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _free_bytes(folder: Path) -> int:
    """Return the free bytes of a folder's file system, or 0 if no file can be added."""
    found = os.statvfs(folder)
    return 0 if found.f_files and not found.f_favail else found.f_bavail * found.f_frsize


# --- The private folder of one launch. It is removed with the launch or, where the launcher was killed, with its
# servers.

FOLDERS = "MESHMARK_FOLDERS"
"""Variable of servers: the path that every folder of their launcher starts with."""


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder of mode 0700 that is deleted at the end.

    Raises `NoSpaceError` if there is no room for a launch.
    """
    expect_space(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=folder_prefix()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_folders(start: str) -> None:
    """Remove this user's folders whose path begins with `start`: those of a launcher that is gone."""
    for folder in Path(start).parent.glob(f"{Path(start).name}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.geteuid():
                shutil.rmtree(folder, ignore_errors=True)  # which follows no link


def folder_prefix() -> str:
    """Return the prefix of the names of this process's folders.

    It is short, because sockets of `multiprocessing` are in them, whose paths have a limit.
    """
    return f"meshmark-{_token(os.getpid())}-"


@functools.cache
def _token(pid: int) -> str:
    """A process's number is not enough: containers that share a temporary folder count from 1 each."""
    return secrets.token_hex(4)


def import_folder(python: str) -> str:
    """Return the folder that a process of the interpreter `python` needs on its path to import this Meshmark, or "".

    Meshmark may be installed among the packages of an environment. Then this environment's own interpreter finds it,
    and another one must not have that folder on its path, because it would import the other packages from there too.
    """
    package = Path(meshmark.__file__).parent
    if package.parent.name not in ("site-packages", "dist-packages"):  # a checkout, which need not be installed
        return str(package.parent)
    return "" if Path(python) == Path(sys.executable) else str(_linked(package))


def python_path(environment: Mapping[str, str], python: str = sys.executable) -> str:
    """Return PYTHONPATH for a process of `python` that imports this Meshmark, behind what `environment` has."""
    return os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), import_folder(python)]))


@functools.cache
def _linked(package: Path) -> Path:
    """Return a folder with nothing but a link to `package`. It is deleted when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix=folder_prefix()))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / package.name).symlink_to(package)
    return folder


_LONGEST_SOCKET = 107
"""Bytes of the longest path of a Unix socket."""
_OWN_SOCKET = len("/meshmark-01234567-01234567/pymp-01234567/listener-01234567")


def socket_warning(temporary: Path) -> str | None:
    """Return a warning if sockets of `multiprocessing` in a rank's folder would have too long a path, else None.

    Such a socket passes tensors of data-loader workers. A rank that cannot make it waits for them for ever.
    """
    length, most = len(os.fsencode(temporary)), _LONGEST_SOCKET - _OWN_SOCKET
    if length <= most:
        return None
    return (
        f"the temporary folder's path has {length} characters: from {most + 1} on, sockets of Python's multiprocessing "
        "have too long a path there, and an engine with data-loader workers hangs; name a shorter one in TMPDIR"
    )


# --- Caches of frameworks. PyTorch compiles into $TMPDIR/torchinductor_USER and loads what it finds there. In a
# folder that all users share, whoever makes that name first has his code run by everyone else. Ranks therefore get
# folders inside one of mode 0700.

VARIABLES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "MPLCONFIGDIR": "matplotlib",
}
"""Subfolder that each variable names, unless the user has set it."""
_TMPDIR = "tmp"
"""Subfolder for what is written under TMPDIR while modules are imported; a launch's ranks use the launch's folder."""


def cache_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that direct caches and temporary files to private folders, and make these folders.

    A folder that `environment` names is kept. Raises `InputError` as `users_caches` does.
    """
    found = users_caches(environment)
    base = private_base(Path(tempfile.gettempdir()))
    ours = {name: base / part for name, part in VARIABLES.items() if name not in found} | {"TMPDIR": base / _TMPDIR}
    for folder in ours.values():
        folder.mkdir(mode=0o700, exist_ok=True)
    return found | {name: str(folder) for name, folder in ours.items()}


@contextlib.contextmanager
def private_caches() -> Iterator[None]:
    """Send the caches of frameworks that this process itself imports to the private folders.

    Importing `torch._dynamo` makes a folder with a guessable name, and fails if another user has made it first.
    """
    found = dict[str, str]()
    with contextlib.suppress(OSError):  # a launch, which needs them too, says so
        found = {name: folder for name, folder in cache_variables(os.environ).items() if name in VARIABLES}
    ours = [name for name in found if not os.environ.get(name)]
    os.environ.update(found)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def users_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the cache folders that `environment` names, and make them.

    Raises `InputError` if one belongs to another user, if others can write to it, or if PyTorch cannot open the name of
    the folder for temporary files.
    """
    try:
        temporary = tempfile.gettempdir()
    except OSError as error:
        raise InputError(f"{error.strerror}: name a folder that can be written to in TMPDIR") from error
    _expect_text(temporary)
    found = {name: environment[name] for name in VARIABLES if environment.get(name)}
    for name, folder in found.items():
        _expect_private(name, Path(folder))
    return found


def private_base(temporary: Path) -> Path:
    """Return this user's folder of caches in `temporary`. It is kept between runs, so that nothing is compiled twice.

    If another user has made it, or could have written to it, this process gets a new folder, which is removed when the
    process ends.
    """
    base = temporary / f"meshmark_caches_{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        base.mkdir(mode=0o700)
    about = base.lstat()
    if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077:
        return base
    return _make_base(temporary)


@functools.cache
def _make_base(temporary: Path) -> Path:
    base = Path(tempfile.mkdtemp(prefix=f"{folder_prefix()}caches-", dir=temporary))
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    return base


def _expect_text(temporary: str) -> None:
    """Raise `InputError` if the path is not UTF-8, which PyTorch's stores and shared memory need."""
    try:
        temporary.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the folder for temporary files is {os.fsencode(temporary)!r}, which is not UTF-8: PyTorch cannot open "
            "files there; name another one in TMPDIR"
        ) from error


def _expect_private(variable: str, folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        link, about = folder.lstat(), folder.stat()
    except OSError as error:
        raise InputError(f"{variable}={str(folder)!r}: {error.strerror}; name another folder, or unset it") from error
    owners = {link.st_uid, about.st_uid} - {os.geteuid(), 0}
    if owners or about.st_mode & 0o022:
        whose = f"is user {owners.pop()}'s" if owners else f"has mode {stat.S_IMODE(about.st_mode):04o}"
        raise InputError(
            f"{variable}={str(folder)!r} {whose}: others can put code there that runs as you; expected a folder of "
            "yours that nobody else can write to: `chmod go-w` it if it is yours, or unset the variable"
        )

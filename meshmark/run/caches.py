"""Folders that frameworks keep compiled code and settings in, where no other user of the machine can put anything.

PyTorch compiles into `$TMPDIR/torchinductor_USER` and loads what it finds there. In a folder that all users share,
whoever makes that name first has his code run by everyone else. Ranks therefore get folders inside one of mode 0700.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from meshmark.errors import InputError
from meshmark.run.launch_folder import folder_prefix

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
    """Variables that send caches and temporary files to private folders; the folders exist afterwards.

    A folder that `environment` names stays. Raises `InputError` as `users_caches` does.
    """
    found = users_caches(environment)
    base = private_base(Path(tempfile.gettempdir()))
    ours = {name: base / part for name, part in VARIABLES.items() if name not in found} | {"TMPDIR": base / _TMPDIR}
    for folder in ours.values():
        folder.mkdir(mode=0o700, exist_ok=True)
    return found | {name: str(folder) for name, folder in ours.items()}


def users_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """Folders of caches that `environment` names; they exist afterwards.

    Raises `InputError` if one belongs to another user, or if others can write to it; and if the folder for temporary
    files has a name that PyTorch cannot open.
    """
    _expect_text(tempfile.gettempdir())
    found = {name: environment[name] for name in VARIABLES if environment.get(name)}
    for name, folder in found.items():
        _expect_private(name, Path(folder))
    return found


def private_base(temporary: Path) -> Path:
    """This user's folder of caches in `temporary`, kept from run to run so that nothing is compiled twice.

    Where another user has taken its name, or could have written to it, this process gets a fresh one of its own, which
    goes when the process ends.
    """
    base = temporary / f"meshmark_caches_{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        base.mkdir(mode=0o700)
    about = base.lstat()
    if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077:
        return base
    return _own_base(temporary)


@functools.cache
def _own_base(temporary: Path) -> Path:
    base = Path(tempfile.mkdtemp(prefix=f"{folder_prefix()}caches-", dir=temporary))
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    return base


def _expect_text(temporary: str) -> None:
    """PyTorch's stores and shared memory take paths as UTF-8."""
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

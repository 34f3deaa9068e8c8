"""Git, asked about the repository around a folder."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

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

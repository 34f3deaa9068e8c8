"""A private folder of one run inside its results: nodes share it, and it goes when the run does."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from meshmark.errors import ResultsError
from meshmark.launch.cluster import Cluster
from meshmark.spec.case import Case

_ANSWER_SECONDS = 60.0
"""How long a node may take to tell, or to come for, the folder's name."""


class Scratch:
    """A folder with a name that no other run has, open to its user alone (0700): what is left there is unpickled."""

    def __init__(self, results: Path, cluster: Cluster) -> None:
        """Node 0 chooses the name; a call of all nodes. Raises `ResultsError` when `results` cannot be written."""
        spec, results = cluster.spec, results.absolute()  # ranks may start elsewhere
        try:
            results.mkdir(parents=True, exist_ok=True)
            own = tempfile.mkdtemp(prefix="scratch-", dir=results) if spec.node_rank == 0 else ""
            name = Path(own).name
            with _undone(own):
                if spec.nnodes > 1:
                    name = cluster.exchange("scratch", name, seconds=_ANSWER_SECONDS)[0]
                self.folder = results / name
                self._cluster, self._blind = cluster, self._find_blind(cluster, self.folder.is_dir())
            self._made = bool(own)
            if not own:
                with contextlib.suppress(FileExistsError):  # as it does where the nodes share their results
                    self.folder.mkdir(mode=0o700)
                    self._made = True
        except OSError as error:
            raise ResultsError(
                f"results folder {str(results)!r}: {error.strerror}; name another with --results"
            ) from error

    @property
    def missing(self) -> list[int]:
        """Nodes, of those that are left, that do not see what node 0 has made."""
        return [node for node in self._blind if node in self._cluster.numbers]

    @staticmethod
    def _find_blind(cluster: Cluster, here: bool) -> list[int]:
        if cluster.spec.nnodes == 1:
            return []
        seen = cluster.exchange("scratch seen", "yes" if here else "no", seconds=_ANSWER_SECONDS)
        return [node for node, answer in zip(cluster.numbers, seen, strict=True) if answer == "no"]

    def checkpoint(self, base: Case, scenario: str) -> Path:
        """A folder of what `scenario` of `base` saves, for all nodes."""
        folder = self.folder / hashlib.sha256(repr((base, scenario)).encode()).hexdigest()[:16]
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise ResultsError(f"{str(folder)!r} cannot be made: {error.strerror}; did its results move?") from error
        return folder

    def remove(self) -> None:
        """On the node that made it."""
        if self._made:
            shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def _undone(own: str) -> Iterator[None]:
    """Whoever has made a folder of which others cannot be told makes it undone."""
    try:
        yield
    except BaseException:
        if own:
            shutil.rmtree(own, ignore_errors=True)
        raise

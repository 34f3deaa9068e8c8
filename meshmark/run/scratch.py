"""A private folder of one run inside its results: nodes share it, and it goes when the run does."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

from meshmark.errors import ResultsError
from meshmark.run.cluster import Cluster

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
            if spec.nnodes > 1:
                name = cluster.exchange("scratch", name, seconds=_ANSWER_SECONDS)[0]
            self.folder = results / name
            self.missing = self._missing(cluster, self.folder.is_dir())
            """Nodes that do not see what node 0 has made."""
            self._made = bool(own)
            if not own:
                with contextlib.suppress(FileExistsError):  # as it does where the nodes share their results
                    self.folder.mkdir(mode=0o700)
                    self._made = True
        except OSError as error:
            raise ResultsError(
                f"results folder {str(results)!r}: {error.strerror}; name another with --results"
            ) from error

    @staticmethod
    def _missing(cluster: Cluster, here: bool) -> list[int]:
        if cluster.spec.nnodes == 1:
            return []
        seen = cluster.exchange("scratch seen", "yes" if here else "no", seconds=_ANSWER_SECONDS)
        return [node for node, answer in enumerate(seen) if answer == "no"]

    def renumber(self, stayed: list[int]) -> None:
        """`stayed`: the nodes that are left, by their numbers until now."""
        self.missing = [new for new, old in enumerate(stayed) if old in self.missing]

    def remove(self) -> None:
        """On the node that made it."""
        if self._made:
            shutil.rmtree(self.folder, ignore_errors=True)

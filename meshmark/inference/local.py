"""An engine that serves in this process: for engines of Meshmark's own, where starting a process would take longest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from meshmark.inference.contract import Engine, Request, Served
from meshmark.inference.process import EngineError
from meshmark.inference.serving import serve


class LocalEngine:
    """Serves as `EngineProcess` does, with an engine that is built already."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def serve(self, requests: Sequence[Request]) -> Served:
        """Serve requests to their ends. Raises `EngineError` if the engine fails."""
        try:
            return serve(self._engine, requests)
        except Exception as error:
            raise EngineError(f"the engine failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End the engine's own processes."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

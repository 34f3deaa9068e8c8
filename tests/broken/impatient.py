"""A plugin of pytest (`-p tests.broken.impatient`): nodes count as lost sooner than in 15 s, for a test that waits."""

from __future__ import annotations

from meshmark.launch import store

SILENT_SECONDS = 6.0
store.SILENT_SECONDS = store._CALL_SECONDS = SILENT_SECONDS  # before anything imports them from there

from meshmark.launch import cluster  # noqa: E402

cluster._BEAT_SECONDS = 1.0

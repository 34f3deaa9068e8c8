"""Records of several runs in one folder, each once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from meshmark.errors import ResultsError
from meshmark.run.record import Record
from meshmark.run.record_file import Reading, RecordFile, read_records
from meshmark.run.session import Session


def merge(folders: Iterable[Path], into: Path) -> Reading:
    """Append to `into` what the folders hold and it does not, in their order; of a folder that holds nothing, nothing.
    Returns what it then holds. Raises `ResultsError` when it cannot be written, or nothing is there."""
    complaints, held = list[str](), set[object]()
    with contextlib.suppress(ResultsError):
        there = read_records(into)
        held = {*map(_name, there.sessions), *map(_name, there.records)}
    with contextlib.closing(RecordFile(into)) as file:
        for folder in folders:
            try:
                reading = read_records(folder)
            except ResultsError as error:
                complaints.append(str(error))
                continue
            complaints += [f"{folder.name}: {complaint}" for complaint in reading.complaints]
            lines: list[Record | Session] = [*reading.sessions, *reading.records]
            for line in lines:
                if (name := _name(line)) not in held:
                    file.append(line)
                    held.add(name)
    merged = read_records(into)
    return Reading(records=merged.records, complaints=[*complaints, *merged.complaints], sessions=merged.sessions)


def _name(line: Record | Session) -> object:
    """What no other line has."""
    if isinstance(line, Session):
        return line.session, line.exit_code
    about = line.conformance
    return line.task, line.case, about.base, about.scenario, line.environment.date, line.launch.seconds

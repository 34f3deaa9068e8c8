"""The page of engines that generate text, from the records of suites/test_inference.py."""

from __future__ import annotations

from collections.abc import Sequence

from meshmark.inference.clauses import COPIES, LENGTHS, NEW_TOKENS
from meshmark.inference.judge import FACTOR
from meshmark.inference.run import InferenceRecord
from meshmark.records.judged_case import CaseVerdict
from meshmark.report.table import inline
from meshmark.report.table import table as markdown
from meshmark.text import pluralize


def inference_page(records: Sequence[InferenceRecord], links: str, left_out: str = "", between: str = "") -> str:
    """Return the page of what the records say.

    Args:
        records: One record a case.
        links: Sentence below the answer, such as where the page comes from.
        left_out: What was not judged, if anything.
        between: Sections between memory and clauses.
    """
    newest, commits = max(records, key=lambda record: record.date), sorted({record.commit for record in records})
    versions: dict[str, set[str]] = {}
    for record in records:
        for name, version in record.versions.items():
            versions.setdefault(name, set()).add(version)
    said = ", ".join(f"{name} {' and '.join(sorted(numbers))}" for name, numbers in sorted(versions.items()))
    judged = [(record, verdict) for record in records for verdict in record.verdicts]
    holding, right = sum(verdict.passed for _, verdict in judged), sum(record.passed for record in records)
    cases = f"{pluralize(len(records), 'case')} {'is' if right == len(records) == 1 else 'are'}"
    gaps = sum(record.passed and not all(verdict.passed for verdict in record.verdicts) for record in records)
    but_for = f", {gaps} of them apart from known gaps of their engines" if gaps else ""
    unfinished = sum(bool(record.unfinished) for record in records)
    but_for += f", {unfinished} unfinished by no fault of an engine" if unfinished else ""
    return f"""# Engines that generate text

**{right} of {cases} right**{but_for} ({holding} of {len(judged)} verdicts hold), at
{pluralize(len(commits), "commit")} ({", ".join(commits)}) on {newest.machine}, with {said}.
{links}
{left_out}
## Correct

Log probabilities of {len(LENGTHS)} prompts ({LENGTHS[0]} to {LENGTHS[-1]} tokens) and of {NEW_TOKENS} tokens that
follow each, against the same model in float64 at the run's own tokens. *detects* is the smallest error of one token's
log probability that fails: {FACTOR:g} times the noise of Transformers' own ways to compute the same. *greedy* counts
tokens that are float64's; where two are as likely within noise, either is right. In `fp8-cache` float64 rounds keys and
values as the engine declares; a rounding that is not to the nearest fails a clause of its own. A case is right if what
fails is a known gap of its engine.

{markdown([_correct(record) for record in records])}

## Memory

{markdown([_memory(record) for record in records])}

{_samples(records)}{between}## Clauses

{markdown(_clauses(records))}

{_failures(records)}
{_unfinished(records)}{_gaps(records)}"""


def unread(complaints: Sequence[str]) -> list[str]:
    """Return the part of the page about what could not be read, if anything."""
    lines = "\n".join(f"- {inline(complaint)}" for complaint in complaints)
    return [f"## What could not be read\n\n{lines}"] if complaints else []


def case_columns(record: InferenceRecord) -> dict[str, object]:
    """Return the columns that name a case."""
    return {name: record.case[name] for name in ("engine", "variant", "precision")}


def _correct(record: InferenceRecord) -> dict[str, object]:
    found = {verdict.name: verdict for verdict in record.verdicts}
    logprobs, greedy = found.get("log probabilities"), found.get("greedy tokens")
    if logprobs is None or greedy is None or not logprobs.numbers:
        ended = record.error or ("unfinished" if record.unfinished else "not judged")
        return {**case_columns(record), "log probabilities": f"**{inline(ended)}**"}
    numbers = logprobs.numbers
    off = f"off by {numbers['largest']:.1e}"
    return {
        **case_columns(record),
        "log probabilities": off if logprobs.passed else f"**{off}**",
        "noise": f"{numbers['noise']:.1e}",
        "detects": f"{numbers['detects']:.1e}",
        "greedy": f"{greedy.numbers.get('same', 0):.0f} of {greedy.numbers.get('total', 0):.0f}",
    }


def _memory(record: InferenceRecord) -> dict[str, object]:
    found = {verdict.name: verdict for verdict in record.verdicts}
    row = case_columns(record)
    for name in ("KV cache bytes", "KV blocks in use"):
        if verdict := found.get(name):
            row[name] = inline(verdict.text) if verdict.passed else f"**{inline(verdict.text)}**"
    return row


def _samples(records: Sequence[InferenceRecord]) -> str:
    """Return the table of blocks that parallel samples take."""
    rows = [
        {
            **case_columns(record),
            "blocks at the peak": f"{numbers['blocks']:.0f}",
            "full blocks of the prompt shared": f"{numbers['with_sharing']:.0f}",
            "nothing shared": f"{numbers['without_sharing']:.0f}",
        }
        for record in records
        for verdict in record.verdicts
        if verdict.name == "parallel samples" and "blocks" in (numbers := verdict.numbers)
    ]
    if not rows:
        return ""
    alone = [row for row in rows if row["blocks at the peak"] == row["nothing shared"]]
    engines = dict.fromkeys(f"{row['engine']} ({row['variant']})" for row in alone)
    silent = f" No block is shared by {', '.join(engines)}." if engines else ""
    return f"""### Parallel samples

{COPIES} parallel samples of one prompt, at the peak, and what closed forms say with and without sharing.{silent}

{markdown(rows)}

"""


_ELSEWHERE = ("log probabilities", "greedy tokens", "KV cache bytes", "KV blocks in use")


def _clauses(records: Sequence[InferenceRecord]) -> list[dict[str, object]]:
    """Return a row for each clause, with what each engine showed."""
    rows: dict[str, dict[str, object]] = {}
    for record in records:
        for verdict in record.verdicts:
            if verdict.name not in _ELSEWHERE:
                row = rows.setdefault(verdict.name, {"clause": verdict.name})
                column = f"{record.case['engine']} {record.case['precision']}"
                row[column] = _shown(verdict)
    return list(rows.values())


def _shown(verdict: CaseVerdict) -> str:
    if verdict.gap and not verdict.passed:
        return "known gap"
    if verdict.passed and verdict.numbers.get("evicted", 1) == 0:
        return "not judged"
    return "holds" if verdict.passed else "**fails**"


def _failures(records: Sequence[InferenceRecord]) -> str:
    lines = [
        f"- {' '.join(map(str, case_columns(record).values()))}, {verdict.name}: {inline(verdict.text)}"
        for record in records
        for verdict in record.verdicts
        if verdict.fails
    ]
    lines += [
        f"- {record.case['engine']} {record.case['variant']}: {inline(record.error)}"
        for record in records
        if record.error
    ]
    return "## What fails\n\n" + "\n".join(lines) + "\n" if lines else "Nothing fails.\n"


def _unfinished(records: Sequence[InferenceRecord]) -> str:
    """Return the cases that something outside their engines kept from their ends, and what it was."""
    lines = [
        f"- {' '.join(map(str, case_columns(record).values()))}: {inline(record.unfinished)}"
        for record in records
        if record.unfinished
    ]
    return "\n## What did not finish\n\n" + "\n".join(lines) + "\n" if lines else ""


def _gaps(records: Sequence[InferenceRecord]) -> str:
    """Return what engines are known to fail, with links to the reproducers, and known gaps that no longer show."""
    known: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        for verdict in record.verdicts:
            if verdict.gap:
                outcome = "no longer shows: take it out of the adapter" if verdict.passed else verdict.text
                known.setdefault((verdict.gap, verdict.name, outcome), []).append(
                    " ".join(map(str, case_columns(record).values()))
                )
    lines = [
        f"- [{gap}](gaps.md#{gap}), {clause} ({'; '.join(cases)}): {inline(outcome)}"
        for (gap, clause, outcome), cases in known.items()
    ]
    return "\n## Known gaps\n\n" + "\n".join(lines) + "\n" if lines else ""

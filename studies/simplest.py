"""How much of a plain PyTorch loop each framework makes a user write anew, counted in examples/loops.

Every example trains the same model on the same rows, and ends with the loss of plain.py (tests/test_simplest.py runs
them on two ranks). What is counted is statements: those that an example has and plain.py has not, the heads of blocks
among them. Lines, names and comments do not count, so that formatting does not matter. `python -m studies.simplest`
keeps the counts where `meshmark which` reads them.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path

from meshmark.report.which import LOOPS, Loop
from meshmark.serial import encode

FOLDER = Path(__file__).parents[1] / "examples" / "loops"
PLAIN = FOLDER / "plain.py"
ADAPTERS = {
    "ddp": "ddp",
    "ddp_zero1": "ddp-zero1",
    "fsdp1": "fsdp1",
    "fsdp2": "fsdp2",
    "accelerate_ddp": "accelerate",
    "accelerate_fsdp2": "accelerate-fsdp2",
    "fabric_ddp": "fabric",
    "deepspeed_zero1": "deepspeed ZeRO-1",
    "deepspeed_zero2": "deepspeed ZeRO-2",
    "deepspeed_zero3": "deepspeed ZeRO-3",
    "fairscale_oss": "fairscale-oss ZeRO-2",
    "gpipe": "gpipe",
    "pipeline": "pipeline",
}
"""Adapter that stands for each example in the other tables, by the example's name."""


def statements(source: str) -> Counter[str]:
    """Return the statements of a script as Python prints them, and of a block its head. Docstrings are left out."""
    found: Counter[str] = Counter()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            text = ast.unparse(node)
            found[text.partition("\n")[0] if hasattr(node, "body") else text] += 1
    return found


def written_anew() -> dict[str, int]:
    """Return, by the example's name, the number of its statements that the plain loop has not, the fewest first."""
    plain = statements(PLAIN.read_text(encoding="utf-8"))
    counts = {
        path.stem: (statements(path.read_text(encoding="utf-8")) - plain).total()
        for path in FOLDER.glob("*.py")
        if path != PLAIN
    }
    return dict(sorted(counts.items(), key=lambda pair: (pair[1], pair[0])))


def loops() -> list[Loop]:
    """Return the examples with their counts, the fewest first."""
    return [
        Loop(adapter=ADAPTERS[name], path=f"examples/loops/{name}.py", num_statements=count)
        for name, count in written_anew().items()
    ]


if __name__ == "__main__":
    LOOPS.write_text(json.dumps(encode(loops()), indent=1) + "\n", encoding="utf-8")

"""Draw a simulated pipeline step as SVG: one line per rank, one box per pass."""

from __future__ import annotations

from html import escape

from meshmark.plan.simulator import Run

_COLOURS = {"F": "#5b8dd6", "B": "#6fb98f", "W": "#e3a857"}
_NAMES = {"F": "forward", "B": "backward", "W": "weight gradient"}
_LEFT, _TOP, _LINE, _WIDTH = 60, 46, 26, 1100


def timeline_svg(run: Run, title: str) -> str:
    """Return the whole step as SVG. A box shows its micro-batch if there is room."""
    scale = _WIDTH / run.seconds if run.seconds else 0.0
    height = _TOP + _LINE * run.num_ranks + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="{_LEFT}" y="16" font-size="13">{escape(title)}: {run.seconds:.4g} s, '
        f"idle {100 * run.bubble_of_step:.1f} % of the step</text>",
    ]
    kinds = sorted({slot.task.kind for slot in run.slots}, key="FBW".index)
    for i, kind in enumerate(kinds):
        x = _LEFT + 120 * i
        parts.append(f'<rect x="{x}" y="24" width="12" height="12" fill="{_COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 17}" y="34">{_NAMES[kind]}</text>')
    for rank in range(run.num_ranks):
        parts.append(f'<text x="4" y="{_TOP + _LINE * rank + 16}">rank {rank}</text>')
    for slot in run.slots:
        left, width = _LEFT + slot.start * scale, (slot.end - slot.start) * scale
        y = _TOP + _LINE * slot.rank
        shade = 1.0 - 0.35 * (slot.task.chunk % 2)
        parts.append(
            f'<rect x="{left:.2f}" y="{y}" width="{width:.2f}" height="{_LINE - 4}" fill="{_COLOURS[slot.task.kind]}" '
            f'fill-opacity="{shade}" stroke="#fff" stroke-width="0.5"/>'
        )
        if width > 14:
            middle = left + width / 2
            text = slot.task.micro_batch
            parts.append(f'<text x="{middle:.2f}" y="{y + 15}" text-anchor="middle">{text}</text>')
    return "\n".join([*parts, "</svg>", ""])

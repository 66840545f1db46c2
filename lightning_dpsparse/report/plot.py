"""Epsilon over the steps of a run, as a line plot in inline SVG.

The page must not load anything, so the plot is drawn here and not by a library. `page.py` uses it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_dpsparse.report.text import escape

# Small on purpose: a phone shows it at about its own size, and its letters stay readable.
_WIDTH, _HEIGHT = 400, 260
_TOP, _BOTTOM = 14, 44
_LETTER = 7  # an upper bound on the width of a digit at 12px


def draw_epsilon_curve(points: Sequence[tuple[int, float]], target: float | None) -> str:
    """Draw epsilon over steps, with a dashed line at the target. One point is enough."""
    if not points:
        return "<p>There is nothing to draw: no step has a bounded epsilon.</p>"
    last = max(steps for steps, _ in points)
    x_ticks = ticks(last, 4)
    y_ticks = ticks(max([epsilon for _, epsilon in points] + [target or 0.0]) * 1.08, 5)
    right = _WIDTH - max(16, _LETTER / 2 * len(escape(x_ticks[-1])))
    left = 30 + _LETTER * max(len(escape(tick)) for tick in y_ticks)

    def x(steps: float) -> float:
        return round(left + (right - left) * steps / x_ticks[-1], 2)

    def y(epsilon: float) -> float:
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * epsilon / y_ticks[-1], 2)

    floor, middle = y(0), (_HEIGHT - _BOTTOM + _TOP) / 2
    drawn = sorted(points)
    parts = [
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'aria-labelledby="plot-title plot-desc">',
        '<title id="plot-title">Epsilon over steps</title>',
        f'<desc id="plot-desc">{_describe(drawn, target)}</desc>',
    ]
    for tick in y_ticks:
        parts.append(f'<line class="grid" x1="{x(0)}" y1="{y(tick)}" x2="{right}" y2="{y(tick)}"/>')
        parts.append(f'<text x="{x(0) - 6}" y="{y(tick) + 4}" class="end">{escape(tick)}</text>')
    for tick in x_ticks:
        parts.append(
            f'<line class="axis" x1="{x(tick)}" y1="{floor}" x2="{x(tick)}" y2="{floor + 4}"/>'
            f'<text x="{x(tick)}" y="{floor + 18}" class="middle">{escape(tick)}</text>'
        )
    parts.append(f'<path class="axis" d="M{x(0)} {_TOP}V{floor}H{right}"/>')
    parts.append(f'<text x="{(left + right) / 2}" y="{_HEIGHT - 6}" class="middle">steps</text>')
    parts.append(
        f'<text transform="translate(14 {middle}) rotate(-90)" class="middle">epsilon ε</text>'
    )
    if target is not None:
        parts.append(
            f'<line class="target" x1="{x(0)}" y1="{y(target)}" x2="{right}" y2="{y(target)}"/>'
            f'<text x="{x(0) + 6}" y="{y(target) - 5}">target ε {escape(target)}</text>'
        )
    line = " ".join(f"{x(steps)},{y(epsilon)}" for steps, epsilon in drawn)
    end_steps, end_epsilon = drawn[-1]
    parts.append(f'<polyline class="curve" points="{line}"/>')
    parts.append(f'<circle class="dot" cx="{x(end_steps)}" cy="{y(end_epsilon)}" r="3.5"/>')
    parts.append("</svg>")
    return "\n".join(parts)


def ticks(top: float, count: int) -> list[float]:
    """Round numbers for an axis from 0 to `top` or just above, about `count` of them.

    >>> ticks(2.3, 5)
    [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    >>> ticks(0, 5)
    [0.0, 1.0]
    """
    if top <= 0:
        return [0.0, 1.0]
    size = 10.0 ** math.floor(math.log10(top / count))
    step = next(size * m for m in (1, 2, 5, 10) if size * m * count >= top * (1 - 1e-9))
    return [float(f"{step * i:.12g}") for i in range(math.ceil(top / step * (1 - 1e-9)) + 1)]


def _describe(points: Sequence[tuple[int, float]], target: float | None) -> str:
    steps, epsilon = points[-1]
    reached = f"Epsilon is {escape(epsilon)} after {escape(steps)} steps"
    first = f", and was {escape(points[0][1])} after {escape(points[0][0])}" * (len(points) > 1)
    aim = "no target was set" if target is None else f"the target is {escape(target)}"
    return f"{reached}{first}; {aim}."

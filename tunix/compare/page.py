"""A page of HTML about several runs, which needs no other file: tables, and curves as SVG."""

import math
from collections.abc import Callable
from html import escape

from tunix.compare.history import AXES, History, list_differences, list_results, thin

COLOURS = ("#2f6fde", "#d1495b", "#2e933c", "#8f4fbf", "#c77d0a", "#17808c", "#666666")
WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 460, 300, 56, 16, 34, 12  # of a picture and its margins
MOST_POINTS = 400  # of a curve; a longer one is made of means

STYLE = """
:root { color-scheme: light dark; --ink: #1d1f24; --pale: #6a6f7a; --line: #d9dce2; --back: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7e9ee; --pale: #9aa0ab; --line: #363b45; --back: #16181d; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 24px auto;
  max-width: 1440px; padding: 0 20px; }
h1 { font-size: 22px; } h2 { font-size: 17px; margin-top: 32px; }
table { border-collapse: collapse; } .scroll { overflow-x: auto; }
th, td { text-align: left; padding: 5px 18px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
th { font-weight: 600; } td:first-child, th:first-child { white-space: nowrap; color: var(--pale); font-weight: 400; }
figure { margin: 0; } .pictures { display: flex; flex-wrap: wrap; gap: 12px; } svg { max-width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--pale); } svg .axis { stroke: var(--line); }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 7px; }
.note { color: var(--pale); }
"""


def make_page(histories: list[History]) -> str:
    """Return the page as text."""
    names = [
        f'<span class="swatch" style="background:{colour}"></span>{escape(each.name)}'
        for each, colour in zip(histories, COLOURS * len(histories), strict=False)
    ]
    measure = histories[0].measure
    pictures = "".join(f"<figure>{_draw(histories, axis)}</figure>" for axis in AXES)
    folders = "".join(f"<li>{name} <span class='note'>{escape(str(each.folder))}</span></li>"
                      for name, each in zip(names, histories, strict=True))  # fmt: skip
    differences = list_differences(histories)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{len(histories)} runs</title><style>{STYLE}</style></head><body>
<h1>{len(histories)} runs</h1>
<ul>{folders}</ul>
<h2>Numbers</h2>
{_table("", names, list_results(histories))}
<h2>{measure.capitalize()}</h2>
<p class="note">Solid: training. Dashed: held out.</p>
<div class="pictures">{pictures}</div>
<h2>Keys that differ</h2>
{_table("key", names, differences) if differences else "<p>The configs are equal.</p>"}
</body></html>
"""


def _table(corner: str, names: list[str], rows: list[tuple[str, list[str]]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in [corner, *names])
    body = ""
    for title, values in rows:
        cells = "".join(f"<td>{escape(value)}</td>" for value in [title, *values])
        body += f"<tr>{cells}</tr>\n"
    return f'<div class="scroll"><table><tr>{head}</tr>\n{body}</table></div>'


def _draw(histories: list[History], axis: str) -> str:
    """Return the curves of all runs over one axis as SVG."""
    measure = histories[0].measure
    curves = {
        (each.name, split): thin(each.curve(axis, split), MOST_POINTS)
        for each in histories
        for split in ("train", "held_out")
    }
    points = [point for curve in curves.values() for point in curve]
    xs, ys = sorted(x for x, _ in points), sorted(y for _, y in points)
    # A loss begins at 10 and ends near 3: with the first steps in the picture, all later ones would be one flat line.
    # So the highest 3 % of the points are cut off. The clip path below cuts the lines that leave the frame.
    high = ys[-1] if measure == "reward" else ys[min(len(ys) - 1, round(0.97 * len(ys)))]
    x, y = _scale(xs[0], xs[-1], LEFT, WIDTH - RIGHT), _scale(ys[0], high, HEIGHT - BOTTOM, TOP)
    parts = []
    for value in ticks(ys[0], high):
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in ticks(xs[0], xs[-1], 4):
        parts.append(
            f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{shorten(value)}</text>'
        )
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">{AXES[axis]}</text>')
    frame = f'x="{LEFT}" y="{TOP - 4}" width="{WIDTH}" height="{HEIGHT - BOTTOM - TOP + 8}"'
    parts.append(f'<clipPath id="clip-{axis}"><rect {frame}/></clipPath><g clip-path="url(#clip-{axis})">')
    for number, ((name, split), curve) in enumerate(curves.items()):  # two curves a run, in one colour
        if curve:
            line = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in curve)
            title = f"{name}, {split.replace('_', ' ')}: {curve[-1][1]:.4f} at the end"
            parts.append(_polyline(line, COLOURS[number // 2 % len(COLOURS)], title, dashed=split == "held_out"))
    label = f"{measure} by {AXES[axis]}"
    body = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="{label}">{body}</g></svg>'


def _polyline(points: str, colour: str, title: str, dashed: bool) -> str:
    """Return a curve of SVG."""
    dashes = ' stroke-dasharray="6 4"' if dashed else ""
    style = f'fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"{dashes}'
    return f'<polyline points="{points}" {style}><title>{escape(title)}</title></polyline>'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers between two, for the labels of an axis: ticks(0, 9) is 0, 2, 4, 6, 8."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(step * power for step in (1, 2, 5, 10) if step * power >= rough)
    first = -(-low // size)  # rounded up: the first tick lies within the axis
    return [round(size * n, 12) for n in range(int(first), int(high // size) + 1)]


def shorten(value: float) -> str:
    """Return a number as a label: 1,500,000 as 1.5M."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the linear map from [low, high] to [start, end]."""
    return lambda value: start + (value - low) / ((high - low) or 1) * (end - start)

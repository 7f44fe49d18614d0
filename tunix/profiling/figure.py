"""The communication of a step as a picture."""

import io

from PIL import Image, ImageDraw, ImageFont

from tunix.profiling.communication import Communication

WIDTH, ROW, LEFT, RIGHT = 1100, 34, 240, 330  # pixels: of the picture, a row, and the words beside the bars
ARITHMETIC, HIDDEN, EXPOSED, PREDICTED, INK = "#b9c4cc", "#8fb8de", "#d1495b", "#222222", "#222222"
KEYS = ((ARITHMETIC, "arithmetic"), (HIDDEN, "communication, hidden"), (EXPOSED, "communication, exposed"))
Bar = tuple[str, list[tuple[float, str]], str, float | None]  # label, lengths with colours, words, predicted


def picture(found: Communication) -> bytes:
    """A PNG: the step, then each kind of collective on its axes; a line where it is predicted to end."""
    step_s, exposed_s = found.mean("span_s"), found.mean("exposed_s")
    rest = [(step_s - exposed_s, ARITHMETIC), (exposed_s, EXPOSED)]
    bars: list[Bar] = [("step", rest, f"{1e3 * step_s:,.2f} ms", None)]
    for row in found.per_axis:
        predicted = found.predicted.get((row.kind, row.axes))
        bars.append(
            (
                f"{row.kind} {'+'.join(row.axes)}",
                [(row.time_s - row.exposed_s, HIDDEN), (row.exposed_s, EXPOSED)],
                f"{1e3 * row.time_s:,.2f} ms, {row.count:,} x, {row.bus_gb_per_s:,.3g} GB/s on the bus",
                predicted.time_s if predicted else None,
            )
        )
    return _draw(f"communication of {found.steps}, {len(found.timelines)} devices", bars)


def _draw(title: str, bars: list[Bar]) -> bytes:
    font = ImageFont.load_default(15)
    image = Image.new("RGB", (WIDTH, ROW * (len(bars) + 2) + 10), "white")
    draw = ImageDraw.Draw(image)
    draw.text((10, 8), title, INK, font)
    keys = [*KEYS, *([(PREDICTED, "predicted")] if any(bar[3] is not None for bar in bars) else [])]
    for place, (colour, words) in enumerate(keys):
        at = LEFT + 190 * place
        draw.rectangle((at, ROW + 8, at + 14, ROW + 22), colour)
        draw.text((at + 22, ROW + 6), words, INK, font)
    longest = max([sum(length for length, _ in parts) for _, parts, *_ in bars] + [bar[3] or 0.0 for bar in bars])
    scale = (WIDTH - LEFT - RIGHT) / longest if longest else 0.0
    for place, (label, parts, words, predicted) in enumerate(bars):
        top, left = ROW * (place + 2), float(LEFT)
        draw.text((10, top + 6), label, INK, font)
        for length, colour in parts:
            draw.rectangle((left, top + 4, left + scale * length, top + ROW - 6), colour)
            left += scale * length
        draw.text((left + 8, top + 6), words, INK, font)
        if predicted is not None:
            x = LEFT + scale * predicted
            draw.line((x, top, x, top + ROW - 2), PREDICTED, 3)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()

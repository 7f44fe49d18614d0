"""Images that are drawn with Pillow: horizontal bars, each made of stacked parts; and images with what a model says."""

import io
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

ROW, LABEL, BARS = 26, 250, 430  # pixels: a row's height; widths of labels and of the longest bar
INK, PALE, LIMIT = "#222222", "#8a8a8a", "#b02a37"


@dataclass(frozen=True)
class Bar:
    parts: dict[str, float]  # length of each part by its name, drawn from left to right
    text: str  # text to the right of the bar
    mark: float | None = None  # where a vertical line crosses the bar, in the unit of the lengths


@dataclass(frozen=True)
class Panel:
    """Bars below one another, all to the same scale."""

    title: str
    colours: dict[str, str]  # colour of each part by its name; also the legend
    bars: list[Bar]
    limit: float | None = None  # where a vertical line crosses all bars
    notes: dict[str, str] = field(default_factory=dict)  # more entries of the legend, with their colours


def plot(title: str, labels: list[tuple[str, str]], panels: list[Panel]) -> bytes:
    """Return a PNG of panels beside one another; `labels` are text and colour of each row, shared by all panels."""
    font = ImageFont.load_default(13)
    panel_width = BARS + 30 + round(max(font.getlength(bar.text) for panel in panels for bar in panel.bars))
    image = Image.new("RGB", (LABEL + len(panels) * panel_width, ROW * (len(labels) + 4)), "white")
    canvas = ImageDraw.Draw(image)
    canvas.text((10, 8), title, INK, ImageFont.load_default(16))
    for index, (label, ink) in enumerate(labels):
        canvas.text((10, ROW * (index + 3) + 5), label, ink, font)
    for index, panel in enumerate(panels):
        _plot(canvas, font, panel, LABEL + index * panel_width)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def _plot(canvas: ImageDraw.ImageDraw, font: Any, panel: Panel, left: int) -> None:
    canvas.text((left, ROW + 8), panel.title, INK, font)
    at = left
    for name, colour in (panel.colours | panel.notes).items():
        canvas.rectangle((at, 2 * ROW + 8, at + 11, 2 * ROW + 19), colour)
        canvas.text((at + 16, 2 * ROW + 5), name, INK, font)
        at += 26 + round(canvas.textlength(name, font))
    max_value = max([panel.limit or 0.0, *(max(sum(bar.parts.values()), bar.mark or 0.0) for bar in panel.bars)])
    if panel.limit:
        max_value = min(max_value, 2 * panel.limit)  # a bar far past the limit is cut, or it would dwarf all others
    scale = (BARS - 10) / max_value if max_value else 0.0
    for index, bar in enumerate(panel.bars):
        top, start = ROW * (index + 3), float(left)
        for name, length in bar.parts.items():
            end = min(start + scale * length, left + BARS - 10)
            canvas.rectangle((start, top + 4, end, top + ROW - 6), panel.colours[name])
            start = end
        text_at, limit_at = start + 6, left + scale * (panel.limit or 0.0)
        if text_at < limit_at < text_at + font.getlength(bar.text):  # the line of the limit would cross the words
            text_at = limit_at + 6
        canvas.text((text_at, top + 5), bar.text, INK, font)
        if bar.mark is not None:
            mark_at = left + scale * bar.mark
            canvas.line((mark_at, top, mark_at, top + ROW - 2), INK, 2)
    if panel.limit:
        limit_at = left + scale * panel.limit
        canvas.line((limit_at, 3 * ROW, limit_at, ROW * (len(panel.bars) + 3)), LIMIT, 2)
        canvas.text((limit_at + 6, ROW * (len(panel.bars) + 3)), f"limit {panel.limit:.3g}", LIMIT, font)


# A sheet of images with what a model says about them, for sinks that show images.

COLUMNS, SIDE, LINE, MARGIN = 4, 160, 16, 6  # of the sheet; pixels of an image, of a line of text and around both
WIDTH = 26  # characters of a line
RIGHT, WRONG, PLAIN = (20, 120, 40), (190, 30, 30), (40, 40, 40)


class AnsweredImage(NamedTuple):
    """An image with the text behind it, the answer of the model, and that of the data."""

    pixels: np.ndarray  # [y, x, 3] uint8
    question: str
    answer: str
    expected: str

    @property
    def is_right(self) -> bool:
        return self.answer.strip() == self.expected.strip()


def draw_sheet(cells: list[AnsweredImage]) -> bytes:
    """Return a PNG with the images in rows; below each its question and the answer: green, or red with the right
    one."""
    rows, width, height = math.ceil(len(cells) / COLUMNS), SIDE + 2 * MARGIN, SIDE + 3 * LINE + 2 * MARGIN
    sheet = Image.new("RGB", (COLUMNS * width, rows * height), (255, 255, 255))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for number, cell in enumerate(cells):
        x, y = number % COLUMNS * width + MARGIN, number // COLUMNS * height + MARGIN
        image = Image.fromarray(cell.pixels).resize((SIDE, SIDE), Image.Resampling.NEAREST)
        sheet.paste(image, (x, y))
        lines = [(cell.question, PLAIN), (cell.answer, RIGHT if cell.is_right else WRONG)]
        if not cell.is_right:
            lines.append((f"({cell.expected})", PLAIN))
        for line, (text, color) in enumerate(lines):
            draw.text((x, y + SIDE + line * LINE), shorten(text), color, font)
    file = io.BytesIO()
    sheet.save(file, "PNG")
    return file.getvalue()


def shorten(text: str) -> str:
    """Return the end of a text in one line, which fits below an image."""
    line = " ".join(text.split())
    line = line.encode("latin-1", "replace").decode("latin-1")  # what Pillow's own font has
    return line if len(line) <= WIDTH else "..." + line[3 - WIDTH :]

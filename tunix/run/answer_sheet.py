"""A sheet of images with what a model says about them, for sinks that show images."""

import io
import math
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

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

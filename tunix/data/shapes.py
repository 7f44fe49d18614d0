"""The source `shapes`: images that the project draws, with questions about them. Nothing to download."""

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from tunix.base.config_types import Count
from tunix.data.files import Item, Rows, Unit

if TYPE_CHECKING:  # a config is checked without it
    from PIL.ImageDraw import ImageDraw

COLORS = {"red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 90, 200), "yellow": (240, 200, 20)}
SHAPES = ("circle", "square", "triangle")
CELLS = 2  # in a row of the image, each with room for one shape
IMAGE_BYTES = 500  # of one image, roughly: it decides only how the work is cut


class Shapes(Rows):
    """Images of one to four equal shapes in one color, each with a question. Columns: images, question ("how many?",
    "what color?", "what shape?"), answer ("3", "red", "circle")."""

    source: Literal["shapes"]
    """Where documents come from."""
    num_rows: Count
    """Images."""
    image_size: Annotated[Count, Field(ge=16)]
    """Rows and columns of pixels."""

    def units(self, unit_bytes: int) -> list[Unit]:
        """Return one unit: all images."""
        version = f"{self.num_rows} {self.image_size}"
        return [Unit("shapes", "", 0, self.num_rows, self.num_rows * IMAGE_BYTES, version)]

    def read(self, unit: Unit) -> Iterator[Item]:
        for number in range(unit.start, unit.stop):
            yield Item(f"shapes@{number}", draw_row(number, self.image_size))


def draw_row(number: int, size: int) -> dict[str, Any]:
    """Return the row of a number: the same on every machine."""
    import numpy as np
    from PIL import Image, ImageDraw

    rng = np.random.default_rng(number)
    color, shape = rng.choice(list(COLORS)), rng.choice(SHAPES)
    background = int(rng.integers(160, 256))
    image = Image.new("RGB", (size, size), (background,) * 3)
    cells = rng.permutation(CELLS * CELLS)[: rng.integers(1, CELLS * CELLS + 1)]
    for cell in cells.tolist():
        side = size // CELLS
        radius = int(rng.integers(side // 4, side * 3 // 8 + 1))
        # The middle of a shape, such that the shape stays within its cell.
        x, y = (int(rng.integers(radius, side - radius)) for _ in range(2))
        _draw_shape(ImageDraw.Draw(image), shape, cell % CELLS * side + x, cell // CELLS * side + y, radius, color)
    file = io.BytesIO()
    image.save(file, "PNG")
    answers = {"how many?": str(len(cells)), "what color?": str(color), "what shape?": str(shape)}
    question = list(answers)[number % len(answers)]
    return {"images": [{"bytes": file.getvalue()}], "question": question, "answer": answers[question]}


def _draw_shape(draw: "ImageDraw", shape: str, x: int, y: int, radius: int, color: str) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        draw.ellipse(box, COLORS[color])
    elif shape == "square":
        draw.rectangle(box, COLORS[color])
    else:
        draw.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], COLORS[color])

"""Curves in a terminal: each character is a grid of 2 x 4 dots of braille.

U+2800 + bits     1   8       bit of each dot, as Unicode numbers them: rows 1 to 3 came first,
                  2  10       the fourth row was added later
                  4  20
                 40  80
"""

from rich.text import Text

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bit of the dot in a row and column of a character
COLOURS = ("blue", "red", "green", "magenta", "yellow", "cyan", "white")

Curve = list[tuple[float, float]]


def draw_curves(curves: dict[str, Curve], title: str, width: int = 90, height: int = 16) -> Text:
    """Return curves by name as lines of text, with the ranges of both axes; `width` and `height` are in characters."""
    points = [point for curve in curves.values() for point in curve]
    (left, right), (low, high) = ((min(each), max(each)) for each in zip(*points, strict=True))
    grid = [[(0, "") for _ in range(width)] for _ in range(height)]
    for (_, curve), colour in zip(curves.items(), COLOURS * len(curves), strict=False):
        for x, y in curve:
            column = round((x - left) / ((right - left) or 1) * (2 * width - 1))
            # Row 0 is the top of the picture, and the highest value.
            row = round((high - y) / ((high - low) or 1) * (4 * height - 1))
            # A character has one colour: where two curves meet in it, that of the later curve.
            bits, _ = grid[row // 4][column // 2]
            grid[row // 4][column // 2] = (bits | DOTS[row % 4][column % 2], colour)
    text = Text(f"{title}\n")
    for number, row_of_cells in enumerate(grid):
        edge = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}.get(number, "")
        text.append(f"{edge:>10} ")
        for bits, colour in row_of_cells:
            text.append(chr(0x2800 + bits) if bits else " ", colour)
        text.append("\n")
    text.append(f"{'':11}{left:<{width // 2}.4g}{right:>{width - width // 2}.4g}\n")
    for name, colour in zip(curves, COLOURS * len(curves), strict=False):
        text.append(f"{'':11}{name}\n", colour)
    return text

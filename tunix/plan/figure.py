"""A plan as a picture: memory of each mesh against what a device may use, and where the time of its step goes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from tunix.layout import shown
from tunix.plan.cluster import Cluster
from tunix.plan.ranking import GIB, Candidate, Ranking

ROW, LABEL, BARS, WORDS = 26, 250, 430, 150  # pixels
INK, PALE, LIMIT = "#222222", "#8a8a8a", "#b02a37"
MEMORY = {"weights": "#2a6f97", "optimizer": "#61a5c2", "gradients": "#e9c46a", "temporary": "#c9d6df"}
TIME = {"arithmetic": "#2a6f97", "hidden communication": "#c9d6df", "exposed communication": "#d1495b"}
MOST = 16  # meshes shown


@dataclass(frozen=True)
class Panel:
    """Bars beside one another, a row for each mesh."""

    title: str
    colours: dict[str, str]
    rows: list[tuple[dict[str, float], str]]  # lengths by part, and words after them
    limit: float | None = None


def save(ranking: Ranking, cluster: Cluster, path: Path) -> None:
    """Write a PNG of the meshes that divide model and batch, best first."""
    meshes = [*ranking.fit, *ranking.too_large][:MOST]
    memory = Panel("memory of a device, GiB", MEMORY, [_memory(each) for each in meshes], ranking.limit / GIB)
    time = Panel("time of a step, s (predicted)", TIME, [_time(each) for each in meshes])
    image = Image.new("RGB", (LABEL + 2 * (BARS + WORDS), ROW * (len(meshes) + 4)), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(13)
    draw.text((10, 8), f"{cluster}: predicted, not measured", INK, ImageFont.load_default(16))
    for place, each in enumerate(meshes):
        ink = INK if each.memory <= ranking.limit else PALE
        draw.text((10, ROW * (place + 3) + 5), shown(each.sizes), ink, font)
    for place, panel in enumerate((memory, time)):
        _draw(draw, font, panel, LABEL + place * (BARS + WORDS))
    image.save(path, "PNG", optimize=True)


def _memory(candidate: Candidate) -> tuple[dict[str, float], str]:
    parts = {name: size / GIB for name, size in candidate.num_bytes.items()}
    return parts, f"{candidate.memory / GIB:.1f}, {candidate.source}"


def _time(candidate: Candidate) -> tuple[dict[str, float], str]:
    """Hidden communication goes on at the same time as arithmetic: it is shown as the part of it that it takes."""
    hidden = min(candidate.compute_s, candidate.communication_s - candidate.exposed_s)
    parts = dict(zip(TIME, (candidate.compute_s - hidden, hidden, candidate.exposed_s), strict=True))
    return parts, f"{candidate.step_s:.3g} s, MFU {candidate.mfu:.0%}"


def _draw(draw: ImageDraw.ImageDraw, font: Any, panel: Panel, left: int) -> None:
    draw.text((left, ROW + 8), panel.title, INK, font)
    at = left
    for name, colour in panel.colours.items():
        draw.rectangle((at, 2 * ROW + 8, at + 11, 2 * ROW + 19), colour)
        draw.text((at + 16, 2 * ROW + 5), name, INK, font)
        at += 26 + round(draw.textlength(name, font))
    longest = max([panel.limit or 0.0, *(sum(parts.values()) for parts, _ in panel.rows)])
    if panel.limit:
        longest = min(longest, 2 * panel.limit)  # what is far too large would leave no room for the rest
    scale = (BARS - 10) / longest if longest else 0.0
    for place, (parts, words) in enumerate(panel.rows):
        top, start = ROW * (place + 3), float(left)
        for name, length in parts.items():
            end = min(start + scale * length, left + BARS - 10)
            draw.rectangle((start, top + 4, end, top + ROW - 6), panel.colours[name])
            start = end
        draw.text((start + 6, top + 5), words, INK, font)
    if panel.limit:
        x = left + scale * panel.limit
        draw.line((x, 3 * ROW, x, ROW * (len(panel.rows) + 3)), LIMIT, 2)

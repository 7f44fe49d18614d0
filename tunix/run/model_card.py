"""The page of a model on the Hugging Face hub: README.md and an image of the losses, made of the run's own files."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

CARD, CURVE = "README.md", "loss.png"
WIDTH, HEIGHT, MARGIN = 800, 400, 50  # of the image, in pixels
COLORS = {"training": (90, 120, 200), "held out": (200, 90, 60)}
SHOWN = (  # keys of a run that say what it learnt from, and how
    "task.name", "data.source", "data.path", "data.paths", "data.name", "data.split", "training.seq_len",
    "optimizer.name", "optimizer.learning_rate", "scheduler.name", "model.lora.rank", "model.lora.targets", "seed",
)  # fmt: skip
LIBRARIES = {"adapter_config.json": "peft", "modules.json": "sentence-transformers"}  # by a file that it reads
Line = dict[str, Any]
Curve = list[tuple[int, float]]


def write_card(
    folder: Path,
    name: str,
    kind: str,
    base: str | None,
    keys: dict[str, Any],
    steps: Sequence[Line],
    evaluations: Sequence[Line],
    results: dict[str, Any] | None,
) -> None:
    """Write the page into the folder of an export.

    `keys` are those of the run by dotted name, `steps` and `evaluations` its lines of metrics.jsonl up to the model,
    `results` what tunix.evaluate has written; all are empty where the model is of no run. It began with `base`, a
    folder or an ID. `kind` is what it does, as the hub calls it.
    """
    library = next((library for file, library in LIBRARIES.items() if (folder / file).is_file()), "transformers")
    front: dict[str, Any] = {"library_name": library, "pipeline_tag": kind, "tags": ["tunix"]}
    front |= read_license(base)
    if base is not None and is_id(base):
        front["base_model"] = base
    if isinstance(path := keys.get("data.path"), str) and is_id(path):
        front["datasets"] = [path]
    text = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", "", f"# {name}", ""]
    text += [f"Trained by tunix{f' from {Path(base).name if not is_id(base) else base}' if base else ''}.", ""]
    if steps:
        curves = {"training": _read_curve(steps), "held out": _read_curve(evaluations)}
        draw_curves(folder / CURVE, {label: curve for label, curve in curves.items() if len(curve) > 1})
        text += _describe_run(keys, steps, evaluations)
    if results:
        text += ["## Evaluation", "", "| number | value |", "|---|---|"]
        text += [_write_row(key, value) for key, value in results.items() if isinstance(value, int | float | str)]
        text.append("")
    (folder / CARD).write_text("\n".join(text))


def _write_row(name: str, value: Any) -> str:
    """Return a row of a table, whose reader would take a | of a value for the end of its cell."""
    shown = str(value).replace("|", r"\|")
    return f"| {name} | {shown} |"


def is_id(source: str) -> bool:
    """Return whether a text is the ID of a model or of data on the hub, and no folder here."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source) is not None and not Path(source).exists()


def read_license(base: str | None) -> dict[str, str]:
    """Return the licence that the page of the base names; none where it is not here."""
    card, text = Path(base or "", CARD), ""
    if base and card.is_file():
        with card.open(errors="replace") as file:
            text = file.read(1 << 16)  # the licence stands in its head, and anybody may have made the file
    found = re.search(r"^license:\s*(\S+)\s*$", text, re.M)
    return {"license": found[1].strip("'\"")} if found else {}


def _describe_run(keys: dict[str, Any], steps: Sequence[Line], evaluations: Sequence[Line]) -> list[str]:
    text = ["## Training", "", "| key | value |", "|---|---|"]
    shown = [key for key in SHOWN if keys.get("model.lora.rank") or not key.startswith("model.lora.")]
    text += [_write_row(f"`{key}`", keys[key]) for key in shown if keys.get(key) is not None]
    last = steps[-1]
    text += [f"| steps | {last['step']} |", f"| tokens | {last['tokens']:,} |"]
    if last.get("loss") is not None:  # null of a step that learnt nothing
        text.append(f"| training loss of the last step | {last['loss']:.4f} |")
    if evaluations and evaluations[-1].get("loss") is not None:
        text.append(f"| held-out loss at step {evaluations[-1]['step']} | {evaluations[-1]['loss']:.4f} |")
    return [*text, "", f"![Loss by step: {' and '.join(COLORS)}]({CURVE})", ""]


def _read_curve(lines: Sequence[Line]) -> Curve:
    losses = ((line["step"], line.get("loss")) for line in lines)
    return [(step, loss) for step, loss in losses if loss is not None and math.isfinite(loss)]


def draw_curves(path: Path, curves: dict[str, Curve]) -> None:
    """Draw losses by step as a PNG; the labels are keys of `COLORS`."""
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    points = [point for curve in curves.values() for point in curve] or [(0, 0.0)]
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)

    def to_pixels(step: int, loss: float) -> tuple[float, float]:
        x = MARGIN + (step - first) / max(1, last - first) * (WIDTH - 2 * MARGIN)
        return x, HEIGHT - MARGIN - (loss - low) / max(1e-9, high - low) * (HEIGHT - 2 * MARGIN)

    draw.line([to_pixels(first, high), to_pixels(first, low), to_pixels(last, low)], fill="black")
    for loss in (low, high):
        draw.text((4, to_pixels(first, loss)[1] - 6), f"{loss:.3f}", fill="black")
    for step in (first, last):
        draw.text((to_pixels(step, low)[0] - 10, HEIGHT - MARGIN + 6), str(step), fill="black")
    for row, (label, curve) in enumerate(curves.items()):
        draw.line([to_pixels(*point) for point in curve], fill=COLORS[label], width=2)
        draw.text((WIDTH - 2 * MARGIN, 10 + 14 * row), label, fill=COLORS[label])
    image.save(path)

"""The communication of a step as a picture."""

from tunix.figure import INK, Bar, Panel, draw
from tunix.profiling.communication import Communication

COLOURS = {"arithmetic": "#b9c4cc", "communication, hidden": "#8fb8de", "communication, exposed": "#d1495b"}
ARITHMETIC, HIDDEN, EXPOSED = COLOURS


def picture(found: Communication) -> bytes:
    """A PNG: the step, then each kind of collective on its axes; a line where it is predicted to end."""
    step_s, exposed_s = found.mean("span_s"), found.mean("exposed_s")
    labels = ["step"]
    bars = [Bar({ARITHMETIC: step_s - exposed_s, EXPOSED: exposed_s}, f"{1e3 * step_s:,.2f} ms")]
    for row in found.per_axis:
        predicted = found.predicted.get((row.kind, row.axes))
        words = f"{1e3 * row.time_s:,.2f} ms, {row.count:,} x, {row.bus_gb_per_s:,.3g} GB/s on the bus"
        parts = {HIDDEN: row.time_s - row.exposed_s, EXPOSED: row.exposed_s}
        labels.append(f"{row.kind} {'+'.join(row.axes)}")
        bars.append(Bar(parts, words, predicted.time_s if predicted else None))
    notes = {"predicted": INK} if any(bar.mark is not None for bar in bars) else {}
    title = f"communication of {found.steps}, {len(found.timelines)} devices"
    return draw(title, [(label, INK) for label in labels], [Panel("time of a step", COLOURS, bars, notes=notes)])

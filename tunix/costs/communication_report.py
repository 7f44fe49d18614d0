"""The communication of a step as people read it: text, CSV, a picture."""

import csv
import io

from rich.table import Table

from tunix.base.tables import as_text
from tunix.costs.communication import Communication, Row
from tunix.costs.figure import INK, Bar, Panel, draw

MIB = 2**20
TIMED = ("ms/step", "exposed ms", "algbw GB/s", "busbw GB/s")
COLUMNS = (
    "collective", "kind", "axes", "group_size", "dtype", "count_per_step", "bytes_per_step", "time_s", "exposed_s",
    "algorithm_gb_per_s", "bus_gb_per_s", "scope",
)  # fmt: skip


def text(found: Communication) -> str:
    """All of it, as two tables and what they add up to."""
    step_s, all_s, exposed_s = (found.mean(name) for name in ("span_s", "communication_s", "exposed_s"))
    devices = sorted(found.timelines, key=lambda device: found.timelines[device].communication_s)
    least, most = (found.timelines[device].communication_s / found.num_steps for device in (devices[0], devices[-1]))
    lines = [
        f"{found.steps}, {len(devices)} devices traced; times are means over devices and steps",
        f"step {_ms(step_s)} ms = nothing but communication {_ms(exposed_s)} ms + the rest {_ms(step_s - exposed_s)} "
        f"ms, which hides {_ms(all_s - exposed_s)} ms of communication",
        f"in collectives, waiting included: {devices[0]} least, {_ms(least)} ms; {devices[-1]} most, {_ms(most)} ms. "
        "Who spends least is waited for by the others",
    ]
    if found.lost:
        lines.append(f"INCOMPLETE: the trace lacks {found.lost:,} executions of collectives; trace fewer steps")
    if found.unnamed_s:
        lines.append(f"besides, {_ms(found.unnamed_s)} ms of NCCL kernels that the trace ascribes to no instruction")
    return "\n".join([*lines, "", as_text(_axes_table(found), 200), "", as_text(_collectives_table(found), 200), ""])


def _axes_table(found: Communication) -> Table:
    table = Table(title="by mesh axis, beside what is derived from the config", title_justify="left")
    for name in ("axes", "kind", "count", "MiB/step", *TIMED, "derived MiB", "predicted ms"):
        table.add_column(name, justify="left" if name in ("axes", "kind") else "right", no_wrap=True)
    left = dict(found.predicted)
    for row in found.per_axis:
        derived = left.pop((row.kind, row.axes), None)
        table.add_row(
            "+".join(row.axes), row.kind, f"{row.count:,}", f"{row.num_bytes / MIB:,.2f}", *_timed(row),
            f"{derived.num_bytes / MIB:,.2f}" if derived else "-",
            _ms(derived.time_s) if derived and derived.time_s is not None else "-",
        )  # fmt: skip
    for (kind, axes), derived in left.items():  # XLA has chosen another collective
        predicted = _ms(derived.time_s) if derived.time_s is not None else "-"
        table.add_row("+".join(axes), kind, "0", *["-"] * 5, f"{derived.num_bytes / MIB:,.2f}", predicted)
    return table


def _collectives_table(found: Communication) -> Table:
    table = Table(title="by collective of the compiled step", title_justify="left")
    for name in ("kind", "axes", "dtype", "count", "KiB each", *TIMED, "where", "instruction"):
        left = ("kind", "axes", "dtype", "where", "instruction")
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in found.rows:
        each = row.num_bytes / row.count / 1024 if row.count else 0.0
        table.add_row(
            row.kind, "+".join(row.axes), row.dtype, f"{row.count:,}", f"{each:,.1f}", *_timed(row), row.scope, row.name
        )  # fmt: skip
    return table


def _timed(row: Row) -> list[str]:
    return [_ms(row.time_s), _ms(row.exposed_s), f"{row.algorithm_gb_per_s:.3g}", f"{row.bus_gb_per_s:.3g}"]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f}"


def to_csv(found: Communication) -> str:
    """A line for each collective of a step."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in found.rows:
        numbers = (row.time_s, row.exposed_s, row.algorithm_gb_per_s, row.bus_gb_per_s)
        writer.writerow(
            [row.name, row.kind, "+".join(row.axes), row.group_size, row.dtype, row.count, row.num_bytes]
            + [f"{number:.6g}" for number in numbers]
            + [row.scope]
        )
    return file.getvalue()


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

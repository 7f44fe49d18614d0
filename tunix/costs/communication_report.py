"""The communication of a step as text, as CSV and as a picture: what `profile/` of a run shows."""

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


def format_text(communication: Communication) -> str:
    """Format the sums, then a table by mesh axis and a table by collective."""
    step_s, all_s, exposed_s = (communication.average(name) for name in ("span_s", "communication_s", "exposed_s"))
    timelines = communication.timelines
    devices = sorted(timelines, key=lambda device: timelines[device].communication_s)
    least, most = (
        _format_ms(timelines[device].communication_s / communication.num_steps) for device in (devices[0], devices[-1])
    )
    lines = [
        f"{communication.steps}, {len(devices)} devices traced; times are means over devices and steps",
        f"step {_format_ms(step_s)} ms = nothing but communication {_format_ms(exposed_s)} ms "
        f"+ the rest {_format_ms(step_s - exposed_s)} ms, "
        f"which hides {_format_ms(all_s - exposed_s)} ms of communication",
        f"in collectives, waiting included: {devices[0]} least, {least} ms; {devices[-1]} most, {most} ms. "
        "The others wait for the device that spends least",
    ]
    if communication.num_lost:
        lines.append(
            f"INCOMPLETE: the trace lacks {communication.num_lost:,} executions of collectives; trace fewer steps"
        )
    if communication.unnamed_s:
        unnamed_ms = _format_ms(communication.unnamed_s)
        lines.append(f"besides, {unnamed_ms} ms of NCCL kernels for which the trace names no instruction")
    return "\n".join(
        [
            *lines,
            "",
            as_text(_make_axes_table(communication), 200),
            "",
            as_text(_make_collectives_table(communication), 200),
            "",
        ]
    )


def _make_axes_table(communication: Communication) -> Table:
    table = Table(title="by mesh axis, beside what is derived from the config", title_justify="left")
    for name in ("axes", "kind", "count", "MiB/step", *TIMED, "derived MiB", "predicted ms"):
        table.add_column(name, justify="left" if name in ("axes", "kind") else "right", no_wrap=True)
    left = dict(communication.predicted)
    for row in communication.per_axis:
        derived = left.pop((row.kind, row.axes), None)
        table.add_row(
            "+".join(row.axes), row.kind, f"{row.count:,}", f"{row.num_bytes / MIB:,.2f}", *_format_times(row),
            f"{derived.num_bytes / MIB:,.2f}" if derived else "-",
            _format_ms(derived.time_s) if derived and derived.time_s is not None else "-",
        )  # fmt: skip
    # Predictions without a measured row: XLA chose another collective for them.
    for (kind, axes), derived in left.items():
        predicted = _format_ms(derived.time_s) if derived.time_s is not None else "-"
        table.add_row("+".join(axes), kind, "0", *["-"] * 5, f"{derived.num_bytes / MIB:,.2f}", predicted)
    return table


def _make_collectives_table(communication: Communication) -> Table:
    table = Table(title="by collective of the compiled step", title_justify="left")
    for name in ("kind", "axes", "dtype", "count", "KiB each", *TIMED, "where", "instruction"):
        left = ("kind", "axes", "dtype", "where", "instruction")
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in communication.rows:
        kib_each = row.num_bytes / row.count / 1024 if row.count else 0.0
        table.add_row(
            row.kind,
            "+".join(row.axes),
            row.dtype,
            f"{row.count:,}",
            f"{kib_each:,.1f}",
            *_format_times(row),
            row.scope,
            row.name,
        )
    return table


def _format_times(row: Row) -> list[str]:
    return [
        _format_ms(row.time_s),
        _format_ms(row.exposed_s),
        f"{row.algorithm_gb_per_s:.3g}",
        f"{row.bus_gb_per_s:.3g}",
    ]


def _format_ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f}"


def format_csv(communication: Communication) -> str:
    """Return CSV with one line for each collective of a step."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in communication.rows:
        numbers = (row.time_s, row.exposed_s, row.algorithm_gb_per_s, row.bus_gb_per_s)
        writer.writerow(
            [row.name, row.kind, "+".join(row.axes), row.group_size, row.dtype, row.count, row.num_bytes]
            + [f"{number:.6g}" for number in numbers]
            + [row.scope]
        )
    return file.getvalue()


COLOURS = {"arithmetic": "#b9c4cc", "communication, hidden": "#8fb8de", "communication, exposed": "#d1495b"}
ARITHMETIC, HIDDEN, EXPOSED = COLOURS


def draw_communication(communication: Communication) -> bytes:
    """Return a PNG: a bar for the step, then one for each kind of collective on its axes.

    A vertical line across a bar marks the predicted time.
    """
    step_s, exposed_s = communication.average("span_s"), communication.average("exposed_s")
    labels = ["step"]
    bars = [Bar({ARITHMETIC: step_s - exposed_s, EXPOSED: exposed_s}, f"{1e3 * step_s:,.2f} ms")]
    for row in communication.per_axis:
        predicted = communication.predicted.get((row.kind, row.axes))
        words = f"{1e3 * row.time_s:,.2f} ms, {row.count:,} x, {row.bus_gb_per_s:,.3g} GB/s on the bus"
        parts = {HIDDEN: row.time_s - row.exposed_s, EXPOSED: row.exposed_s}
        labels.append(f"{row.kind} {'+'.join(row.axes)}")
        bars.append(Bar(parts, words, predicted.time_s if predicted else None))
    notes = {"predicted": INK} if any(bar.mark is not None for bar in bars) else {}
    title = f"communication of {communication.steps}, {len(communication.timelines)} devices"
    return draw(title, [(label, INK) for label in labels], [Panel("time of a step", COLOURS, bars, notes=notes)])

"""Write the tables of docs/coming_from.md and the lines `elsewhere` of docs/parallelism.md: `make docs`.

They are made from conf/foreign_names.yaml.
"""

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from tunix.config.foreign_names import LEFT_OUT, ForeignName, read_rows

DOCS = Path(__file__).parents[1] / "docs"
HEAD = """## Keys of other trainers

Every name of the left column is answered on the command line, as `NAME=VALUE` and as `--NAME VALUE`, with your own
value where it means the same here. One key, `model.mesh_shape`, holds all axes of the mesh. `make docs` makes the
tables from `conf/foreign_names.yaml`.
"""
SHORT = {"Megatron and DeepSpeed": "Megatron or DeepSpeed"}


def coming_from(text: str) -> str:
    """Return docs/coming_from.md with the tables of today."""
    parts = [text[: text.index("## Keys of other trainers")] + HEAD]
    for project, rows in groupby(read_rows(), lambda row: row.project):
        lines = [f"### {project}\n", "| there | here |", "|---|---|", *(line for row in rows for line in _lines(row))]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _lines(row: ForeignName) -> Iterator[str]:
    """Yield the lines of a row: one, or one for each value."""
    first, *others = row.there
    for value in row.shown or [row.value]:
        shown = f"`{first}`" if value in (None, "x") else f"`{first}={value}`"
        here = row.translate(value or "") or row.here
        right = [*([f"`{here}`"] if here else []), *filter(None, (row.unit, row.remark))]
        if row.is_default(value or ""):
            right = [LEFT_OUT]
        yield f"| {', '.join([shown, *(f'`{name}`' for name in others)])} | {', '.join(right)} |"


def parallelism(text: str) -> str:
    """Return docs/parallelism.md with the names of today of each mesh axis."""
    for axis in dict.fromkeys(row.axis for row in read_rows() if row.axis):
        names = [f"{SHORT.get(row.project, row.project)} `{row.there[0]}`" for row in read_rows() if row.axis == axis]
        line = f"- elsewhere: {', '.join(names)}\n"
        pattern = rf"(^## {axis}:(?:(?!^## )[\s\S])*?)^- elsewhere: .*\n(?:  .*\n)*"
        text, count = re.subn(pattern, lambda match, line=line: match[1] + line, text, flags=re.MULTILINE)
        assert count == 1, f"docs/parallelism.md: ## {axis} has no line `- elsewhere: `"
    return text


if __name__ == "__main__":
    for file, make in (("coming_from.md", coming_from), ("parallelism.md", parallelism)):
        (DOCS / file).write_text(make((DOCS / file).read_text()))

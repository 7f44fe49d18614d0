"""Write docs/scaling.md's table and its figure: bytes that a device sends in a step as each mesh axis grows.

`python -m tools.scaling` derives them from the config (tunix/costs), and writes what theory says beside them. Each case
lets one axis grow to 64 devices, and leaves all others at 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from tunix.config import Config
from tunix.config.compose import compose
from tunix.config.layers import ExpertsMlp
from tunix.costs.devices import BUS_FACTORS
from tunix.costs.step import derive, find_train_spec
from tunix.models.context_parallel import count_repeats
from tunix.sharding.mesh import count_devices
from tunix.sharding.table import EXPERTS, axis_names

PAGE, FIGURE = Path("docs/scaling.md"), Path("docs/images/scaling.svg")
BEGIN, END = "<!-- table: made by python -m tools.scaling -->", "<!-- end of table -->"
DEVICES = (2, 4, 8, 16, 32, 64)
DENSE = ["model=llama3_70b", "model.num_layers=64", "plan.output=null"]  # 64 heads, layers and MLP columns divide by 64
EXPERT = ["model=qwen3_30b_a3b", "plan.output=null"]
SIXTEEN_BITS, THIRTY_TWO_BITS = 2, 4  # bytes of a number


@dataclass(frozen=True)
class Case:
    """One axis that grows, and what theory says about it."""

    name: str  # of a column of the table
    axis: str
    words: Callable[[int], list[str]]  # of the config, for a number of devices
    theory: Callable[["Sizes", int], float]  # bytes that one device sends in a step


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model and a batch, from which theory follows."""

    cfg: Config
    blocks: int  # numbers in the matrices of all blocks, without those of experts
    tables: int  # numbers in embedding and head

    @property
    def matrices(self) -> int:
        return self.blocks + self.tables

    @property
    def stream(self) -> int:
        """Bytes of one sequence of the residual stream, [T, D]."""
        return self.cfg.training.seq_len * self.cfg.model.embed_dim * SIXTEEN_BITS


def measure(case: Case, num_devices: int) -> tuple[float, float]:
    """Return the bytes that one device sends in a step with ring algorithms: derived from the config, and by theory."""
    mesh = f"model.mesh_shape=[[{num_devices}],[{case.axis}]]"
    cfg = compose([*case.words(num_devices), mesh, "training.remat=full"]).config
    axes = dict.fromkeys(axis_names(), 1) | {case.axis: num_devices}
    program = find_train_spec(cfg, axes)
    blocks = tables = 0
    for weight in jax.tree.leaves(program.arch.weights):
        if not weight.equation.is_vector and EXPERTS not in weight.equation.w:
            blocks += weight.size if weight.equation.is_stacked else 0
            tables += 0 if weight.equation.is_stacked else weight.size
    derived = 0.0
    for transfer in derive(cfg, axes, with_activations=False).transfers:
        size = count_devices(axes, transfer.axes)
        derived += transfer.num_bytes * BUS_FACTORS[transfer.kind](size) if size > 1 else 0.0
    return derived, case.theory(Sizes(cfg, blocks, tables), num_devices)


def of_dp(sizes: Sizes, num_devices: int) -> float:
    """An all-reduce of the gradients."""
    return 2 * _share(num_devices) * THIRTY_TWO_BITS * sizes.matrices


def of_fsdp(sizes: Sizes, num_devices: int) -> float:
    """Blocks gathered forward and backward, tables gathered once, gradients scattered."""
    gathered = 2 * sizes.blocks + sizes.tables
    return _share(num_devices) * (SIXTEEN_BITS * gathered + THIRTY_TWO_BITS * sizes.matrices)


def of_tp(sizes: Sizes, num_devices: int) -> float:
    """Tokens gathered or scattered eleven times in a layer: six times around attention, five times around the MLP.

    Forward each branch gathers and scatters. Backward it does both for the gradients, and gathers once more what it
    took, for the gradient of its weights. remat=full computes the sums of attention again. Both ends add six: a lookup
    and a gradient of logits are all-reduces, and the stream begins and ends. Where the devices do not divide the
    heads of keys and values, all of them keep these, and the gradients are two all-reduces in a layer.
    """
    model, tokens = sizes.cfg.model, sizes.cfg.training.seq_len
    kept = model.num_kv_heads * model.head_dim * tokens * SIXTEEN_BITS if model.num_kv_heads % num_devices else 0
    return _share(num_devices) * ((11 * model.num_layers + 6) * sizes.stream + 4 * model.num_layers * kept)


def of_cp(sizes: Sizes, num_devices: int) -> float:
    """What fsdp sends; in each layer queries, results, keys and values of own tokens, three times; segment ids."""
    model, tokens = sizes.cfg.model, sizes.cfg.training.seq_len
    heads = 2 * model.num_heads + 2 * model.num_kv_heads * count_repeats(model.num_kv_heads, num_devices)
    exchanged = 3 * model.num_layers * heads * model.head_dim * tokens / num_devices * SIXTEEN_BITS
    return of_fsdp(sizes, num_devices) + _share(num_devices) * (exchanged + 4 * tokens)


def of_ep(sizes: Sizes, num_devices: int) -> float:
    """What fsdp sends of dense weights; in each layer tokens for all other devices, gathered or scattered five times.

    With each token travel the numbers and the weights of its experts, twice forward, and a gradient backward.
    """
    model = sizes.cfg.model
    of_layer = 5 * sizes.stream + 5 * _choices(sizes) * 4
    return of_fsdp(sizes, num_devices) + (num_devices - 1) * model.num_layers * of_layer


def of_ep_by_rows(sizes: Sizes, num_devices: int) -> float:
    """What fsdp sends of dense weights; in each layer rows for a token's experts, there or back five times.

    With each row travels its weight, twice forward, and a gradient backward. Before that, every device learns how many
    rows each expert gets of each device.
    """
    model = sizes.cfg.model
    assert isinstance(model.mlp, ExpertsMlp)
    rows = 5 * model.mlp.experts_per_token * sizes.stream + 3 * _choices(sizes) * 4
    counts = 2 * num_devices * model.mlp.num_experts * 4
    return of_fsdp(sizes, num_devices) + _share(num_devices) * model.num_layers * (rows + counts)


def _choices(sizes: Sizes) -> int:
    """Return the number of experts that the tokens of one sequence take in a layer."""
    mlp = sizes.cfg.model.mlp
    assert isinstance(mlp, ExpertsMlp)
    return sizes.cfg.training.seq_len * mlp.experts_per_token


def of_pp(sizes: Sizes, num_devices: int) -> float:
    """A part and its gradient in each tick; what comes in and goes out, over all stages; gradients of the tables."""
    parts, tokens = 64, sizes.cfg.training.seq_len
    iterations, beside = parts + num_devices - 1, 2 * 4 * tokens  # positions and segments travel with a part
    permuted = iterations * (2 * sizes.stream + beside)
    ends = _share(num_devices) * (2 * (iterations + parts) * sizes.stream + iterations * beside)
    fields = len(("tokens", "targets", "positions", "segment_ids", "loss_mask"))
    dealt_out = _share(num_devices) * fields * parts / num_devices * tokens * 4
    return permuted + ends + dealt_out + 2 * _share(num_devices) * THIRTY_TWO_BITS * sizes.tables


def _share(num_devices: int) -> float:
    """Return the share of an array that a device sends in an all-gather or a reduce-scatter by a ring."""
    return (num_devices - 1) / num_devices


def _same(*words: str) -> Callable[[int], list[str]]:
    return lambda _: list(words)


CASES = {
    case.name: case
    for case in (
        Case("dp", "dp", _same(*DENSE, "training.seq_len=4096"), of_dp),
        Case("fsdp", "fsdp", _same(*DENSE, "training.seq_len=4096"), of_fsdp),
        Case("tp", "tp", _same(*DENSE, "training.seq_len=4096"), of_tp),
        Case("cp", "cp", _same(*DENSE, "training.seq_len=65536"), of_cp),
        Case("ep", "ep", _same(*EXPERT, "training.seq_len=4096", "model.expert_exchange=gather"), of_ep),
        Case("ep, rows", "ep", _same(*EXPERT, "training.seq_len=4096", "model.expert_exchange=rows"), of_ep_by_rows),
        Case(
            "pp",
            "pp",
            lambda n: [*DENSE, "training.seq_len=4096", f"training.micro_batch_size={64 // n}"],
            of_pp,
        ),
    )
}  # fmt: skip


Found = dict[str, dict[int, tuple[float, float]]]  # by case and number of devices, what `measure` returns


def table(found: Found) -> str:
    """Return the table as Markdown: a row for each number of devices, derived GB and theory's for each case."""
    rows = [["devices n", *(f"`{name}`" for name in CASES)], ["---", *["---:"] * len(CASES)]]
    for number in DEVICES:
        of_axes = (found[name][number] for name in CASES)
        rows.append([str(number), *(f"{derived / 1e9:,.2f} ({theory / 1e9:,.2f})" for derived, theory in of_axes)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


WIDTH, HEIGHT, LEFT, TOP = 640, 360, 70, 20
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#17becf", "#8c564b")


def figure(found: Found) -> str:
    """Return a figure as SVG: bytes over devices, both on logarithmic axes; lines are derived, circles theory."""
    sizes = [derived for of_axis in found.values() for derived, _ in of_axis.values()]
    low, high = math.floor(math.log10(min(sizes))), math.ceil(math.log10(max(sizes)))
    bottom, right = HEIGHT - 40, WIDTH - 90

    def index(number: int, size: float) -> tuple[float, float]:
        x = LEFT + (math.log2(number) - 1) / (math.log2(DEVICES[-1]) - 1) * (right - LEFT)
        return round(x, 1), round(bottom - (math.log10(size) - low) / (high - low) * (bottom - TOP), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="14">GB that a device sends in a step (lines: derived, circles: theory)</text>',
    ]
    for power in range(low, high + 1):
        _, y = index(2, 10.0**power)
        parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{right}" y2="{y}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{10.0**power / 1e9:g}</text>')
    for number in DEVICES:
        x, _ = index(number, 10.0**low)
        parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{number}</text>')
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle">devices on the axis</text>')
    for name, colour in zip(CASES, COLOURS, strict=True):
        places = [index(number, found[name][number][0]) for number in DEVICES]
        line = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for number in DEVICES:
            x, y = index(number, found[name][number][1])
            parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="none" stroke="{colour}"/>')
        x, y = places[-1]
        parts.append(f'<text x="{x + 10}" y="{y + 4}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Write the table and the figure."""
    found = {name: {number: measure(case, number) for number in DEVICES} for name, case in CASES.items()}
    before, remaining = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{remaining.split(END)[1]}")
    FIGURE.write_text(figure(found))


if __name__ == "__main__":
    main()

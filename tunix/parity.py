"""Compare a family of models with transformers: `python -m tunix.parity FOLDER`. FOLDER has a config.json.

transformers makes a tiny random model of that config, in a Python of its own (--python, or TRANSFORMERS_PYTHON), and
says what it computes. tunix reads its files and must say the same, in float32: logits and gradients on one device and
on a mesh of four, rows of packed documents, greedy answers; and it must write the weights as it read them. Of what
differs, a line names the layer or the tensor. Exit code 1 if anything does. Nothing is downloaded, and code of FOLDER
is not run.
"""

import os
import shutil
import subprocess
import sys
from argparse import RawDescriptionHelpFormatter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.table import Table
from safetensors.numpy import load_file

from tunix.base.errors import FlagParser, UserError
from tunix.base.files import expand_home, find_writable, temporary_folder
from tunix.base.text import print_table
from tunix.config.layers import ExpertsMlp
from tunix.huggingface.table import find_family
from tunix.huggingface.weights import save_weights
from tunix.inference.pretrained import Pretrained, load_pretrained
from tunix.inference.sampling import Sampling
from tunix.processes import exits
from tunix.sharding.table import MESH
from tunix.training.loss import next_token_loss
from tunix.training.state import describe

VARIABLE = "TRANSFORMERS_PYTHON"
AXES = tuple(axis.name for axis in MESH if axis.suggested)
NUM_DEVICES = 2 ** len(AXES)
MESHES = {
    "one device": ((1,), AXES[-1:]),
    " ".join(f"{name}=2" for name in AXES): ((2,) * len(AXES), AXES),
}
EXPECTED = "expected.safetensors"
WEIGHTS = "model.safetensors"


class Check(NamedTuple):
    """A comparison: its name, the largest difference, and where it is; empty where nothing is beyond the tolerance."""

    name: str
    difference: float
    location: str


def compare(folder: Path, family: str | None, tolerance: float) -> list[Check]:
    """Return the comparisons of a folder that `make_tiny` has made."""
    expected = load_file(folder / EXPECTED)
    checks = []
    for label, mesh_shape in MESHES.items():
        model = load_pretrained(folder, "float32", mesh_shape=mesh_shape, family=family)
        difference = _distance(np.asarray(model(expected["tokens"])), expected["logits"])
        location = _find_layer(folder, family) if difference > tolerance else ""
        checks.append(Check(f"logits, {label}", difference, location))
        checks.append(_compare_gradients(model, folder, expected["tokens"], label, tolerance))
    checks.append(_compare_packed(model, expected, tolerance))
    prompts = [row.tolist() for row in expected["prompts"]]
    answers = model.sample(prompts, Sampling(max_new_tokens=expected["greedy"].shape[1], temperature=0.0))
    wrong = [n for n, answer in enumerate(answers) if answer.tokens != expected["greedy"][n].tolist()]
    checks.append(Check("greedy answers", float(len(wrong)), f"answer {wrong[0]}" if wrong else ""))
    return [*checks, _compare_files(model, folder)]


def _distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference; infinite where a number is not finite."""
    difference = float(np.abs(ours.astype(np.float64) - theirs).max(initial=0.0))
    return difference if np.isfinite(difference) else float("inf")


def _find_layer(folder: Path, family: str | None) -> str:
    """Return the first layer behind which the logits are others, by the models of fewer layers."""
    shorter = sorted((folder / "depth").iterdir(), key=lambda path: int(path.name))
    tokens = load_file(folder / EXPECTED)["tokens"]
    for path in shorter:
        try:
            logits = np.asarray(load_pretrained(path, "float32", family=family)(tokens))
        except UserError as error:
            return f"layer {int(path.name) - 1}: {error}"
        if _distance(logits, load_file(path / EXPECTED)["logits"]) > 1e-4:
            return f"from layer {int(path.name) - 1} on, or before the first layer"
    return f"in layer {len(shorter)}, the last one"


def _compare_gradients(model: Pretrained, folder: Path, tokens: np.ndarray, label: str, tolerance: float) -> Check:
    batch: dict[str, Any] = {
        "tokens": tokens, "targets": np.roll(tokens, -1, 1), "segment_ids": np.zeros_like(tokens),
        "positions": np.tile(np.arange(tokens.shape[1], dtype=np.int32), (len(tokens), 1)),
        "loss_mask": np.ones(tokens.shape, np.float32),
    }  # fmt: skip
    batch["loss_mask"][:, -1] = 0
    loss = partial(next_token_loss, chunk_size=tokens.shape[1], z_loss=0.0)
    cfg, mlp = model.cfg, model.cfg.mlp
    if isinstance(mlp, ExpertsMlp):  # routers' penalties are no part of transformers' cross entropy
        cfg = cfg.model_copy(update={"mlp": mlp.model_copy(update={"balance_loss": 0.0, "z_loss": 0.0})})
    arch = describe(cfg, model.layout)
    with jax.set_mesh(model.mesh), temporary_folder("tunix-parity-") as written:
        rows = {name: model.rows(leaf) for name, leaf in batch.items()}
        gradient = jax.jit(jax.grad(lambda params: loss(arch.module(params), rows).objective))(model.params)
        save_weights(Path(written), gradient, model.cfg, model.arch.weights, "float32", 5, folder)
        ours, theirs = load_file(Path(written) / WEIGHTS), load_file(folder / "gradients" / WEIGHTS)
    # A number that no gradient reaches (a router's bias, a constant of a layer) is not compared.
    # Gradients are sums over tokens, of any size: a difference is a share of the tensor's largest number above 1.
    distances = {
        name: _distance(ours[name], value) / max(1.0, float(np.abs(value).max()))
        for name, value in theirs.items()
        if name in ours and value.any()
    }
    wrong = {name: distance for name, distance in distances.items() if distance > tolerance}
    worst = sorted(wrong, key=lambda name: -wrong[name])
    return Check(f"gradients, {label}", max(distances.values(), default=float("inf")), ", ".join(worst[:3]))


def _compare_packed(model: Pretrained, expected: dict[str, np.ndarray], tolerance: float) -> Check:
    """Both rows as documents of one row: each must have the logits that it has alone, for as long as it is."""
    tokens, half = expected["tokens"], expected["tokens"].shape[1] // 2
    row = np.concatenate([tokens[0, :half], tokens[1, :half]])[None]
    positions = np.tile(np.arange(half, dtype=np.int32), 2)[None]
    segments = np.repeat(np.arange(2, dtype=np.int32), half)[None]
    forward = jax.jit(lambda params, *rows: model.arch.module(params)(*rows))
    with jax.set_mesh(model.mesh):
        logits = np.asarray(forward(model.params, *map(model.rows, (row, positions, segments))))[0]
    distances = [_distance(logits[n * half : (n + 1) * half], expected["logits"][n, :half]) for n in (0, 1)]
    location = f"document {int(np.argmax(distances))} of the row" if max(distances) > tolerance else ""
    return Check("packed rows", max(distances), location)


def _compare_files(model: Pretrained, folder: Path) -> Check:
    with jax.set_mesh(model.mesh), temporary_folder("tunix-parity-") as written:
        save_weights(Path(written), model.params, model.cfg, model.arch.weights, "float32", 5, folder)
        ours, theirs = load_file(Path(written) / WEIGHTS), load_file(folder / WEIGHTS)
    wrong = [name for name, value in theirs.items() if name not in ours or not np.array_equal(ours[name], value)]
    wrong += sorted(ours.keys() - theirs.keys())
    return Check("round trip of the weights", float(len(wrong)), ", ".join(wrong[:3]))


def make_tiny(source: Path, output: Path, python: str) -> None:
    """Let transformers make the tiny model of a folder's config.json.

    Raises:
        UserError: the folder has none, or this Python lacks transformers or does not know the model.
    """
    if not (source / "config.json").is_file():
        raise UserError(f"{source} has no config.json; name the folder of a model")
    script = Path(__file__).parent / "huggingface" / "tiny_by_transformers.py"
    try:
        done = subprocess.run([python, script, source, output], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"--python {python} cannot be started: {error.strerror or error}") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise UserError(f"--python {python} has not made a model of {source}: {reason}")


def main() -> int:
    """Run the command line and return its exit code."""
    parser = FlagParser("python -m tunix.parity", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="the folder of a model, of which config.json is read"
    )
    parser.add_argument("--family", help="your own family, package.module:name; else config.json says which it is")
    parser.add_argument(
        "--python", default=os.environ.get(VARIABLE), help=f"a Python with torch and transformers ({VARIABLE})"
    )
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest difference of logits and gradients")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the tiny model in this new folder")
    arguments = parser.parse_args()

    def work() -> int:
        if arguments.python is None:
            raise UserError(f"give a Python that has torch and transformers: --python PYTHON, or {VARIABLE}=PYTHON")
        if arguments.keep is not None and arguments.keep.exists():
            raise UserError(f"--keep {arguments.keep} exists already; name a new folder")
        if arguments.keep is not None:
            find_writable("--keep", str(arguments.keep))
        if not arguments.tolerance >= 0:
            raise UserError(f"--tolerance {arguments.tolerance} must be 0 or more")
        if arguments.family is not None:
            find_family(arguments.family)
        jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
        jax.config.update("jax_platforms", "cpu")
        with temporary_folder("tunix-parity-") as folder:
            tiny = Path(folder) / "tiny"
            make_tiny(expand_home(arguments.folder), tiny, arguments.python)
            if arguments.keep is not None:
                shutil.copytree(tiny, arguments.keep)
            return show(compare(tiny, arguments.family, arguments.tolerance))

    return exits.report_errors(work)


def show(checks: list[Check]) -> int:
    """Print the comparisons; return 1 if one of them differs."""
    table = Table(box=None)
    for title in ("compared with transformers", "largest difference", "where"):
        table.add_column(title)
    for check in checks:
        table.add_row(check.name, f"{check.difference:.2g}", check.location or "equal")
    print_table(table)
    return int(any(check.location for check in checks))


if __name__ == "__main__":
    sys.exit(main())

"""tunix: one command trains language models with JAX, on whatever devices there are.

`tunix.train(["model=tiny", "training.max_steps=20"])` runs without the command line.
`tunix.load_pretrained(DIR_OR_RUN)` returns a model, which maps tokens [B, T] int32 to logits [B, T, V] float32.
"""

import gc
import locale
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunix.processes import exits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tunix.config import Config
    from tunix.inference.pretrained import Pretrained
    from tunix.trainer import Result

# `python -m tunix.NAME` imports this package first.
_modules = (name for flag, name in pairwise(sys.orig_argv) if flag == "-m" and name.partition(".")[0] == "tunix")
_command = next(_modules, "") if sys.argv[:1] == ["-m"] else ""
if _command:  # Ctrl-C may come while it imports the rest
    exits.report_interrupts()
    exits.announce_imports()

# Imports stand inside the functions: jax takes seconds to import, and a typo in a config should not wait for it.


def _reject_other_encodings() -> None:
    """Raise `UserError` where Python takes texts for others than they are; a command begins anew (`exits`)."""
    from tunix.base.errors import UserError

    if not exits.reads_utf8():
        raise UserError(f"Python reads texts as {locale.getencoding()} here, and they are UTF-8; set PYTHONUTF8=1")


def train(config_or_overrides: "Config | Sequence[str]") -> "Result":
    """Train as a checked config says, or as the words of a command line say.

    Raises:
        UserError: the run cannot be done.
    """
    from tunix.base.errors import UserError
    from tunix.config import compose
    from tunix.trainer import run

    _reject_other_encodings()
    if isinstance(config_or_overrides, list | tuple) and all(isinstance(word, str) for word in config_or_overrides):
        job = compose.compose(list(config_or_overrides))
        compose.check_inputs(job)
        return run(job)
    if not isinstance(config_or_overrides, compose.Config):
        raise UserError(f"tunix.train takes a Config, or a list of words, not {config_or_overrides!r:.80}")
    return run(compose.Job(config_or_overrides, [], compose.dated_folder(config_or_overrides), False))


def load_pretrained(
    source: str | Path,
    dtype: str = "float32",
    mesh_shape: Any = None,
    weights: str = "trained",
    family: str | None = None,
    adapter: str | Path | None = None,
    mtp: bool = False,
) -> "Pretrained":
    """Load the model of a run's folder (or RUN_DIR/checkpoints/STEP), of a Hugging Face folder, or of an ID on the hub.

    Weights and products are of `dtype`; weights are split over the tp axis of `mesh_shape` and whole on its others.
    Without a mesh, the model is on one device. `weights` names a copy of the parameters that the run has kept, like
    `ema`, or those that it has trained. `family` is the dotted path of a family of your own (docs/extending.md), of a
    Hugging Face folder, and `adapter` a folder of low-rank updates for such a folder's weights, as PEFT writes it. With
    `mtp` the layer of multi-token prediction of such a folder is read too, to guess by it.

    Raises:
        UserError: a source that is neither, or that is not understood: the message names what.
    """
    _reject_other_encodings()
    collects = gc.isenabled()
    gc.disable()  # imports make objects that live on: looking for garbage among them took a sixth of their time
    try:
        from tunix.inference import pretrained
    finally:
        if collects:
            gc.enable()
    return pretrained.load_pretrained(source, dtype, mesh_shape, weights, family=family, adapter=adapter, mtp=mtp)


if _command.startswith("tunix."):
    from tunix.config import command_line

    command_line.check_first(_command.removeprefix("tunix."))

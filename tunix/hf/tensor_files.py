"""Tensors of a folder of safetensors files."""

from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from tunix.base.disk import read_json
from tunix.base.errors import UserError
from tunix.families import Family
from tunix.hf.config_json import fp8_block_sizes, read_num_rows
from tunix.hf.stored import MappedFile, Plain, Stored, enlarge, join_codes

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class TensorFiles:
    """Tensors of a model's folder, under the names of its family's table. A context: it closes the files at its end.

    Tables have `num_rows` rows, or as many as the files if it is None. Rows that the files lack are the mean of the
    others (`stored.Enlarged`).
    """

    def __init__(self, folder: Path, family: Family, num_rows: int | None = None):
        self.folder, self.family, self.num_rows, self._open = folder, family, num_rows, ExitStack()
        self._tensors: dict[str, Stored] = {}

    def __enter__(self) -> "TensorFiles":
        tensors: dict[str, Plain] = {}
        for path in self.paths:
            try:
                file = self._open.enter_context(safe_open(path, framework="np"))
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is truncated or not a safetensors file: {error}") from None
            open_file = cache(partial(MappedFile, path))  # mapped when its first tensor is read
            tensors |= {self._canonical(name): Plain(file, name, open_file) for name in file.keys()}  # noqa: SIM118
        self._tensors = join_codes(tensors, fp8_block_sizes(self.folder))
        if self.num_rows is not None and (in_files := read_num_rows(self.folder, self.family)) < self.num_rows:
            self._tensors = enlarge(self._tensors, self.family.tables, self.num_rows, in_files)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._tensors.clear()  # a file stays mapped until the last view of it is gone

    @property
    def paths(self) -> list[Path]:
        """The files that hold the tensors."""
        return weight_files(self.folder)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> str:
        """Return the dtype as safetensors names it."""
        return self._tensors[name].dtype

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Return a slice of a tensor as numbers; of a tensor of numbers it is a view of the mapped file."""
        return self._tensors[name].read(index)

    def fetch(self, name: str) -> None:
        """Let the system read a tensor from the disk in the background: it will be needed soon."""
        for tensor in self._tensors[name].tensors:
            tensor.fetch()

    def release(self, name: str) -> None:
        """Take the pages of a tensor out of the memory of this process; a later use maps them again."""
        for tensor in self._tensors[name].tensors:
            tensor.release()

    def _canonical(self, name: str) -> str:
        """Return the name in the family's table of a tensor in the files."""
        return self.family.usual_name(name)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model.

    Raises:
        UserError: there are none, or one that the index names is missing.
    """
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise UserError(f"{folder / INDEX} has no weight_map of tensors and files")
        names = sorted(set(weight_map.values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise UserError(f"{folder / INDEX} names {outside[0]}, which is no file of this folder")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UserError(f"{folder} lacks {', '.join(missing)}, named in {INDEX}")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:  # a pickle names functions that are called while it is loaded
        raise UserError(
            f"{folder} has its weights as pickles ({', '.join(pickles[:3])}), which can run code and are not read; "
            "save them as safetensors"
        )
    raise UserError(f"{folder} has no {SINGLE} and no {INDEX}")

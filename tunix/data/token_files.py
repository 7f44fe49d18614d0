"""Files of tokens that another program has made (data.source=tokens). They stay where they are.

A shard of such a file has no tokens of its own, but their place in the file. Only what is not in the file is computed:
where documents begin, how often each token occurs, and which tokens are held out.
"""

from pathlib import Path
from typing import Any

import numpy as np

from tunix.base.errors import UserError
from tunix.data.stream import digest_arrays, map_tokens, read_blocks
from tunix.sources import Tokens
from tunix.sources.files import Unit
from tunix.tokenizer.vocabulary import Vocabulary


def scan_tokens(source: Tokens, unit: Unit, folder: Path, vocabulary: Vocabulary) -> tuple[dict[str, Any], np.ndarray]:
    """Make the shard of a file of tokens: find its documents, count its tokens, hold out the documents at its end.

    Returns:
        The facts of the shard, and a count for each token of the vocabulary.

    Raises:
        UserError: a token that the tokenizer does not have; see also `locate_tokens`.
    """
    place = locate_tokens(source, Path(unit.path))
    tokens = map_tokens(**place)
    counts, ends = np.zeros(vocabulary.num_tokens, np.int64), []
    for first, block in read_blocks(tokens):  # the file may be larger than memory
        least, most = int(block.min()), int(block.max())
        if least < 0 or most >= len(counts):
            raise UserError(
                f"data: {unit.path} has token {least if least < 0 else most}, the tokenizer has {len(counts)}; "
                "give the tokenizer that made it, or the right data.dtype and data.skip_bytes"
            )
        counts += np.bincount(block, minlength=len(counts))
        if source.document_end is not None:
            ends.append(np.flatnonzero(block == source.document_end) + first)
    starts = np.concatenate([np.zeros(1, np.int64), *(end + 1 for end in ends)])
    starts = starts[starts < len(tokens)]  # behind the last end there may be nothing
    # Tokens from `cut` on are held out. Where documents are known, the cut moves to the next start of a document.
    cut = len(tokens) - round(source.held_out_fraction * len(tokens))
    if source.document_end is None:
        starts = np.array([start for start in (0, cut) if start < len(tokens)], np.int64)
    elif len(starts) <= 1:  # a single document is not cut in two
        cut = len(tokens)
    elif source.held_out_fraction > 0:
        cut = int(starts[min(int(np.searchsorted(starts, cut)), len(starts) - 1)])
    facts: dict[str, Any] = {"left_out": {}, "left_out_names": [], "smallest_hash": 0}
    for split, first, stop in (("train", 0, cut), ("held_out", cut, len(tokens))):
        own = starts[(starts >= first) & (starts < stop)] - first
        np.save(folder / f"{split}.starts.npy", own)
        own_place = place | {"offset": place["offset"] + first * tokens.itemsize, "count": stop - first}
        digest = digest_arrays({"tokens": map_tokens(**own_place), "starts": own})
        facts[split] = {"tokens": stop - first, "documents": len(own), "digest": digest, "flat": own_place}
    facts["train"]["bytes"] = None  # `tokenize` computes them from the counts of tokens
    return facts, counts


def locate_tokens(source: Tokens, path: Path) -> dict[str, Any]:
    """Return where the numbers of a file of tokens are, as arguments of `map_tokens`. A .npy file says so itself.

    Raises:
        UserError: the file is damaged, or is no array of tokens.
    """
    with path.open("rb") as file:
        if file.read(6) == b"\x93NUMPY":
            try:
                array = np.load(path, mmap_mode="r")
            except ValueError as error:
                raise UserError(f"data: {path} is damaged or ends early: {error}") from None
            if array.ndim != 1 or array.dtype not in (np.uint16, np.uint32, np.int32):
                raise UserError(
                    f"data: {path} is an array of shape {list(array.shape)} and dtype {array.dtype}; tokens are one "
                    "row of uint16, uint32 or int32"
                )
            return {"path": str(path), "dtype": str(array.dtype), "offset": array.offset, "count": len(array)}
    size = path.stat().st_size - source.skip_bytes
    width = np.dtype(source.dtype).itemsize
    if size < 0 or size % width:
        raise UserError(
            f"data: {path} has {path.stat().st_size} bytes, which is not data.skip_bytes={source.skip_bytes} and a "
            f"number of whole data.dtype={source.dtype}; the file ends early or is of another type"
        )
    return {"path": str(path.absolute()), "dtype": source.dtype, "offset": source.skip_bytes, "count": size // width}

"""Slots for the images of a sequence: which images its chunks have, where documents may be cut; images of prompts."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import grain
import numpy as np
from tokenizers import Tokenizer

from tunix.base.errors import UserError
from tunix.config import Config, Model
from tunix.data.batches import IMAGE_GRIDS, IMAGE_INDEX, IMAGES, Example
from tunix.data.files import BadRow
from tunix.data.image_processors import Grid, ImageProcessor, Pixels, find_processor
from tunix.data.images import ImageReader, find_root, take_images
from tunix.data.shards import Arrays, Stream
from tunix.models.vision import Images

NUM_TIMED = 8  # images that are decoded to know how long it takes


def list_image_spans(stream: Stream, number: int) -> np.ndarray:
    """Return where the images of a shard are, [images, 2]: the first soft token, and the place behind the last."""
    shard = stream.shard(number)
    if shard.image_places is None or shard.image_spans is None:
        return np.zeros((0, 2), np.int64)
    return np.stack([shard.image_places, shard.image_places + shard.image_spans], axis=1)


def has_images(shard: Arrays) -> bool:
    return shard.image_places is not None and len(shard.image_places) > 0


def find_slots(cfg: Config) -> "ImageSlots | None":
    """Return the slots of each sequence of a run; None where its model takes no images."""
    vision, per_row = cfg.model.vision, cfg.training.images_per_row
    if vision is None or not per_row:
        return None
    return ImageSlots(find_processor(vision), per_row, vision.image_token)


def index_images(tokens: Sequence[int], files: Sequence[bytes], processor: ImageProcessor, soft: int) -> Images | None:
    """Return the images of a prompt, out of their files; None without any (`Engine.admit`). Raises `ValueError` where
    the tokens are those of another number of images."""
    row = np.asarray(tokens)
    processor.find(row, soft, files)
    return _join([processor.decode(data) for data in files], _count_soft(row, soft)) if files else None


def place_images(
    tokens: np.ndarray, units: np.ndarray, grids: np.ndarray, processor: ImageProcessor, soft_id: int
) -> Images:
    """Return images for rows of tokens [B, T]: each row takes the next ones of `units` [units, ...] and `grids`
    [images, 2], as many as it has soft tokens for.

    Raises:
        ValueError: the rows have soft tokens for another number of images, or end within one.
    """
    of_grid = [Grid(*grid) for grid in grids.tolist()]
    soft_ends, unit_ends = (np.cumsum([0, *map(count, of_grid)]) for count in (processor.count, processor.num_units))
    # Behind so many images each row ends.
    row_ends = np.cumsum(np.sum(tokens == soft_id, axis=1))
    if row_ends[-1] != soft_ends[-1] or not np.isin(row_ends, soft_ends).all():
        raise ValueError(f"{row_ends[-1]} times {processor.soft} for {len(grids)} images")
    ends = [0, *np.searchsorted(soft_ends, row_ends)]
    rows = list(pairwise(ends))
    max_units = max(unit_ends[end] - unit_ends[begin] for begin, end in rows)
    pixels = np.zeros((len(rows), max_units, *units.shape[1:]), units.dtype)
    row_grids = np.zeros((len(rows), max(end - begin for begin, end in rows), 2), np.int32)
    for row, (begin, end) in enumerate(rows):
        row_units = units[unit_ends[begin] : unit_ends[end]]
        pixels[row, : len(row_units)], row_grids[row, : end - begin] = row_units, grids[begin:end]
    return Images(pixels, np.stack([_count_soft(row, soft_id) for row in tokens]), row_grids)


def _count_soft(tokens: np.ndarray, soft_id: int) -> np.ndarray:
    """Return which of the soft tokens a token is, counted from the first: [T] int32; -1 of text."""
    is_soft = tokens == soft_id
    return np.where(is_soft, np.cumsum(is_soft) - 1, -1).astype(np.int32)


def _join(images: Sequence[Pixels], index: np.ndarray) -> Images:
    """Return images one after the other: units [units, ...], index [T], grids [images, 2]."""
    return Images(np.concatenate([image.units for image in images]), index, np.array([image.grid for image in images]))


class ImageQuestion(NamedTuple):
    """The tokens of a conversation up to its first answer, its images until there, and the tokens of the answer."""

    prompt: list[int]
    images: Images
    answer: list[int]
    last_image: np.ndarray  # [y, x, 3]


class ImageSlots(NamedTuple):
    """Room for images in each sequence: `per_row` slots."""

    processor: ImageProcessor
    per_row: int  # training.images_per_row
    soft_id: int  # model.vision.image_token

    @property
    def suffix(self) -> str:
        """Ending of the names of plans in the cache."""
        return f"-{self.processor.max_tokens}-{self.per_row}"

    def check(self, seq_len: int, packing: str, max_image_tokens: int) -> None:
        """Raise `UserError` where a sequence has no room for the longest image, or would begin within one."""
        if packing == "concat":
            raise UserError(
                "loading.packing=concat cuts documents wherever a sequence is full, also within an image; set "
                "loading.packing=best_fit"
            )
        if seq_len < (needed := self.processor.num_before + max_image_tokens + 1):
            raise UserError(
                f"training.seq_len={seq_len} is shorter than one image, which is {needed} tokens "
                f"({max_image_tokens} of model.vision, and those at its ends); raise it"
            )

    def fill(self, shard: Arrays, chunks: list[list[int]], seq_len: int) -> Example:
        """Return the images of chunks one after the other, in slots, and for each token its index among all soft
        tokens of the slots."""
        index, images, offset = np.full(seq_len, -1, np.int32), [], 0
        if shard.image_places is not None:
            for first, length in chunks:
                begin, end = np.searchsorted(shard.image_places, [first, first + length])
                images += [self._decode(shard, number) for number in range(begin, end)]
                index[offset : offset + length] = shard.tokens[first : first + length]
                offset += length
        seen = _join(images, _count_soft(index, self.soft_id)) if images else None
        return {name: field[0] for name, field in self.stack([seen], seq_len).items()}

    def read(self, shard: Arrays, first: int, length: int) -> Images | None:
        """Return the images of a chunk (`Engine.admit`); None if it has none."""
        if shard.image_places is None:
            return None
        begin, end = np.searchsorted(shard.image_places, [first, first + length])
        images = [self._decode(shard, number) for number in range(begin, end)]
        return _join(images, _count_soft(shard.tokens[first : first + length], self.soft_id)) if images else None

    def stack(self, rows: Sequence[Images | None], seq_len: int) -> Example:
        """Return the fields of images of sequences [sequences, ...], of which each begins with the tokens of its
        images."""
        units = np.zeros((len(rows), self.per_row * self.processor.max_units, *self.processor.unit_shape), np.uint8)
        index = np.full((len(rows), seq_len), -1, np.int32)
        grids = np.zeros((len(rows), self.per_row, 2), np.int32)
        for row, images in enumerate(rows):
            if images is not None:
                units[row, : len(images.pixels)] = images.pixels
                index[row, : len(images.image_index)] = images.image_index
                grids[row, : len(images.grids)] = images.grids
        return {IMAGES: units, IMAGE_INDEX: index, IMAGE_GRIDS: grids}

    def find_questions(self, sequences: grain.MapDataset, count: int, max_length: int) -> list[ImageQuestion]:
        """Return what the first conversations of at most `count` sequences ask, spread evenly over all of them.

        Left out are those without images, without an answer, or with more than `max_length` tokens before it.
        """
        found, count = [], min(count, len(sequences))
        for number in range(count):
            example = sequences[number * len(sequences) // count]
            learnt = (example["loss_mask"] > 0) & (example["segment_ids"] == 1)
            begin = int(np.argmax(learnt))
            index = example[IMAGE_INDEX][: begin + 1]
            num_units = int(index.max(initial=-1) + 1) * self.processor.max_units // self.processor.max_tokens
            if not learnt.any() or not num_units or begin + 1 > max_length:
                continue
            grids = [Grid(*grid) for grid in example[IMAGE_GRIDS].tolist()]
            ends = np.cumsum([self.processor.num_units(grid) for grid in grids])
            last = int(np.searchsorted(ends, num_units))  # image of the question
            units = example[IMAGES][:num_units]
            images = Images(units, index, example[IMAGE_GRIDS][: last + 1])
            shown = self.processor.join(units[num_units - self.processor.num_units(grids[last]) :], grids[last])
            end = begin + int(np.argmin(np.append(learnt[begin:], False)))
            tokens, answer = example["tokens"][: begin + 1].tolist(), example["targets"][begin:end].tolist()
            found.append(ImageQuestion(tokens, images, answer, shown))
        return found

    def time_decoding(self, shard: Arrays) -> float:
        """Return the mean seconds in which the first images of a shard are decoded."""
        count = min(NUM_TIMED, len(shard.image_places) if shard.image_places is not None else 0)
        start_time = time.perf_counter()
        for number in range(count):
            self._decode(shard, number)
        return (time.perf_counter() - start_time) / max(1, count)

    def _decode(self, shard: Arrays, number: int) -> Pixels:
        assert shard.image_ends is not None
        assert shard.images is not None
        begin = int(shard.image_ends[number - 1]) if number else 0
        return self.processor.decode(shard.images[begin : shard.image_ends[number]].tobytes())

    def split_chunks(self, lengths: np.ndarray, starts: np.ndarray, spans: np.ndarray, seq_len: int) -> np.ndarray:
        """Cut documents as `_split_chunks` does, but before an image that does not fit, or that has no slot.

        T = 8, one slot, images of 2 tokens with one at each end     a a a [ 1 1 ] b b [ 2 2 ] c
        chunks                                                        |a a a [ 1 1 ] b b|[ 2 2 ]|
        """
        chunks = []
        for begin, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            end = begin + length - 1  # the last token is only a target
            in_document = spans[slice(*np.searchsorted(spans[:, 0], [begin, end]))].tolist()
            # With the tokens at both ends.
            images = [(first - self.processor.num_before, last + 1) for first, last in in_document]
            while begin < end:
                stop = min(begin + seq_len, end)
                remaining = [(first, last) for first, last in images if first >= begin]
                if len(remaining) > self.per_row:
                    stop = min(stop, remaining[self.per_row][0])
                if stop < end:
                    stop = next((first for first, last in remaining if first < stop < last), stop)
                chunks.append((begin, stop - begin))
                begin = stop
        return np.array(chunks, np.int64).reshape(-1, 2)

    def fits(self, chunks: np.ndarray, spans: np.ndarray) -> np.ndarray:
        """Return for each of the chunks [chunks, 2] whether its images fit into the slots of a sequence."""
        return self._count(chunks, spans) <= self.per_row

    def weigh(self, chunks: np.ndarray, spans: np.ndarray, seq_len: int) -> np.ndarray:
        """Return the room [chunks] that each chunk takes of a sequence: at least a slot's share for each image, so
        that no sequence gets more images than slots."""
        return np.maximum(chunks[:, 1], -(-self._count(chunks, spans) * seq_len // self.per_row))

    def _count(self, chunks: np.ndarray, spans: np.ndarray) -> np.ndarray:
        begin, end = np.searchsorted(spans[:, 0], [chunks[:, 0], chunks[:, 0] + chunks[:, 1]])
        return end - begin


# Prompts with images: files and texts -> tokens, and what the tower takes.
#
# In a text an image is the mark of the model's processor; a chat template writes it for a part {"type": "image"}. A
# text without it has its images before it. In the tokens it is what the model was trained with (`ImageProcessor`).

MAX_BYTES = 1 << 30  # of the files of one prompt


@dataclass(frozen=True)
class ImagePrompts:
    """Reads the images of prompts, and finds their soft tokens, for a model that sees."""

    processor: ImageProcessor
    soft_id: int
    max_pixels: int  # of one image

    def read(self, turns: list[dict[str, Any]], references: Sequence[Any], source: str) -> list[bytes]:
        """Return the files of a conversation's images, and put their places into its turns.

        Paths begin at the folder of the file `source`, or at the working folder. Raises `UserError` for an image that
        cannot be read, or other places than images.
        """
        bounds, in_place = ("1 GiB", "max_image_pixels"), "download it, and name its file"
        rules = MAX_BYTES, self.max_pixels
        reader = ImageReader(self.processor, find_root(source), *rules, bounds=bounds, in_place=in_place)
        try:
            return reader.read(take_images(turns, list(references), reader))
        except BadRow as error:
            raise UserError(f"the prompt {error}") from None

    def encode(
        self, text: str, files: Sequence[bytes], tokenize: Callable[[str], list[int]]
    ) -> tuple[list[int], Images | None]:
        """Return the tokens of a text with those of each image, and the images; None without images. Raises `UserError`
        where the text has another number of images, or its tokens are not those of the images."""
        try:
            tokens = tokenize(self.processor.expand([text], list(files))[0])
            return tokens, index_images(tokens, files, self.processor, self.soft_id)
        except ValueError as error:
            raise UserError(f"the chat template writes {error}") from None


def find_image_prompts(model: Model, tokenizer: Tokenizer, max_pixels: int) -> ImagePrompts | None:
    """Return what reads images for a model; None where it sees none, or its tokenizer has no token for them."""
    if model.vision is None:
        return None
    processor = find_processor(model.vision)
    soft_id = tokenizer.token_to_id(processor.soft)
    return None if soft_id is None else ImagePrompts(processor, soft_id, max_pixels)

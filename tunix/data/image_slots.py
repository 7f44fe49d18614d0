"""Slots for the images of a sequence: which images its pieces have, and where documents may be cut."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import grain
import numpy as np

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.data.batches import IMAGE_INDEX, IMAGES, Example
from tunix.data.images import ImageForm, decode_image
from tunix.data.shards import Arrays, Stream
from tunix.models.vision import Images

NUM_TIMED = 8  # images that are decoded to know how long it takes


def list_places(stream: Stream, number: int) -> np.ndarray:
    """Return the first token [images] of each image of a shard."""
    places = stream.shard(number).image_places
    return np.zeros(0, np.int64) if places is None else places


def has_images(shard: Arrays) -> bool:
    return shard.image_places is not None and len(shard.image_places) > 0


def find_slots(cfg: Config) -> "ImageSlots | None":
    """Return the slots of each sequence of a run; None where its model takes no images."""
    vision, per_row = cfg.model.vision, cfg.training.images_per_row
    if vision is None or not per_row:
        return None
    return ImageSlots(ImageForm.of(vision), per_row)


def index_images(tokens: Sequence[int], files: Sequence[bytes], form: ImageForm, soft_id: int) -> Images | None:
    """Return the images of a prompt, out of their files: pixels [n, y, x, 3], index [tokens]; None without any.

    Raises:
        UserError: the text has another number of images.
    """
    ids = np.asarray(tokens)
    if len(places := form.find(ids, soft_id)) != len(files):
        raise UserError(f"the chat template writes {len(places)} images, and the messages have {len(files)}")
    if not files:
        return None
    index = np.full(len(ids), -1, np.int32)
    index[ids == soft_id] = np.arange(len(files) * form.tokens_per_image)
    return Images(np.stack([decode_image(data, form.image_size) for data in files]), index)


class ImageQuestion(NamedTuple):
    """The tokens of a conversation up to its first answer, its images until there, and the tokens of the answer."""

    prompt: list[int]
    images: Images
    answer: list[int]


class ImageSlots(NamedTuple):
    """Room for images in each sequence: `per_row` slots."""

    form: ImageForm
    per_row: int  # training.images_per_row

    @property
    def suffix(self) -> str:
        """What the names of plans in the cache end with."""
        return f"-{self.form.tokens_per_image}-{self.per_row}"

    def check(self, seq_len: int, packing: str) -> None:
        """Raise `UserError` where a sequence has no room for an image, or would begin within one."""
        if packing == "concat":
            raise UserError(
                "loading.packing=concat cuts documents wherever a sequence is full, also within an image; set "
                "loading.packing=best_fit"
            )
        needed = self.form.tokens_per_image + 2
        if seq_len < needed:
            raise UserError(
                f"training.seq_len={seq_len} is shorter than one image, which is {needed} tokens "
                f"(model.vision.tokens_per_image={self.form.tokens_per_image}, and one at each end); raise it"
            )

    def fill(self, shard: Arrays, pieces: list[list[int]], seq_len: int) -> Example:
        """Return the images of pieces one after the other, in slots, and for each token its index among all soft
        tokens of the slots."""
        size, num_tokens = self.form
        pixels = np.zeros((self.per_row, size, size, 3), np.uint8)
        index = np.full(seq_len, -1, np.int32)
        if shard.image_places is None:
            return {IMAGES: pixels, IMAGE_INDEX: index}
        slot, offset = 0, 0
        for first, length in pieces:
            begin, end = np.searchsorted(shard.image_places, [first, first + length])
            for number in range(begin, end):
                start = offset + int(shard.image_places[number]) - first
                index[start : start + num_tokens] = np.arange(slot * num_tokens, (slot + 1) * num_tokens)
                pixels[slot] = self._decode(shard, number)
                slot += 1
            offset += length
        return {IMAGES: pixels, IMAGE_INDEX: index}

    def read(self, shard: Arrays, first: int, length: int) -> Images | None:
        """Return the images of a piece: pixels [images, y, x, 3] and the index [tokens]; None if it has none."""
        fields = self.fill(shard, [[first, length]], length)
        count = int(fields[IMAGE_INDEX].max(initial=-1) + 1) // self.form.tokens_per_image
        return Images(fields[IMAGES][:count], fields[IMAGE_INDEX]) if count else None

    def stack(self, prompts: Sequence[Images | None], seq_len: int) -> Example:
        """Return the images of sequences [sequences, ...] that begin with these prompts."""
        size = self.form.image_size
        pixels = np.zeros((len(prompts), self.per_row, size, size, 3), np.uint8)
        index = np.full((len(prompts), seq_len), -1, np.int32)
        for row, images in enumerate(prompts):
            if images is not None:
                pixels[row, : len(images.pixels)] = images.pixels
                index[row, : len(images.image_index)] = images.image_index
        return {IMAGES: pixels, IMAGE_INDEX: index}

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
            num_images = int(index.max(initial=-1) + 1) // self.form.tokens_per_image
            if not learnt.any() or not num_images or begin + 1 > max_length:
                continue
            end = begin + int(np.argmin(np.append(learnt[begin:], False)))
            tokens, answer = example["tokens"][: begin + 1].tolist(), example["targets"][begin:end].tolist()
            found.append(ImageQuestion(tokens, Images(example[IMAGES][:num_images], index), answer))
        return found

    def time_decoding(self, shard: Arrays) -> float:
        """Return the mean seconds in which the first images of a shard are decoded."""
        count = min(NUM_TIMED, len(shard.image_places) if shard.image_places is not None else 0)
        start_time = time.perf_counter()
        for number in range(count):
            self._decode(shard, number)
        return (time.perf_counter() - start_time) / max(1, count)

    def _decode(self, shard: Arrays, number: int) -> np.ndarray:
        """Return the pixels [y, x, 3] of an image of a shard."""
        assert shard.image_ends is not None
        assert shard.images is not None
        begin = int(shard.image_ends[number - 1]) if number else 0
        return decode_image(shard.images[begin : shard.image_ends[number]].tobytes(), self.form.image_size)

    def split_chunks(self, lengths: np.ndarray, starts: np.ndarray, places: np.ndarray, seq_len: int) -> np.ndarray:
        """Cut documents as `_split_chunks` does, but before an image that does not fit, or that has no slot.

        T = 8, one slot, images of 2 tokens with one at each end     a a a [ 1 1 ] b b [ 2 2 ] c
        pieces                                                        |a a a [ 1 1 ] b b|[ 2 2 ]|
        """
        pieces = []
        for begin, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            end = begin + length - 1  # the last token is only a target
            # From the token before the first soft one to the one behind the last.
            images = [(place - 1, place + self.form.tokens_per_image + 1) for place in _within(places, begin, end)]
            while begin < end:
                stop = min(begin + seq_len, end)
                remaining = [(first, last) for first, last in images if first >= begin]
                if len(remaining) > self.per_row:
                    stop = min(stop, remaining[self.per_row][0])
                if stop < end:
                    stop = next((first for first, last in remaining if first < stop < last), stop)
                pieces.append((begin, stop - begin))
                begin = stop
        return np.array(pieces, np.int64).reshape(-1, 2)

    def has_room(self, pieces: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return for each of the pieces [pieces, 2] whether its images fit into the slots of a sequence."""
        return self._count(pieces, places) <= self.per_row

    def weigh(self, pieces: np.ndarray, places: np.ndarray, seq_len: int) -> np.ndarray:
        """Return the room [pieces] that each piece takes of a sequence: at least a slot's share for each image, so
        that no sequence gets more images than slots."""
        return np.maximum(pieces[:, 1], -(-self._count(pieces, places) * seq_len // self.per_row))

    def _count(self, pieces: np.ndarray, places: np.ndarray) -> np.ndarray:
        begin, end = np.searchsorted(places, [pieces[:, 0], pieces[:, 0] + pieces[:, 1]])
        return end - begin


def _within(places: np.ndarray, begin: int, end: int) -> list[int]:
    """Return those of the sorted places that are at least `begin` and below `end`."""
    return places[slice(*np.searchsorted(places, [begin, end]))].tolist()

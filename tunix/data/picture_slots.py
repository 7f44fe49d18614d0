"""Slots for the pictures of a sequence: which pictures its pieces have, and where documents may be cut."""

from typing import NamedTuple

import numpy as np

from tunix.base.errors import UserError
from tunix.data.batches import IMAGE_INDEX, IMAGES, Example
from tunix.data.pictures import PictureForm, decode_picture
from tunix.data.shards import Arrays


class PictureSlots(NamedTuple):
    """Room for pictures in each sequence: `per_row` slots."""

    form: PictureForm
    per_row: int  # training.images_per_row

    @property
    def suffix(self) -> str:
        """What the names of plans in the cache end with."""
        return f"-{self.form.tokens_per_image}-{self.per_row}"

    def check(self, seq_len: int, packing: str) -> None:
        """Raise `UserError` where a sequence has no room for a picture, or would begin within one."""
        if packing == "concat":
            raise UserError(
                "loading.packing=concat cuts documents wherever a sequence is full, also within a picture; set "
                "loading.packing=best_fit"
            )
        needed = self.form.tokens_per_image + 2
        if seq_len < needed:
            raise UserError(
                f"training.seq_len={seq_len} is shorter than one picture, which is {needed} tokens "
                f"(model.vision.tokens_per_image={self.form.tokens_per_image}, and one at each end); raise it"
            )

    def fill(self, shard: Arrays, pieces: list[list[int]], seq_len: int) -> Example:
        """Return the pictures of pieces one after the other, in slots, and for each token its index among all soft
        tokens of the slots."""
        size, num_tokens = self.form
        images = np.zeros((self.per_row, size, size, 3), np.uint8)
        index = np.full(seq_len, -1, np.int32)
        if shard.picture_places is None or shard.picture_ends is None or shard.pictures is None:
            return {IMAGES: images, IMAGE_INDEX: index}
        slot, offset = 0, 0
        for first, length in pieces:
            begin, end = np.searchsorted(shard.picture_places, [first, first + length])
            for number in range(begin, end):
                start = offset + int(shard.picture_places[number]) - first
                index[start : start + num_tokens] = np.arange(slot * num_tokens, (slot + 1) * num_tokens)
                data_begin = int(shard.picture_ends[number - 1]) if number else 0
                images[slot] = decode_picture(shard.pictures[data_begin : shard.picture_ends[number]].tobytes(), size)
                slot += 1
            offset += length
        return {IMAGES: images, IMAGE_INDEX: index}

    def split_chunks(self, lengths: np.ndarray, starts: np.ndarray, places: np.ndarray, seq_len: int) -> np.ndarray:
        """Cut documents as `_split_chunks` does, but before a picture that does not fit, or that has no slot.

        T = 8, one slot, pictures of 2 tokens with one at each end     a a a [ 1 1 ] b b [ 2 2 ] c
        pieces                                                        |a a a [ 1 1 ] b b|[ 2 2 ]|
        """
        pieces = []
        for begin, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            end = begin + length - 1  # the last token is only a target
            # From the token before the first soft one to the one behind the last.
            pictures = [(place - 1, place + self.form.tokens_per_image + 1) for place in _within(places, begin, end)]
            while begin < end:
                stop = min(begin + seq_len, end)
                remaining = [(first, last) for first, last in pictures if first >= begin]
                if len(remaining) > self.per_row:
                    stop = min(stop, remaining[self.per_row][0])
                if stop < end:
                    stop = next((first for first, last in remaining if first < stop < last), stop)
                pieces.append((begin, stop - begin))
                begin = stop
        return np.array(pieces, np.int64).reshape(-1, 2)

    def has_room(self, pieces: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return for each of the pieces [pieces, 2] whether its pictures fit into the slots of a sequence."""
        return self._count(pieces, places) <= self.per_row

    def weigh(self, pieces: np.ndarray, places: np.ndarray, seq_len: int) -> np.ndarray:
        """Return the room [pieces] that each piece takes of a sequence: at least a slot's share for each picture, so
        that no sequence gets more pictures than slots."""
        return np.maximum(pieces[:, 1], -(-self._count(pieces, places) * seq_len // self.per_row))

    def _count(self, pieces: np.ndarray, places: np.ndarray) -> np.ndarray:
        begin, end = np.searchsorted(places, [pieces[:, 0], pieces[:, 0] + pieces[:, 1]])
        return end - begin


def _within(places: np.ndarray, begin: int, end: int) -> list[int]:
    """Return those of the sorted places that are at least `begin` and below `end`."""
    return places[slice(*np.searchsorted(places, [begin, end]))].tolist()

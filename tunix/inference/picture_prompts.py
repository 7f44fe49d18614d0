"""Prompts with pictures: files and texts -> tokens, and what the tower takes.

In a text a picture is one token, `<start_of_image>`; a chat template writes it for a part {"type": "image"}. A text
without it has its pictures before it. In the tokens it is what the model was trained with (`PictureForm`).
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from tunix.base.errors import UserError
from tunix.config import Model
from tunix.data.files import BadRow
from tunix.data.picture_slots import index_pictures
from tunix.data.pictures import SOFT, PictureForm, PictureReader, find_root, take_pictures
from tunix.models.vision import Pictures

MAX_BYTES = 1 << 30  # of the files of one prompt


@dataclass(frozen=True)
class PicturePrompts:
    """Reads the pictures of prompts, and finds their soft tokens, for a model that sees."""

    form: PictureForm
    soft_id: int
    max_pixels: int  # of one picture

    def read(self, turns: list[dict[str, Any]], references: Sequence[Any], source: str) -> list[str]:
        """Return the files of a conversation's pictures as base64, and put their places into its turns.

        Paths begin at the folder of the file `source`, or at the working folder.

        Raises:
            UserError: a picture that cannot be read, or other places than pictures.
        """
        reader = PictureReader(self.form, find_root(source), MAX_BYTES, self.max_pixels)
        try:
            found = take_pictures(turns, list(references), reader)
            return [base64.b64encode(data).decode() for data in reader.read(found)]
        except BadRow as error:
            raise UserError(f"the prompt {error}") from None

    def expand(self, text: str) -> str:
        """Return a text with all tokens of each picture."""
        return self.form.expand(text)

    def find(self, tokens: list[int], files: Sequence[str]) -> Pictures | None:
        """Return the pictures of a prompt's tokens, out of their files as base64; None without pictures.

        Raises:
            UserError: the text has another number of pictures.
        """
        decoded = [base64.b64decode(data) for data in files]
        return index_pictures(tokens, decoded, self.form, self.soft_id)


def find_picture_prompts(model: Model, tokenizer: Tokenizer, max_pixels: int) -> PicturePrompts | None:
    """Return what reads pictures for a model; None where it sees none, or its tokenizer has no token for them."""
    soft_id = tokenizer.token_to_id(SOFT)
    if model.vision is None or soft_id is None:
        return None
    return PicturePrompts(PictureForm.of(model.vision), soft_id, max_pixels)

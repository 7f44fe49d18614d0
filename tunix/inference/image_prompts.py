"""Prompts with images: files and texts -> tokens, and what the tower takes.

In a text an image is the mark of the model's processor; a chat template writes it for a part {"type": "image"}. A text
without it has its images before it. In the tokens it is what the model was trained with (`ImageProcessor`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from tunix.base.errors import UserError
from tunix.config import Model
from tunix.data.files import BadRow
from tunix.data.image_processors import ImageProcessor, find_processor
from tunix.data.image_slots import index_images
from tunix.data.images import ImageReader, find_root, take_images
from tunix.models.vision import Images

MAX_BYTES = 1 << 30  # of the files of one prompt


@dataclass(frozen=True)
class ImagePrompts:
    """Reads the images of prompts, and finds their soft tokens, for a model that sees."""

    processor: ImageProcessor
    soft_id: int
    max_pixels: int  # of one image

    def read(self, turns: list[dict[str, Any]], references: Sequence[Any], source: str) -> list[bytes]:
        """Return the files of a conversation's images, and put their places into its turns.

        Paths begin at the folder of the file `source`, or at the working folder.

        Raises:
            UserError: an image that cannot be read, or other places than images.
        """
        reader = ImageReader(self.processor, find_root(source), MAX_BYTES, self.max_pixels)
        try:
            return reader.read(take_images(turns, list(references), reader))
        except BadRow as error:
            raise UserError(f"the prompt {error}") from None

    def encode(
        self, text: str, files: Sequence[bytes], tokenize: Callable[[str], list[int]]
    ) -> tuple[list[int], Images | None]:
        """Return the tokens of a text with those of each image, and the images; None without images.

        Raises:
            UserError: the text has another number of images, or its tokens are not those of the images.
        """
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

"""A model that says how good answers are: `{function: model, path: RUN}` of task.rewards, on the mesh of a run.

It reads an answer as it was trained to (task=reward): by its own chat template and tokenizer, which may be others than
those of the model that answers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tunix.config.pretrained_config import check_gives_reward
from tunix.data.chat import Message, Options
from tunix.data.documents import Conversation, Document, encode_whole
from tunix.data.tokenizer import load_vocab
from tunix.inference.pretrained import load_pretrained
from tunix.sharding.arrays import bytes_per_device

TOKENS = 16_384  # of the answers that are scored at one time, on all devices


class RewardModel:
    """A model with one number, split over the mesh, and its tokenizer. Every process calls it with the same answers."""

    def __init__(self, path: str | Path, dtype: str, mesh_shape: Any):
        """Load it; weights and products are of `dtype`.

        Raises:
            UserError: it is no model with one number, or has no tokenizer.
        """
        self.model = load_pretrained(path, dtype, mesh_shape, strategy="full_shard")
        check_gives_reward(self.model.cfg)  # also where a command names it
        self.vocab = self.model.vocab or load_vocab(str(self.model.tokenizer_files))

    @property
    def bytes_per_device(self) -> int:
        """Bytes of its weights on a device."""
        return bytes_per_device(self.model.params)

    def score(self, prompts: Sequence[tuple[Sequence[Message], Options]], answers: Sequence[str]) -> list[float | str]:
        """Return for each answer its reward, or the text that says why it has none.

        A prompt is the turns before the answer, and what the chat template got.
        """
        turns = [
            Document("", Conversation([*messages, {"role": "assistant", "content": answer}], options))
            for (messages, options), answer in zip(prompts, answers, strict=True)
        ]
        rows = [np.concatenate(each.tokens).tolist() for each in encode_whole(self.vocab, turns)]
        longest = self.model.cfg.context_length
        fitting = [number for number, row in enumerate(rows) if len(row) <= longest]
        scores: list[float | str] = [
            f"it has {len(row):,} tokens with its prompt, more than model.context_length={longest} of the reward model"
            for row in rows
        ]
        if fitting:
            num_at_once = max(1, TOKENS // max(len(rows[number]) for number in fitting))
            numbers = self.model.score([rows[number] for number in fitting], num_at_once)[:, 0]
            for number, score in zip(fitting, numbers.tolist(), strict=True):
                scores[number] = score
        return scores

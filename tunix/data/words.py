"""Byte-level BPE by a memory of words: the same tokens as the library's, for a quarter of its CPU time.

A tokenizer of this kind cuts a text into words by GPT-2's regular expression, and turns each word into tokens by
itself. Most words of a corpus occur often. So the library gets each word once, and a dict has its tokens from then on:

    text          "def add(a, b):"
    words         "def" " add" "(" "a" "," " b" "):"         by Python's `re`
    tokens        those that the dict has of each word

The tokens are those of the whole text, because

- a word by itself is one word again: no part of the expression looks back, and only white space looks ahead, for the
  end of a text or for more of it;
- in plain text (`NOT_PLAIN`) Python's classes of characters are those of every version of Unicode;
- what is not plain goes to the library, with the text around it up to the nearest white space, where a word ends;
- a text with an added token in it goes to the library too.
"""

import os
import re
from collections.abc import Sequence
from itertools import groupby

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

WORD = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII)
NOT_PLAIN = re.compile(r"[^\t\n\r -~]")
WORD_ENDS = re.compile(r"(?<=[!-~])(?=[ \t\r\n])")  # between any plain character and white space, a word ends
MAX_WORDS, MAX_LENGTH = 1 << 20, 64  # what the memory holds: at most so many words of at most so many characters
FEW_CORES = 4  # the library takes four times the CPU time, but all cores: with more of them it is the faster one


class WordMemory(dict[str, bytes]):
    """Tokens of the words met so far, as bytes of a dtype; see the top of this file."""

    def __init__(self, backend: Backend, dtype: np.dtype, added: Sequence[str]):
        self.backend, self.dtype = backend, dtype
        self.added = re.compile("|".join(map(re.escape, added))) if added else None

    def __missing__(self, word: str) -> bytes:
        tokens = self._ask(word)
        if len(word) <= MAX_LENGTH and len(self) < MAX_WORDS:
            self[word] = tokens
        return tokens

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens [T] of a text, without those around a document."""
        if self.added is not None and self.added.search(text):
            tokens = self._ask(text)
        elif NOT_PLAIN.search(text) is None:
            tokens = self._look_up(text)
        else:
            runs = groupby(WORD_ENDS.split(text), lambda part: NOT_PLAIN.search(part) is None)
            tokens = b"".join((self._look_up if is_plain else self._ask)("".join(parts)) for is_plain, parts in runs)
        return np.frombuffer(tokens, self.dtype)

    def _look_up(self, text: str) -> bytes:
        return b"".join(map(self.__getitem__, WORD.findall(text)))

    def _ask(self, text: str) -> bytes:
        return np.array(self.backend.encode(text, add_special_tokens=False).ids, self.dtype).tobytes()


def find_word_memory(backend: Backend, dtype: np.dtype) -> WordMemory | None:
    """Return a memory of a tokenizer's words; None if its words may be others, or if the library is faster here.

    All tokenizers that are trained here have one: BPE of bytes, words by GPT-2's expression, and no normalizer.
    """
    model, words = backend.model, backend.pre_tokenizer
    if not isinstance(model, BPE) or model.dropout or backend.normalizer:
        return None
    if not isinstance(words, ByteLevel) or not words.use_regex or words.add_prefix_space:
        return None
    if count_threads() > FEW_CORES:
        return None
    return WordMemory(backend, dtype, [token.content for token in backend.get_added_tokens_decoder().values()])


def count_threads() -> int:
    """Return the threads of the tokenizer's library in this process: one for each core, unless a variable says less."""
    return int(os.environ.get("RAYON_NUM_THREADS") or os.cpu_count() or 1)

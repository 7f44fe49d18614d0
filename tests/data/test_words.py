"""A memory of words gives the tokens of the library, and is used for no tokenizer whose words are others."""

import json

import pytest
from data.test_long_documents import CORPUS, TEXTS, replaced, train_bpe
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from tunix.config.compose import compose
from tunix.data import words
from tunix.data.tokenizer import Vocab, train_vocab
from tunix.data.words import find_word_memory

ODD = [
    "\x1c", "\x85", "\u2028", "\u00a0", "\x00", "\u017f", "İ", "²", "٣", "e\u0301", "'", "'s", "'S", "_", "\v", "\f",
    "\r\n", "  ",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained() -> Vocab:
    vocab = train_vocab(compose(["tokenizer.vocab_size=600"]).config.tokenizer, CORPUS)
    vocab.backend.add_tokens([AddedToken("def f", normalized=False)])
    return vocab


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setenv("RAYON_NUM_THREADS", "2")


def test_tokens_are_those_of_the_library(trained):
    """Texts of all scripts, with white space of every kind, contractions, and tokens that a text spells."""
    memory = find_word_memory(trained.backend, trained.dtype)
    parts = st.one_of(TEXTS, st.sampled_from([*ODD, "<eos>", "def f", "don't", "x1"]), st.text(max_size=6))
    plain = st.text("aZs1_'. \n\t\r", max_size=20)

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.lists(st.one_of(parts, plain), max_size=8).map("".join), st.booleans())
    def compare(text, special):
        trained.backend.encode_special_tokens = special
        expected = trained.backend.encode(text, add_special_tokens=False).ids
        assert memory.encode(text).tolist() == expected, text

    compare()
    assert len(memory) > 50


def test_every_character_beside_others(trained):
    """Python and the library agree on which characters are letters, digits and white space, or the library decides."""
    memory = find_word_memory(trained.backend, trained.dtype)
    trained.backend.encode_special_tokens = True
    for first in [*map(chr, range(256)), *ODD]:
        text = "".join(
            f"{before}{first}{after}|" for before in ("", "a", "1", " ", "\n", "'") for after in ("a", "1", " ", "s")
        )
        assert memory.encode(text).tolist() == trained.backend.encode(text, add_special_tokens=False).ids, repr(first)


def test_the_memory_stays_small(trained, monkeypatch):
    monkeypatch.setattr(words, "MAX_WORDS", 5)
    memory = find_word_memory(trained.backend, trained.dtype)
    text = f"{'x' * 100} " + " ".join(map(str, range(50)))
    assert memory.encode(text).tolist() == trained.backend.encode(text, add_special_tokens=False).ids
    assert len(memory) == 5
    assert max(map(len, memory)) < words.MAX_LENGTH


def test_other_tokenizers_and_many_cores_take_the_library(trained, monkeypatch):
    level = pre_tokenizers.ByteLevel
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), level(add_prefix_space=False)])
    dropout = json.loads(trained.backend.to_str())["model"] | {"dropout": 0.1}
    others: dict[str, Tokenizer] = {
        "prefix": train_bpe(level(add_prefix_space=True)),
        "no words": train_bpe(level(add_prefix_space=False, use_regex=False)),
        "normalizer": train_bpe(level(add_prefix_space=False), normalizers.NFC()),
        "digits": train_bpe(digits),
        "dropout": replaced(trained.backend, model=dropout),
    }
    assert all(find_word_memory(backend, trained.dtype) is None for backend in others.values())
    assert trained.words is not None
    monkeypatch.setenv("RAYON_NUM_THREADS", "16")
    assert find_word_memory(trained.backend, trained.dtype) is None

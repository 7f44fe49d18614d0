"""Tokenizers from everywhere: trained here, tokenizer.json, SentencePiece, bytes; and what surrounds a document."""

import json
import random
import resource
import time
from typing import Any
from unittest.mock import Mock

import pytest
from conftest import write_corpus
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer, sentencepiece_model_pb2
from support.harness import SMALL
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.data import tokenizer
from tunix.data.dataset import load_corpus
from tunix.data.thoughts import split_thought
from tunix.data.tokenizer import (
    TokenBytes,
    Vocab,
    break_special_texts,
    bytes_by_token,
    compile_special_texts,
    decode_behind,
    load_vocab,
    special_tokens,
)

TEXT = "def f(x):\n\treturn 'Ünïcödé 漢字 🙂' # \x00\r\n"


@pytest.fixture
def load(corpus):
    return lambda *words: load_corpus(compose([*SMALL, "data=text", f"data.paths=['{corpus}']", *words]).config)


def test_a_trained_tokenizer_is_cached_and_gives_the_text_back(load, cache_dir):
    one, two = load(), load()
    assert one.fingerprint == two.fingerprint
    assert list((cache_dir / "tokenizers").glob("*/tokenizer.json"))
    ids = one.tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert one.tokenizer.decode(ids) == TEXT
    assert bytes_by_token(one.tokenizer)[ids].sum() == len(TEXT.encode())
    assert bytes_by_token(one.tokenizer)[one.vocab.bos] == 0


def test_a_disk_that_takes_no_tokenizer_is_an_error_of_the_disk(load, tmp_path):
    """As every caller expects; the library's own `save` has a bare exception for it."""
    vocab, usual = load("tokenizer=bytes", "tokenizer.vocab_size=259").vocab, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, usual[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            vocab.save(tmp_path / "tokenizer")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_bytes(load):
    loaded = load("tokenizer=bytes", "tokenizer.vocab_size=259")
    assert loaded.vocab.num_tokens == 259
    assert len(loaded.tokenizer.encode(TEXT, add_special_tokens=False).ids) == len(TEXT.encode())


OF_GPT_OSS = "<|channel|>analysis<|message|>2 + 3<|end|><|start|>assistant<|channel|>"
TURNS = {  # what the model writes, the end of its prompt, and its thought
    "GPT-OSS": (f"{OF_GPT_OSS}final<|message|>5", "<|start|>assistant", "2 + 3"),
    "a call of GPT-OSS": (f"{OF_GPT_OSS}commentary to=functions.analysis <|constrain|>json<|message|>5", "", "2 + 3"),
    "two thoughts of GPT-OSS": (
        f"<|channel|>analysis<|message|>1 + <|end|><|start|>assistant{OF_GPT_OSS}final<|message|>5",
        "",
        "1 + 2 + 3",
    ),
    "a turn of GPT-OSS without marks": ("5", "<|start|>me", ""),
    "no thought of GPT-OSS": ("<|channel|>final<|message|>5", "<|start|>assistant", ""),
    "Gemma 4": ("<|channel>thought\n2 + 3<channel|>5", "<|turn>model\n", "2 + 3"),
    "Mistral": ("[THINK]2 + 3[/THINK]5", "[/INST]", "2 + 3"),
    "Apertus": ("<|inner_prefix|>2 + 3<|inner_suffix|>5", "<|assistant_start|>", "2 + 3"),
    "a call of Apertus": ("<|inner_prefix|>2 + 3<|tools_prefix|>5", "<|assistant_start|>", "2 + 3"),
    "a header of Gemma 4 in the prompt": ("2 + 3<channel|>5", "<|turn>model\n<|channel>x\n", "2 + 3"),
    "in the prompt": ("2 + 3[/THINK]5", "[THINK]", "2 + 3"),
    "a mark in a question": ("5", "What is [THINK] for?[/INST]", ""),
    "Qwen 3": ("<think>2 + 3</think>5", "", None),  # its marks are text, which stays in the answer
    "no marks": ("5", "", ""),
}


@pytest.mark.parametrize("turn", TURNS)
def test_a_thought_is_told_from_the_answer_by_special_tokens(load, turn):
    backend = Tokenizer.from_str(load("tokenizer=bytes", "tokenizer.vocab_size=259").tokenizer.to_str())
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"]
    marks += ["<|channel>", "<channel|>", "[THINK]", "[/THINK]"]
    marks += ["<|inner_prefix|>", "<|inner_suffix|>", "<|tools_prefix|>"]
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    backend.add_tokens(["<think>", "</think>"])
    text, prompt, expected = TURNS[turn]
    tokens, before = (backend.encode(each, add_special_tokens=False).ids for each in (text, prompt))
    thought, answer = map(backend.decode, split_thought(backend, tokens, before))
    assert not special_tokens(backend) & {token for part in split_thought(backend, tokens, before) for token in part}
    assert (thought, answer) == (("", text) if expected is None else (expected, "5"))


def test_a_mark_without_its_others_says_nothing_of_thoughts(load):
    """`<|end|>` alone is the end of a turn of Phi."""
    backend = Tokenizer.from_str(load("tokenizer=bytes", "tokenizer.vocab_size=259").tokenizer.to_str())
    backend.add_special_tokens(["<|end|>"])
    tokens = backend.encode("5<|end|>6", add_special_tokens=False).ids
    assert split_thought(backend, tokens) == ([], tokens)


def test_documents_stand_between_bos_and_eos_and_cannot_write_them(tmp_path):
    folder = write_corpus(tmp_path / "c", 3)
    (folder / "003.txt").write_text("a<eos>b<bos>")
    words = [*SMALL, "data=text", f"data.paths=['{folder}']", "data.held_out_fraction=0", "training.seq_len=4"]
    loaded = load_corpus(compose(words).config)
    shard = loaded.train["text"].stream.shard(0)
    bos, eos = loaded.vocab.bos, loaded.vocab.eos
    assert (shard.tokens[shard.starts] == bos).all()
    assert [(shard.tokens == token).sum() for token in (bos, eos)] == [4, 4]


def test_training_one_to_a_path(load, tmp_path):
    path = tmp_path / "new" / "tokenizer.json"
    made = load(f"tokenizer.path={path}", "tokenizer.train=true")
    assert load(f"tokenizer.path={path}").fingerprint == made.fingerprint == load().fingerprint
    assert load(f"tokenizer.path={path}", "tokenizer.train=true").fingerprint == made.fingerprint  # begun again
    with pytest.raises(
        UserError, match=r"would write tokenizer.path=.*, which exists and is another tokenizer; remove"
    ):
        load(f"tokenizer.path={path}", "tokenizer.train=true", "tokenizer.vocab_size=270")
    with pytest.raises(UserError, match=r"tokenizer.train=false, and tokenizer.path names none; set the path"):
        load("tokenizer.train=false")


def test_tokenizers_from_files(load, tmp_path):
    loaded = load()
    path = tmp_path / "tokenizer.json"
    saved = Tokenizer.from_str(loaded.tokenizer.to_str())
    saved.enable_truncation(8)  # as files have it that somebody saved after a use of it: documents are whole
    saved.enable_padding(length=16)
    saved.model.dropout = 0.5  # a text would have other tokens each time
    saved.save(str(path))
    assert load(f"tokenizer.path={path}").tokenizer.to_str() == loaded.tokenizer.to_str()
    with pytest.raises(
        UserError, match=r"the tokenizer has 300 tokens, more than model.vocab_size=256; set model.vocab_size=384"
    ):
        load(f"tokenizer.path={path}", "model.vocab_size=256")
    assert compose([*SMALL, f"tokenizer.path={path}", "model.vocab_size=auto"]).config.model.vocab_size == 384
    assert compose([*SMALL, "tokenizer.vocab_size=513", "model.vocab_size=auto"]).config.model.vocab_size == 640
    with pytest.raises(UserError, match="tokenizer.bos_token=<s> is not a token of"):
        load(f"tokenizer.path={path}", "tokenizer.bos_token='<s>'")
    with pytest.raises(UserError, match="nowhere.json does not exist"):
        load("tokenizer.path=nowhere.json")
    path.write_text(json.dumps({"no": "tokenizer"}))
    with pytest.raises(UserError, match=r"cannot be read as a tokenizer.json"):
        load(f"tokenizer.path={path}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has neither a tokenizer.json nor a tokenizer.model"):
        load(f"tokenizer.path={tmp_path}/empty")


def test_a_hugging_face_folder_says_what_surrounds_a_document(load, tmp_path):
    load().vocab.save(tmp_path / "hf")
    info: dict[str, Any] = {
        "bos_token": None,
        "eos_token": {"content": "<pad>"},
        "chat_template": [{"name": "default", "template": "x"}],
    }
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(info))
    vocab = load(f"tokenizer.path={tmp_path}/hf").vocab
    assert (vocab.bos_token, vocab.eos_token, vocab.chat_template) == (None, "<pad>", "x")  # its <bos> is not taken
    # Older files have the tokens of today in a file of their own.
    (tmp_path / "hf" / "special_tokens_map.json").write_text(
        '{"bos_token": {"content": "<bos>"}, "eos_token": "<eos>"}'
    )
    vocab = load(f"tokenizer.path={tmp_path}/hf").vocab
    assert (vocab.bos_token, vocab.eos_token) == ("<bos>", "<eos>")
    info["added_tokens_decoder"] = {}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(info))
    vocab = load(f"tokenizer.path={tmp_path}/hf").vocab
    assert (vocab.bos_token, vocab.eos_token) == (None, "<pad>")
    # The file of a processor, where the tokenizer has no template.
    (tmp_path / "hf" / "chat_template.json").write_text(json.dumps({"chat_template": "z"}))
    assert load(f"tokenizer.path={tmp_path}/hf").vocab.chat_template == "x"
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(info | {"chat_template": None}))
    vocab = load(f"tokenizer.path={tmp_path}/hf").vocab
    assert (vocab.eos_token, vocab.chat_template) == ("<pad>", "z")
    (tmp_path / "hf" / "chat_template.jinja").write_text("y")
    assert load(f"tokenizer.path={tmp_path}/hf").vocab.chat_template == "y"
    (tmp_path / "hf" / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match="chat_template.jinja is not UTF-8"):
        load(f"tokenizer.path={tmp_path}/hf")


def test_the_first_token_of_a_document_is_a_special_one(tmp_path):
    """Where no file names it: an ordinary token of that name may stand in a text."""
    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "w": 2}))
    for number, first in enumerate((None, "<s>")):
        words.save(str(tmp_path / f"{number}.json"))
        assert load_vocab(str(tmp_path / f"{number}.json")).bos_token == first
        words.add_special_tokens(["<s>"])


def train_pieces(kind: str) -> Tokenizer:
    """Return a tokenizer of one of the kinds that write the space before a word into its token."""
    if kind == "unigram":
        backend = Tokenizer(models.Unigram())
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Metaspace(prepend_scheme="first")
        trainer: trainers.Trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=["</s>"], show_progress=False)
    else:
        byte_tokens = [f"<0x{number:02X}>" for number in range(256)]
        backend = Tokenizer(models.BPE(byte_fallback=True))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps)
        trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["</s>", *byte_tokens], show_progress=False)
    backend.train_from_iterator([WORDS], trainer)
    info = json.loads(backend.to_str())
    info["added_tokens"] = info["added_tokens"][:1]  # tokens of bytes are no special tokens
    return Tokenizer.from_str(json.dumps(info))


WORDS = "this is a text of words and some more words to fill it as a text of words is"


@pytest.mark.parametrize("kind", ["unigram", "llama 2", "bytes"])
def test_tokens_have_the_bytes_of_the_text(kind):
    settings = compose(["tokenizer.vocab_size=300"]).config.tokenizer
    backend = tokenizer.train_vocab(settings, [WORDS]).backend if kind == "bytes" else train_pieces(kind)
    backend.add_tokens([AddedToken("漢字", normalized=False)])  # no special token: part of the text
    text = f"{WORDS}{'' if kind == 'unigram' else ' é🙂'} 漢字"
    # The space that stands before the first word counts, too: no token says that it is the first of its document.
    first = kind != "bytes"
    tokens = backend.encode(text, add_special_tokens=False).ids
    assert bytes_by_token(backend)[tokens].sum() == len(text.encode()) + first
    assert backend.decode(tokens) == text
    parts = list(map(TokenBytes(backend), tokens))
    assert b"".join(parts).decode() == " " * first + text
    # An answer goes on behind its prompt, with the space of its first word.
    assert [decode_behind(backend, tokens[n], tokens[n + 1 :]) for n in range(4)] == [
        b"".join(parts[n + 1 :]).decode() for n in range(4)
    ]


def test_a_vocabulary_with_holes(load, tmp_path):
    loaded = load("tokenizer=bytes", "tokenizer.vocab_size=259")
    info = json.loads(loaded.tokenizer.to_str())
    info["model"]["vocab"]["z"] = 400
    (tmp_path / "tokenizer.json").write_text(json.dumps(info))
    own = load(f"tokenizer.path={tmp_path}/tokenizer.json", "model.vocab_size=512")
    assert own.vocab.num_tokens == 401
    sizes = bytes_by_token(own.tokenizer)
    assert len(sizes) == 401
    assert sizes[[info["model"]["vocab"]["a"], 399, 400]].tolist() == [1, 0, 1]


def sentencepiece_model(tmp_path, **options):
    corpus = tmp_path / "text.txt"
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(1, 7))) for _ in range(300)]
    lines = [" " * rng.randint(0, 2) + (" " * rng.randint(1, 2)).join(rng.choices(words, k=9)) for _ in range(500)]
    corpus.write_text("\n".join(lines))
    SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "m"),
        vocab_size=300,
        minloglevel=2,
        hard_vocab_limit=False,
        **options,
    )
    return SentencePieceProcessor(model_file=str(tmp_path / "m.model")), tmp_path / "m.model", lines


@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize("extra_spaces", [True, False])
@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_sentencepiece_words_are_its_own(tmp_path, model_type, extra_spaces, byte_fallback):
    options = {"byte_fallback": byte_fallback, "model_type": model_type, "remove_extra_whitespaces": not extra_spaces}
    processor, path, lines = sentencepiece_model(tmp_path, **options)
    backend = tokenizer.convert(path)
    for line in [*lines[:200], "\n".join(lines[:3]), "a\n  b\n c ", " ", "", "Ünï 漢字 🙂 a  b", "ﬁ ① trailing  "]:
        ids = backend.encode(line, add_special_tokens=False).ids
        assert ids == processor.encode(line), line
        if byte_fallback and extra_spaces and line:
            assert backend.decode(ids) == processor.decode(ids)


def test_a_sentencepiece_token_of_a_page_is_refused(tmp_path):
    """Its merges were looked for at each of its places: a file with a megabyte of it took many minutes."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.trainer_spec.model_type = 2
    for piece in ("<unk>", "a", "a" * 600):
        proto.pieces.add().piece = piece
    (tmp_path / "a.model").write_bytes(proto.SerializeToString())
    with pytest.raises(UserError, match=r"a.model has a token of 600 characters, and those of a SentencePiece model"):
        tokenizer.convert(tmp_path / "a.model")


def test_sentencepiece_in_a_run(load, tmp_path):
    _, path, _ = sentencepiece_model(tmp_path)
    loaded = load(f"tokenizer.path={path}")
    assert (loaded.vocab.bos_token, loaded.vocab.eos_token) == ("<s>", "</s>")
    path.write_bytes(b"no model")
    with pytest.raises(UserError, match="cannot be read as a SentencePiece model"):
        load(f"tokenizer.path={path}")


def test_special_tokens_in_a_text_are_broken_in_one_pass():
    backend = Tokenizer(models.WordLevel({"?": 0}, "?"))
    assert break_special_texts("a<b>", compile_special_texts(backend)) == "a<b>"
    names = ["[INST]", "<s>", "x" * 5000, *(f"<|reserved_special_token_{number}|>" for number in range(256))]
    backend.add_special_tokens([AddedToken(name) for name in names])
    backend.add_tokens(["<tool_call>"])
    special = compile_special_texts(backend)
    text = "a <s><tool_call>[INST] <|reserved_special_token_17|>\n<|reserved_special_token_|> " + names[2]
    expected = "a < s><tool_call>[ INST] < |reserved_special_token_17|>\n<|reserved_special_token_|> x " + names[2][1:]
    assert break_special_texts(text, special) == expected
    start_s = time.process_time()
    break_special_texts("<|" * 500_000, special)
    assert time.process_time() - start_s < 1, "one pass takes 0.03 s, one for each token 1.3 s"


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "rows"),
    [(128, "uint16", 128), (129, "uint16", 256), (2**16, "uint16", 2**16), (2**16 + 1, "uint32", 2**16 + 128)],
)
def test_numbers_of_tokens_have_room(num_tokens, dtype, rows):
    """On disk, and in a table."""
    vocab = tokenizer.train_vocab(compose([]).config.tokenizer.model_copy(update={"vocab_size": 300}), ["a few words"])
    vocab.__dict__["num_tokens"] = num_tokens
    assert vocab.dtype == dtype
    assert tokenizer.pad_rows(num_tokens) == rows
    tokenizer.check_fits(vocab, num_tokens)
    with pytest.raises(UserError, match=f"has {num_tokens} tokens, more than model.vocab_size={num_tokens - 1}"):
        tokenizer.check_fits(vocab, num_tokens - 1)


def test_an_exported_tokenizer_begins_texts_unless_it_adds_tokens_itself():
    vocab = tokenizer.train_vocab(compose([]).config.tokenizer.model_copy(update={"vocab_size": 300}), ["a few words"])
    (bos, *words) = vocab.with_bos().encode("a").ids
    assert bos == vocab.bos
    vocab.backend.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", vocab.eos)]
    )
    assert vocab.with_bos().encode("a").ids == [*words, vocab.eos]


def test_the_json_of_a_tokenizer_is_made_once():
    """Each save made it anew while training waited: seconds for 262,144 tokens."""
    vocab = Vocab(Mock(**{"to_str.return_value": '{"a": "\u00e9"}'}), None, "</s>", None)
    assert [vocab.as_json, vocab.as_json] == ['{"a": "\\u00e9"}'] * 2
    vocab.backend.to_str.assert_called_once_with()

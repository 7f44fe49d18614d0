"""Cut a long text into pieces whose tokens, one piece after the other, are the tokens of the whole text.

The library `tokenizers` needs more than 100 times the size of the text that it is given at a time. A text is cut only
where that provably changes no token; for which tokenizers and where is said at `find_cutter`.
"""

import base64
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a config is checked without it
    from tokenizers import Tokenizer as Backend

Part = dict[str, Any]  # of a tokenizer, as its JSON has it
PIECE = 1 << 17  # characters of a piece, at least
GROUP = 8  # pieces that are tokenized at a time

# Letters and digits that were in the first versions of Unicode: every library has them in the classes \p{L} and \p{N}.
ASCII = "0-9A-Za-z"
LETTERS = ASCII + "\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02af\u0391-\u03a1\u03b1-\u03c9\u0410-\u044f"
LETTERS += "\u05d0-\u05ea\u0621-\u063a\u0905-\u0939\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"

# Regular expressions that cut a text into words. In none of them does a match go on from a letter or a digit to white
# space, and none looks backwards: so a match ends and one begins between the two.
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}",  # Llama 3
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}",  # Qwen 2
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}",  # GPT-4o
}
# Normalizers that change a text character by character, as far as a cut between an ASCII letter and a space can tell.
LOCAL = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Precompiled"}


@dataclass(frozen=True)
class Cutter:
    """The positions where a text may be cut: behind the first character of each match of `positions`."""

    positions: re.Pattern[str]
    drops_space: bool = False  # the space at a cut is left out: the tokenizer puts one before each piece
    not_within: frozenset[str] = frozenset()  # pairs of characters that are not cut, since a special token has them

    def find(self, text: str, start: int) -> int | None:
        """Return the first place for a cut at or behind `start`; None if there is none."""
        for match in self.positions.finditer(text, start - 1):
            if text[match.start() : match.start() + 2] not in self.not_within:
                return match.start() + 1
        return None


def split_text(text: str, cutter: Cutter | None) -> Iterator[str]:
    """Yield the pieces of a text in order; without a cutter the whole text."""
    begin = 0
    while cutter is not None and len(text) - begin > PIECE:
        cut = cutter.find(text, begin + PIECE)
        if cut is None:
            break
        yield text[begin:cut]
        begin = cut + cutter.drops_space
    yield text[begin:] if begin else text


def count_bytes(text: str) -> int:
    """Return the bytes of a text in UTF-8, without a second copy of a long one. Raises `UnicodeEncodeError` where the
    text has half of a character in it."""
    return sum(len(text[begin : begin + PIECE].encode()) for begin in range(0, len(text), PIECE))


def find_max_piece_bytes(text: str, cutter: Cutter | None) -> int:
    """Return the bytes of the longest piece of a text."""
    return max(len(piece.encode()) for piece in split_text(text, cutter))


def find_cutter(backend: "Backend") -> Cutter | None:
    """Return where a tokenizer's texts may be cut; None if nothing proves that a cut changes no token.

    tokenizer                                         a text is cut
    BPE that has learnt no merge (a token a byte)     everywhere
    words by a regular expression of `WORDS`          between a letter or digit and white space
    words that begin at spaces (SentencePiece)        between a letter or digit and a space
    BPE without words (Gemma, Llama 2)                there too, where no token has such a pair of characters in it

    A normalizer must change each character by itself there, and no special token may lie across a cut.
    """
    info = json.loads(backend.to_str())
    if info["model"].get("dropout"):
        return None
    normalizers = _list_steps(info["normalizer"], "normalizers")
    words = _list_steps(info["pre_tokenizer"], "pretokenizers")
    pairs = set()
    for token in info["added_tokens"]:
        text = token["content"]
        # A cut near a special token might change it, if it takes the white space around it, depends on its neighbours,
        # or has a space behind a letter.
        if token["lstrip"] or token["rstrip"] or token["single_word"] or re.search(r"\w[\s▁]", text):
            return None
        pairs |= {text[at : at + 2] for at in range(len(text) - 1)}
    cutter = _find_by_words(info["model"], normalizers, words)
    return cutter and replace(cutter, not_within=frozenset(pairs))


def find_prefix(backend: "Backend") -> str | None:
    """Return where a tokenizer puts a space before a text: at its "start", or "each" time behind a special token, too.
    None: nowhere."""
    normalizers, words = (
        _list_steps(part and json.loads(part.__getstate__()), key)
        for part, key in ((backend.normalizer, "normalizers"), (backend.pre_tokenizer, "pretokenizers"))
    )
    if any(step["type"] == "Prepend" for step in normalizers):
        return "each"
    if any(step.get("prepend_scheme") == "always" or step.get("add_prefix_space") for step in words):
        return "each"
    return "start" if any(step.get("prepend_scheme") == "first" for step in words) else None


# Regular expressions of characters and classes: each match has a character, as far as their text tells.
AT_LEAST_ONE = re.compile(r"(?:[^*?{|(^$\\]|\\[pP]\{\w+\}|\\[dDsSwW])+")


def find_growth(backend: "Backend") -> int:
    """Return how many characters or tokens a tokenizer may make of one, in a text that it reads or writes.

    What Unicode's normal forms make of a character is not counted, at most 18.
    """
    parts = {"normalizers": backend.normalizer, "decoders": backend.decoder, "processors": backend.post_processor}
    steps = (_list_steps(part and json.loads(part.__getstate__()), key) for key, part in parts.items())
    return max(math.prod(map(_bound_step, each)) for each in steps)


def _bound_step(step: Part) -> int:
    """Return how many characters, or tokens, a step may make of one."""
    if step["type"] == "Replace":
        new, text = len(step["content"]), step["pattern"].get("String", "")
        if text or AT_LEAST_ONE.fullmatch(step["pattern"].get("Regex", "")):
            return max(1, math.ceil(new / max(1, len(text))))
        return new + 1  # it may stand before a character that stays
    if step["type"] == "Prepend":
        return 1 + len(step["prepend"])
    if step["type"] == "TemplateProcessing":
        special = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
        return 1 + sum(special[each["SpecialToken"]["id"]] for each in step["single"] if "SpecialToken" in each)
    if step["type"] == "Precompiled":  # the length of a trie, the trie, and the texts that it leads to
        data = base64.b64decode(step["precompiled_charsmap"])
        texts = data[4 + int.from_bytes(data[:4], "little") :].decode(errors="replace").split("\0")
        return max(1, *map(len, texts))
    return 1


def drop_prefix(backend: "Backend") -> "Backend":
    """Return a tokenizer that puts no space before a text."""
    from tokenizers import Tokenizer

    info = json.loads(backend.to_str())
    for step in _list_steps(info["pre_tokenizer"], "pretokenizers"):
        step |= {key: value for key, value in NO_PREFIX.items() if key in step}
    steps = _list_steps(info["normalizer"], "normalizers")
    # `convert` doubles a space at the beginning (\A), before which Metaspace would put none.
    kept = [step for step in steps if step["type"] != "Prepend" and step.get("pattern") != {"Regex": r"\A "}]
    info["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
    return Tokenizer.from_str(json.dumps(info))


NO_PREFIX = {"prepend_scheme": "never", "add_prefix_space": False}


def _list_steps(step: Part | None, key: str) -> list[Part]:
    """Return the steps of a normalizer or pre-tokenizer, those of a sequence one after the other."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [each for part in step[key] for each in _list_steps(part, key)]
    return [step]


def _find_by_words(model: Part, normalizers: list[Part], words: list[Part]) -> Cutter | None:
    kinds = [step["type"] for step in words]
    if kinds and kinds[-1] == "ByteLevel":
        return _find_in_bytes(model, normalizers, words)
    drops, before = any(step["type"] == "Prepend" for step in normalizers), ASCII
    if kinds == ["Metaspace"] and words[0]["split"]:
        drops = drops or words[0]["prepend_scheme"] != "never"
    elif model["type"] == "BPE" and _finds_no_words(words, normalizers):
        drops = drops or (kinds == ["Metaspace"] and words[0]["prepend_scheme"] != "never")
        before = _find_letters_before_space(model)
    else:
        return None
    if not before or not all(_is_local(step, drops) for step in normalizers):
        return None
    return Cutter(re.compile(rf"[{before}] (?=[{ASCII}])"), drops)


def _find_in_bytes(model: Part, normalizers: list[Part], words: list[Part]) -> Cutter | None:
    """Return the cutter of a tokenizer whose tokens are made of bytes."""
    has_prefix, regex = words[-1]["add_prefix_space"], words[-1]["use_regex"]
    if {step["type"] for step in normalizers} - {"NFC", "NFD", "NFKC", "NFKD"}:
        return None
    if model["type"] == "BPE" and not model["merges"] and not normalizers and not has_prefix:
        return Cutter(re.compile("(?s).(?=.)"))
    for step in words:  # each must end a word between a letter or digit and the white space behind it
        if step["type"] == "Split":
            if step["pattern"].get("Regex") not in WORDS or step["behavior"] not in ("Isolated", "Removed"):
                return None
        elif step["type"] not in ("ByteLevel", "Digits"):
            return None
    if not (regex or any(step["type"] == "Split" for step in words)):
        return None
    return _split_at_words(ASCII if normalizers else LETTERS, " " if has_prefix else r" \t\r\n")


def _split_at_words(letters: str, spaces: str) -> Cutter:
    return Cutter(re.compile(rf"[{letters}](?=[{spaces}])"))


TRAINED_HERE = _split_at_words(LETTERS, r" \t\r\n")  # what `train_vocab` learns from: GPT-2's words of each text


def _finds_no_words(words: list[Part], normalizers: list[Part]) -> bool:
    """Return whether the model gets its text as one word: nothing cuts it, or only at spaces, which are gone."""
    replaces = any(step["type"] == "Replace" and step["pattern"] == {"String": " "} for step in normalizers)
    return all(
        (step["type"] == "Metaspace" and not step["split"])
        or (step["type"] == "Split" and step["pattern"] == {"String": " "} and replaces)
        for step in words
    ) and (replaces or bool(words))


def _find_letters_before_space(model: Part) -> str:
    """Return the ASCII letters and digits that no token of a BPE has before a space (▁): no merge joins the two."""
    vocab = model["vocab"]
    odd = ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
    if any(model.get(key) for key in odd) or "▁" not in vocab:
        return ""
    joined = {token[at - 1] for token in vocab for at in [match.start() for match in re.finditer("▁", token)] if at}
    return "".join(c for c in map(chr, range(128)) if c.isalnum() and c in vocab and c not in joined)


def _is_local(step: Part, drops_space: bool) -> bool:
    """Return whether a normalizer gives the same for two pieces and for the whole. Where the space at a cut is dropped,
    a piece has no space at its ends: what changes spaces there changes nothing."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String") or step["pattern"].get("Regex")
        return pattern in (" ", " +", " {2,}") or (pattern == r"\A " and drops_space)
    if step["type"] == "Strip":
        return drops_space or not step["strip_left"]
    return step["type"] in LOCAL or (step["type"] == "Prepend" and drops_space)

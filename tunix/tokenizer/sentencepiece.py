"""Convert SentencePiece models (Kudo and Richardson 2018, arXiv:1808.06226) to the `tokenizers` library."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tunix.base.errors import UserError

UNIGRAM, BPE = 1, 2  # values of TrainerSpec.model_type
CONTROL, USER_DEFINED = 3, 4  # values of SentencePiece.type


def convert(path: Path) -> Tokenizer:
    """Return a tokenizer that gives the same tokens for the same text.

    It leaves out the tokens that SentencePiece can add before and after a text.

    Raises:
        UserError: the file is not a SentencePiece model, the model is neither unigram nor BPE, or the library is not
            installed.
    """
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError:
        raise UserError(f"tokenizer.path={path} needs sentencepiece: pip install 'tunix-trainer[hf]'") from None
    proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
        proto.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's own error, whose module differs between versions
        raise UserError(f"tokenizer.path={path} cannot be read as a SentencePiece model: {error}") from None
    spec = proto.trainer_spec
    if spec.model_type not in (UNIGRAM, BPE):
        raise UserError(f"tokenizer.path={path} is a SentencePiece model of words or characters; unigram and BPE work")
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    model: models.Model
    if spec.model_type == UNIGRAM:
        model = models.Unigram(pieces, spec.unk_id, spec.byte_fallback)
    else:
        numbers = {piece: number for number, (piece, _) in enumerate(pieces)}
        model = models.BPE(
            numbers, _find_merges(proto), unk_token=spec.unk_piece, fuse_unk=True, byte_fallback=spec.byte_fallback
        )
    backend = Tokenizer(model)
    steps: list[normalizers.Normalizer] = []
    if proto.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap))  # NFKC and its like
    if proto.normalizer_spec.remove_extra_whitespaces:
        # One space before the text stays where Metaspace would put one.
        left = not proto.normalizer_spec.add_dummy_prefix
        steps += [normalizers.Replace(Regex(" +"), " "), normalizers.Strip(left=left, right=True)]
    elif proto.normalizer_spec.add_dummy_prefix:
        steps.append(normalizers.Replace(Regex(r"\A "), "  "))  # Metaspace puts no space before one
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    scheme = "first" if proto.normalizer_spec.add_dummy_prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=spec.split_by_whitespace)
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme), decoders.Fuse()]
    )
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        tokens = [AddedToken(p.piece, normalized=False, special=special) for p in proto.pieces if p.type == kind]
        (backend.add_special_tokens if special else backend.add_tokens)(tokens)
    return backend


def _find_merges(proto: Any) -> list[tuple[str, str]]:
    """Return the pairs of tokens that BPE merges, the first learnt first.

    A SentencePiece file has no list of merges. A token's score is minus the number of the merge that made it, so every
    split of a token into two other tokens is a merge, in the order of the scores.
    """
    numbers = {piece.piece: number for number, piece in enumerate(proto.pieces) if piece.type != CONTROL}
    merges = []
    for piece in proto.pieces:
        for cut in range(1, len(piece.piece)):
            left, right = piece.piece[:cut], piece.piece[cut:]
            if left in numbers and right in numbers:
                merges.append((-piece.score, numbers[left], numbers[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]

"""Tokenizes texts as SentencePiece does (arXiv:1808.06226), with the `tokenizers` library.

Transformers' classes bring the ids, the special tokens, and the tokens around a text. Most of them split texts by other
rules: merges go by id and not by score, a space before the first word is lost, and white space and symbols are
not treated as the file says.
"""

import importlib
import json
import re
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from quire.frontend.checkpoint.piece_merges import merges_by_score

_SPACE = "▁"
_NORMAL, _USER_DEFINED = 1, 4
_BPE, _UNIGRAM = 2, 1
_LONGEST_BYTE = len("<0xFF>")


@dataclass(frozen=True)
class PieceFile:
    """A model of SentencePiece.

    Attributes:
        scores: of each piece that texts are cut into.
        user_defined: those that are found before a text is cut.
        normalizer: its settings, as sentencepiece_model.proto names them.
    """

    is_bpe: bool
    byte_fallback: bool
    unknown: str
    scores: dict[str, float]
    user_defined: frozenset[str]
    normalizer: Any

    @classmethod
    def read(cls, path: Path) -> "PieceFile | None":
        """The model in the file; None if it cuts texts into words or characters.

        Raises:
            google.protobuf.message.DecodeError: the file is of another format.
        """
        messages: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")  # optional, and untyped
        content = messages.ModelProto.FromString(path.read_bytes())
        trainer = content.trainer_spec
        if trainer.model_type not in (_BPE, _UNIGRAM):
            return None
        return cls(
            is_bpe=trainer.model_type == _BPE,
            byte_fallback=trainer.byte_fallback,
            unknown=content.pieces[trainer.unk_id].piece,
            scores={piece.piece: piece.score for piece in content.pieces if piece.type in (_NORMAL, _USER_DEFINED)},
            user_defined=frozenset(piece.piece for piece in content.pieces if piece.type == _USER_DEFINED),
            normalizer=content.normalizer_spec,
        )


def cut_as(
    file: PieceFile, made: tokenizers.Tokenizer, *, named: Container[str], adds_prefix: bool
) -> tokenizers.Tokenizer:
    """The tokenizer `made`, which Transformers made of `file`, with texts cut as SentencePiece cuts them.

    Args:
        named: tokens that are found in a text before it is normalized, though the file has them as symbols.
        adds_prefix: whether a text may get the space before its first word that the file asks for.
    """
    state = json.loads(made.to_str())
    state["added_tokens"] = [
        token
        for token in state["added_tokens"]
        if token["special"] or token["content"] in named or token["content"] not in file.user_defined
    ]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))
    prefix = _prefix_scheme(state) if file.normalizer.add_dummy_prefix and adds_prefix else None
    vocabulary = made.get_vocab(with_added_tokens=False)
    if file.is_bpe:
        tokenizer.model = _byte_pairs(file, vocabulary)
    else:
        tokenizer.model = _unigrams(file, sorted(vocabulary, key=vocabulary.__getitem__), state["model"].get("unk_id"))
    tokenizer.normalizer = _normalizer(file, prefix)
    tokenizer.pre_tokenizer = _pre_tokenizer(file, prefix)
    tokenizer.decoder = _decoder(file, prefix)
    return tokenizer


def _prefix_scheme(state: dict[str, Any]) -> str:
    """Finds whether a space begins each part of a text between special tokens, or the first alone, as in the class."""
    steps = [state["normalizer"] or {}, state["pre_tokenizer"] or {}]
    steps += [inner for step in steps for inner in step.get("pretokenizers", step.get("normalizers", []))]
    is_always = any(step.get("type") == "Prepend" or step.get("prepend_scheme") == "always" for step in steps)
    return "always" if is_always else "first"


def _byte_pairs(file: PieceFile, vocabulary: dict[str, int]) -> models.BPE:
    symbols = file.user_defined
    known = {piece: score for piece, score in file.scores.items() if piece in vocabulary and piece not in symbols}
    return models.BPE(
        vocabulary,
        merges_by_score(known.items(), known),
        unk_token=file.unknown if file.unknown in vocabulary else None,
        fuse_unk=True,
        byte_fallback=file.byte_fallback,
        ignore_merges=bool(file.user_defined),
    )


def _unigrams(file: PieceFile, pieces: list[str], unknown_id: int | None) -> models.Unigram:
    never = _LONGEST_BYTE * min(file.scores.values(), default=0.0) - 1.0  # less than the piece's characters have
    return models.Unigram(
        [(piece, file.scores.get(piece, never)) for piece in pieces],
        pieces.index(file.unknown) if file.unknown in pieces else unknown_id,
        file.byte_fallback,
    )


def _normalizer(file: PieceFile, prefix: str | None) -> normalizers.Normalizer:
    rules = file.normalizer
    steps: list[normalizers.Normalizer] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(rf"[ {_SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        if prefix != "first":
            steps.append(normalizers.Replace(Regex(r"\A "), ""))
    if prefix == "always":
        steps.append(normalizers.Prepend(_SPACE))
    if prefix == "first" and rules.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"(?<=[\s\S]) "), _SPACE))  # one that begins a text is the prefix
    elif rules.escape_whitespaces:
        steps.append(normalizers.Replace(" ", _SPACE))
    return normalizers.Sequence(steps)


def _pre_tokenizer(file: PieceFile, prefix: str | None) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if prefix == "first":
        # The step leaves the prefix out where a text begins with one: spaces are marks by then, so none does.
        steps += [
            pre_tokenizers.Metaspace(" ", "first", split=False),
            pre_tokenizers.Metaspace(_SPACE, "never", split=False),
        ]
    if file.user_defined and file.is_bpe:
        longest_first = sorted(file.user_defined, key=len, reverse=True)
        steps.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated"))
    return pre_tokenizers.Sequence(steps)


def _decoder(file: PieceFile, prefix: str | None) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " ")]
    if file.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if prefix is not None or file.normalizer.remove_extra_whitespaces:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)

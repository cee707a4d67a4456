"""The tokenizer in a GGUF file's metadata, as tokenizer.json and tokenizer_config.json.

Made with the `tokenizers` library alone. `tokenizer.ggml.model` says how texts are cut into tokens: `gpt2` merges
bytes in the order of `merges`, after a split that `pre` names; `llama` is SentencePiece's BPE, which merges what makes
the token of the best score; `gemma4` is the same with `merges` in place of scores.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from quire.core.errors import ConfigError
from quire.frontend.checkpoint.gguf.splits import ADDS_BOS, IGNORES_MERGES, NORMALISED, SPLITS
from quire.frontend.checkpoint.gguf.vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Vocabulary
from quire.frontend.checkpoint.piece_merges import merges_by_score

_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def make_tokenizer(path: str, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `metadata` describe.

    Raises:
        ConfigError: there is none, or one of another kind.
    """
    fields = Vocabulary(path, metadata)
    makers = {"gpt2": _byte_level, "llama": _sentence_pieces, "gemma4": _sentence_pieces}
    if fields.kind not in makers or not fields.tokens:
        raise ConfigError(
            f"{path} has a tokenizer of the kind {fields.kind!r}; {', '.join(makers)} are read. Name the "
            "tokenizer of the original checkpoint with --tokenizer, or use --skip-tokenizer-init."
        )
    if len(fields.types) != len(fields.tokens):
        raise ConfigError(f"{path}: {len(fields.types)} token types for {len(fields.tokens)} tokens. Convert it again.")
    if len(set(fields.tokens)) != len(fields.tokens):
        raise ConfigError(f"{path}: tokenizer.ggml.tokens has a token twice. Convert it again.")
    try:
        tokenizer = makers[fields.kind](fields)
    except ConfigError:
        raise
    except Exception as error:  # the library has no class of its own for a vocabulary that lacks a merge's parts
        raise ConfigError(
            f"{path}: its tokenizer is damaged ({error}). Name that of the original checkpoint with --tokenizer."
        ) from None
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in fields.of_type(CONTROL)]
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in fields.of_type(USER_DEFINED)])
    _add_ends(tokenizer, fields)
    return tokenizer


def make_tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json: the named tokens and the chat templates."""
    fields = Vocabulary("", metadata)
    named = {name: fields.token(role) for name, role in _NAMED.items()}
    config: dict[str, Any] = {name: token for name, token in named.items() if token is not None}
    template, prefix = metadata.get("tokenizer.chat_template"), "tokenizer.chat_template."
    others = {name.removeprefix(prefix): text for name, text in metadata.items() if name.startswith(prefix)}
    if others:
        every = {"default": template, **others} if template else others
        config["chat_template"] = [{"name": name, "template": text} for name, text in every.items()]
    elif template:
        config["chat_template"] = template
    return config


def make_generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json: the ends of an answer, and sampling parameters if the file recommends some."""
    ends = Vocabulary("", metadata).ends
    sampling = {
        "temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
        "repetition_penalty": "penalty_repeat",
    }  # fmt: skip
    given = {ours: metadata.get(f"general.sampling.{theirs}") for ours, theirs in sampling.items()}
    return {"eos_token_id": sorted(ends), **{name: value for name, value in given.items() if value is not None}}


# --------------------------------------------------------------------------------------------------------------- kinds


def _byte_level(fields: Vocabulary) -> Tokenizer:
    if fields.pre not in SPLITS:
        raise ConfigError(
            f"{fields.path}: texts are split as {fields.pre!r} says (tokenizer.ggml.pre), which is not known. Name the "
            "tokenizer of the original checkpoint with --tokenizer."
        )
    merges = [_pair(merge) for merge in fields.need("merges")]
    vocabulary = {token: index for index, token in enumerate(fields.tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=fields.pre in IGNORES_MERGES))
    if fields.pre in NORMALISED:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in SPLITS[fields.pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge[1:].partition(" ")  # the first character may be a space itself
    return merge[0] + left, right


def _sentence_pieces(fields: Vocabulary) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(fields.tokens)}
    if fields.kind == "gemma4":
        merges = [_pair(merge) for merge in fields.need("merges")]
    else:
        merges = _merges_by_score(fields, vocabulary)
    unknown = next(iter(fields.of_type(UNKNOWN)), None)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=bool(fields.of_type(BYTE)))
    )
    has_prefix = fields.get("add_space_prefix", fields.kind == "llama")
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if has_prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


def _merges_by_score(fields: Vocabulary, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    scores: list[float] = fields.get("scores") or [-float(index) for index in range(len(fields.tokens))]
    whole = [
        (token, scores[index])
        for index, (token, kind) in enumerate(zip(fields.tokens, fields.types, strict=True))
        if kind not in (UNKNOWN, CONTROL, USER_DEFINED, BYTE)
    ]
    return merges_by_score(whole, vocabulary)


def _add_ends(tokenizer: Tokenizer, fields: Vocabulary) -> None:
    """Makes texts begin with BOS and end with EOS, if the file says so or llama.cpp does so for its kind."""
    adds_bos = fields.get("add_bos_token", fields.kind != "gpt2" or fields.pre in ADDS_BOS)
    # Files of Gemma 4 were made that deny it, and llama.cpp adds it all the same.
    bos = fields.token("bos") if adds_bos or fields.kind == "gemma4" else None
    eos = fields.token("eos") if fields.get("add_eos_token", False) else None
    if bos is None and eos is None:
        return
    template = " ".join([*([bos] if bos else []), "$A", *([eos] if eos else [])])
    ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)

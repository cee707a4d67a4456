"""Tokens of GGUF files: which end an answer, begin a text or are marks, by llama.cpp's own answers for such files."""

from typing import Any

import pytest

from quire.frontend.checkpoint.gguf.tokenizer import make_generation_config, make_tokenizer, make_tokenizer_config
from quire.frontend.text.pieces import symbols_of_bytes

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["<unk>", "<s>", "</s>", *"abcdefgh", "▁", "ab", "▁ab"]
GEMMA4 = ["<pad>", "<eos>", "<bos>", *"abcdefgh", "▁", "ab", "<|tool_response>", "</s>", "<turn|>"]


def metadata_of(kind: str, tokens: list[str], types: list[int] | None, **fields: Any) -> dict[str, Any]:
    values = {"model": kind, "tokens": tokens, "merges": ["a b"], "token_type": types, **fields}
    return {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None}


def sentence_pieces(*more: str, kind: int = NORMAL, **fields: Any) -> dict[str, Any]:
    types = [2, CONTROL, CONTROL, *[NORMAL] * (len(PIECES) - 3), *[kind] * len(more), *[6] * 256]
    return metadata_of("llama", [*PIECES, *more, *BYTES], types, **fields)


def ends_of(metadata: dict[str, Any]) -> list[str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return [tokens[index] for index in make_generation_config(metadata)["eos_token_id"]]


def specials_of(metadata: dict[str, Any]) -> set[str]:
    added = make_tokenizer("x.gguf", metadata).get_added_tokens_decoder().values()
    return {token.content for token in added if token.special}


FIRST = len(PIECES)
SOLAR = ["<|end|>", "<|calls|>", "<|flush|>"]
LISTED = [
    "[EOS]", "[e~[", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "_<EOT>", "[EOT]", "<EOT>", "<|end_of_text|>",
    "<|eom_id|>", "<|endoftext|>", "<end_of_turn>",
]  # fmt: skip


@pytest.mark.parametrize(
    ("metadata", "ends"),
    [
        (sentence_pieces(), ["</s>"]),
        (sentence_pieces("<|im_end|>", "<|eot_id|>"), ["</s>", "<|im_end|>", "<|eot_id|>"]),
        (sentence_pieces("<|im_end|>", "<|end|>", kind=USER_DEFINED), ["</s>", "<|im_end|>", "<|end|>"]),
        (sentence_pieces(*LISTED, "<|end_of_role|>"), ["</s>", *LISTED]),
        (sentence_pieces("<|end|>", "<|return|>", "<|call|>", kind=CONTROL), ["</s>", "<|return|>", "<|call|>"]),
        (
            sentence_pieces("<|end|>", "<|return|>", "<|calls|>", eos_token_id=FIRST),
            ["</s>", "<|return|>", "<|calls|>"],
        ),
        (sentence_pieces(*SOLAR, kind=CONTROL), ["</s>", *SOLAR[1:]]),
        (sentence_pieces("<|end|>", "<|return|>", kind=CONTROL), ["</s>", "<|end|>", "<|return|>"]),
        (sentence_pieces("<|end|>", "<|flush|>", kind=CONTROL), ["</s>", "<|end|>", "<|flush|>"]),
        (sentence_pieces("<turn|>", "<|tool_response>", eos_token_id=FIRST), ["<turn|>", "<|tool_response>"]),
        (
            sentence_pieces("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>"),
            ["</s>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"],
        ),
        (sentence_pieces("<PAD>", fim_pad_token_id=3, fim_rep_token_id=4, fim_sep_token_id=5), ["</s>", "a", "b", "c"]),
        (sentence_pieces(eot_token_id=5, eom_token_id=6), ["</s>", "c", "d"]),
        (sentence_pieces(eos_token_id=2**32 - 1), ["</s>"]),
        (sentence_pieces("[PAD]"), ["</s>", "[PAD]"]),
    ],
)
def test_ends_are_those_of_llama_cpp(metadata: dict[str, Any], ends: list[str]) -> None:
    assert ends_of(metadata) == [token for token in metadata["tokenizer.ggml.tokens"] if token in ends]


def test_ends_are_marks_and_no_text() -> None:
    """Whatever type the file gives them, but for tokens that are like them and are none."""
    names = ["<|im_end|>", "<|fim_prefix|>", "<|file_sep|>"]
    assert specials_of(sentence_pieces(*names, "<|im_start|>")) == {"<s>", "</s>", *names}
    types = [CONTROL] * 3 + [NORMAL] * 10 + [CONTROL, CONTROL, NORMAL] + [6] * 256
    gemma = metadata_of("gemma4", [*GEMMA4, *BYTES], types)
    assert specials_of(gemma) == {"<pad>", "<eos>", "<bos>", "<|tool_response>", "<turn|>"}


@pytest.mark.parametrize("types", [None, [2, CONTROL, CONTROL, *[NORMAL] * (len(PIECES) - 3), *[6] * 256]])
def test_sentence_pieces_without_ids_have_their_usual_ones(types: list[int] | None) -> None:
    metadata = metadata_of("llama", [*PIECES, *BYTES], types, scores=[0.0] * (len(PIECES) + 256))
    assert make_tokenizer("x.gguf", metadata).encode("ab").tokens == ["<s>", "▁ab"]
    named = make_tokenizer_config(metadata)
    assert named == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert ends_of(metadata) == ["</s>"]


@pytest.mark.parametrize("says", [True, False, None])
def test_texts_for_gemma_4_begin_with_its_mark_whatever_the_file_says(says: bool | None) -> None:
    types = [CONTROL] * 3 + [NORMAL] * 10 + [CONTROL, NORMAL, CONTROL] + [6] * 256
    metadata = metadata_of("gemma4", [*GEMMA4, *BYTES], types, bos_token_id=2, eos_token_id=1, add_bos_token=says)
    assert make_tokenizer("x.gguf", metadata).encode("ab").tokens == ["<bos>", "ab"]
    assert ends_of(metadata) == ["<eos>", "<|tool_response>", "<turn|>"]


@pytest.mark.parametrize(
    ("text", "kind", "ends"), [("<|endoftext|>", CONTROL, True), ("x", CONTROL, True), ("x", 1, False)]
)
def test_bytes_without_ids_end_where_falcon_does_if_that_is_a_mark(text: str, kind: int, ends: bool) -> None:
    symbols = list(symbols_of_bytes())
    symbols[11:11] = [text if kind == CONTROL else "zz"]
    types = [NORMAL] * 11 + [kind] + [NORMAL] * 245
    assert ends_of(metadata_of("gpt2", symbols, types, pre="gpt-2")) == ([text] if ends else [])


def test_empty_tokens_have_names_of_their_own() -> None:
    metadata = sentence_pieces("", "")
    tokenizer = make_tokenizer("x.gguf", metadata)
    assert [tokenizer.id_to_token(FIRST + index) for index in range(2)] == [f"[EMPTY_{FIRST}]", f"[EMPTY_{FIRST + 1}]"]

"""Tokenizers that are made of SentencePiece's files give SentencePiece's own ids and texts."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.frontend.checkpoint.gguf.tokenizer import make_tokenizer
from quire.frontend.text.tokenizer import Tokenizer
from tests.frontend.text.test_conversion import sentence_pieces

sentencepiece = pytest.importorskip("sentencepiece")

CODE = "class A:\n    def f(self, x):\n\treturn  x == 1   # double  spaces\n\n\n        if x:\n            y   =    2\n"
TEXTS = [
    "Hello, world!", "the  quick brown fox, 1234567 times", " leading", "trailing  ", "   ", "     x",
    "class A:\n    def f(self, x):\n\treturn x  + 1\n\n",
    "你好，世界 привет ñandú مرحبا नमस्ते 안녕하세요", "👩‍👩‍👧 🙂🙂 é\u0301", "a▁b ▁ c", "▁x", "ﬁne ①②  Ｆｕｌｌ　wide",
    "a\u0000b\u200b",
    "a<sep>b <sep> é<sep>", "<0x41> is a byte", "",
]  # fmt: skip
RUNS = [CODE, "aaaa bbbbb ---- ======= ))) }}}}}", "-" * 40, "x" + " " * 31 + "y", CODE.replace(" ", "  ")]
PLAIN: dict[str, Any] = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {**PLAIN, "byte_fallback": True, "split_digits": True, "allow_whitespace_only_pieces": True},
    "no prefix": {**PLAIN, "byte_fallback": True, "add_dummy_prefix": False, "allow_whitespace_only_pieces": True},
    "no bytes": {**PLAIN},
    "nfkc": {"normalization_rule_name": "nmt_nfkc", "byte_fallback": True},
    "nfkc, no prefix": {"normalization_rule_name": "nmt_nfkc", "add_dummy_prefix": False},
    "identity, no extra spaces": {"normalization_rule_name": "identity", "byte_fallback": True},
    "symbols": {**PLAIN, "byte_fallback": True, "user_defined_symbols": ["<sep>", "é", "▁▁▁▁"]},
    "symbols, no prefix": {"add_dummy_prefix": False, "byte_fallback": True, "user_defined_symbols": ["<sep>", "é"]},
}
CLASSES = [
    "LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "TokenizersBackend", "T5Tokenizer", "XLNetTokenizer",
    "XLMRobertaTokenizer", "MBartTokenizer", "NllbTokenizer", "CamembertTokenizer", "BigBirdTokenizer",
    "DebertaV2Tokenizer", "RemBertTokenizer", "ReformerTokenizer", "SeamlessM4TTokenizer",
]  # fmt: skip


def train(folder: Path, name: str = "tokenizer.model", **options: Any) -> Any:
    """SentencePiece's own processor of a model in `folder`, which learnt runs of spaces and signs, too."""
    runs = [*[" " * n + "x = 1" for n in range(2, 13)], "-" * 12, "=" * 9, "aaaa", "))) }}}", "a < b > 0x41", CODE]
    sentence_pieces(folder / name, more=runs, character_coverage=1.0, **options)
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / name))


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_ids_and_texts_are_those_of_the_library(model_type: str, settings: str, tmp_path: Path) -> None:
    library = train(tmp_path, model_type=model_type, vocab_size=500, **SETTINGS[settings])
    tokenizer = Tokenizer.from_folder(tmp_path)
    # Unigrams of equal sums come in any order: the libraries round them differently.
    for text in [*TEXTS, *(RUNS if model_type == "bpe" else [])]:
        token_ids = library.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == token_ids, text
        if library.unk_id() not in token_ids and not text.startswith("▁"):
            assert tokenizer.decode(token_ids) == library.decode(token_ids)


def test_a_gguf_file_of_the_pieces_gives_the_same_ids(tmp_path: Path) -> None:
    """As in llama.cpp, whose algorithm is SentencePiece's."""
    library = train(tmp_path, model_type="bpe", vocab_size=500, **SETTINGS["llama"])
    ids = range(library.get_piece_size())
    types = [
        2 if library.is_unknown(i) else 3 if library.is_control(i) else 6 if library.is_byte(i) else 1 for i in ids
    ]
    tokenizer = make_tokenizer("x.gguf", {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [library.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [library.get_score(i) for i in ids], "tokenizer.ggml.token_type": types,
    })  # fmt: skip
    for text in [*TEXTS, *RUNS]:
        assert tokenizer.encode(text, add_special_tokens=False).ids == library.encode(text)


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_its_own_ids_of_the_same_pieces(name: str, tmp_path: Path) -> None:
    import transformers

    file = getattr(transformers, name).vocab_files_names.get("vocab_file", "tokenizer.model")
    ends: dict[str, Any] = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1} if name == "T5Tokenizer" else {}
    library = train(
        tmp_path, file if file.endswith(".model") else "tokenizer.model",
        model_type="unigram", vocab_size=450, byte_fallback=True, **PLAIN, **ends,
    )  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in (text for text in TEXTS if "<sep>" not in text):  # a special token of some
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert [tokenizer.token(each) for each in token_ids] == library.encode(text, out_type=str)


@pytest.mark.parametrize("legacy", [True, False])
def test_a_part_between_special_tokens_begins_with_a_space_as_the_configuration_says(
    legacy: bool, tmp_path: Path
) -> None:
    library = train(tmp_path, model_type="bpe", vocab_size=420, **SETTINGS["llama"])
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": legacy, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    after = library.encode("fox  x") if legacy else library.encode("\nfox  x")[2:]
    assert tokenizer.encode("the</s>fox  x") == [1, *library.encode("the"), 2, *after]


def test_the_configuration_may_leave_the_space_before_a_text_out(tmp_path: Path) -> None:
    library = train(tmp_path, model_type="bpe", vocab_size=420, **SETTINGS["llama"])
    config = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    token_ids = Tokenizer.from_folder(tmp_path).encode("fox  x", add_special_tokens=False)
    assert token_ids == library.encode("\nfox  x")[2:]


def test_a_symbol_that_the_configuration_calls_special_is_special(tmp_path: Path) -> None:
    library = train(tmp_path, model_type="bpe", vocab_size=420, **SETTINGS["symbols"])
    number = library.piece_to_id("<sep>")
    added = {str(number): {"content": "<sep>", "special": True}}
    config = {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("<sep>", add_special_tokens=False) == [number]
    assert tokenizer.special_token_ids >= {number}
    assert tokenizer.decode([number]) == ""

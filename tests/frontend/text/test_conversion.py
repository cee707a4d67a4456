"""Tokenizers without a tokenizer.json, against the libraries that their files belong to."""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ConfigError
from quire.frontend.text import conversion
from quire.frontend.text.token_stream import open_stream
from quire.frontend.text.tokenizer import Tokenizer
from tests.frontend.text import tokenizers_zoo

TEXTS = [
    "Hello, world!", "the  quick brown fox, 1234567 times", "你好，世界 привет ñandú", "👩‍👩‍👧 🙂🙂 é\u0301",
    "def f(x):\n\treturn x  + 1\n\n\n\tend", "a\u0000b \u200b\ufeff", "",
]  # fmt: skip
TEKKEN_PATTERN = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # noqa: E501
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
NUM_SPECIAL = 10


def sentence_pieces(path: Path, more: Sequence[str] = (), **options: Any) -> Path:
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    pytest.importorskip("google.protobuf")
    model = io.BytesIO()
    trainer.train(
        sentence_iterator=iter([*tokenizers_zoo.CORPUS, *more] * 20), model_writer=model, hard_vocab_limit=False,
        minloglevel=2, **options,
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    return path.parent


def llama(folder: Path) -> Path:
    return sentence_pieces(
        folder / "tokenizer.model", model_type="bpe", vocab_size=420, byte_fallback=True, split_digits=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
    )  # fmt: skip


def ranks() -> list[bytes]:
    """Tokens of a byte-level vocabulary by rank: the bytes in their order, then what merges make."""
    model = json.loads(tokenizers_zoo.byte_level().to_str())["model"]
    symbols = _symbols()
    merged = [bytes(symbols[c] for c in a + b) for a, b in model["merges"]]
    return [bytes([byte]) for byte in range(256)] + merged


def _symbols() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {symbol: byte for byte, symbol in bytes_to_unicode().items()}


def tiktoken_file(path: Path) -> Path:
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks())))
    return path.parent


def tekken(folder: Path) -> Path:
    tokens = ranks()
    content = {
        "config": {
            "pattern": TEKKEN_PATTERN, "num_vocab_tokens": len(tokens), "default_vocab_size": len(tokens) + NUM_SPECIAL,
            "default_num_special_tokens": NUM_SPECIAL, "version": "v3",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [{"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(SPECIAL)],
    }  # fmt: skip
    (folder / "tekken.json").write_text(json.dumps(content))
    return folder


def check_streams(tokenizer: Tokenizer) -> None:
    """Text that arrives token by token is the text of all tokens."""
    for text in TEXTS:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        stream = open_stream(tokenizer)
        assert "".join(map(stream.push, token_ids)) + stream.flush() == tokenizer.decode(token_ids)


def check_against(theirs: Any, tokenizer: Tokenizer) -> None:
    """Ids and texts are those of one of Transformers' tokenizers."""
    for text in [*TEXTS, "<s>in</s> <|im_end|>"]:
        token_ids = theirs.encode(text)
        assert tokenizer.encode(text) == token_ids
        assert tokenizer.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=True)
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == theirs.decode(token_ids)
    check_streams(tokenizer)


@pytest.mark.parametrize("says", ["nothing", "tokenizer_config.json", "config.json"])
def test_sentence_pieces_of_llama(says: str, tmp_path: Path) -> None:
    from transformers import LlamaTokenizer

    folder = llama(tmp_path)
    if says == "tokenizer_config.json":
        config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
        (folder / says).write_text(json.dumps(config))
    elif says == "config.json":
        (folder / says).write_text(json.dumps({"model_type": "llama"}))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.kind == "byte_fallback"
    assert tokenizer.special_tokens["eos_token"] == "</s>"
    check_against(LlamaTokenizer.from_pretrained(folder), tokenizer)


def test_they_are_the_ids_of_the_library_itself(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokenizer = Tokenizer.from_folder(folder)
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False) == library.encode(text)
        assert tokenizer.decode(library.encode(text)) == library.decode(library.encode(text)) == text


def test_added_tokens_stand_in_files_of_their_own(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = llama(tmp_path)
    size = Tokenizer.from_folder(folder).vocab_size
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_start|>": size, "<|im_end|>": size + 1}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>", "bos_token": "<s>"}))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_id == size + 1
    check_against(AutoTokenizer.from_pretrained(folder), tokenizer)


def test_sentence_pieces_of_t5(tmp_path: Path) -> None:
    from transformers import T5Tokenizer

    folder = sentence_pieces(
        tmp_path / "spiece.model", model_type="unigram", vocab_size=120, pad_id=0, eos_id=1, unk_id=2, bos_id=-1
    )
    with pytest.raises(ConfigError, match=r"of which kind the tokenizer spiece.model is: put a tokenizer_config.json"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer"}))
    check_against(T5Tokenizer.from_pretrained(folder), Tokenizer.from_folder(folder))


def test_tiktoken_files(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    from transformers.convert_slow_tokenizer import TikTokenConverter

    tokenizer = Tokenizer.from_folder(tiktoken_file(tmp_path / "tokenizer.model"))
    library = tiktoken.Encoding(
        "test", pat_str=TikTokenConverter().pattern, mergeable_ranks={t: i for i, t in enumerate(ranks())},
        special_tokens={},
    )  # fmt: skip
    for text in TEXTS:
        assert tokenizer.encode(text) == library.encode(text)
        assert tokenizer.decode(library.encode(text)) == text
    assert tokenizer.kind == "byte_level"
    check_streams(tokenizer)


def test_tiktoken_files_with_special_tokens(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    size = len(ranks())
    added = {str(size + 2): {"content": "<|eot|>", "special": True}}
    config = {"tokenizer_class": "TokenizersBackend", "eos_token": "<|eot|>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tiktoken_file(tmp_path / "tokenizer.model"))
    assert tokenizer.eos_token_id == size + 2
    assert tokenizer.encode("a<|eot|>")[-1] == size + 2
    assert tokenizer.decode([size + 2]) == ""


@pytest.mark.parametrize("has_tokenizer_json", [False, True])
def test_tekken(has_tokenizer_json: bool, tmp_path: Path) -> None:
    folder = tekken(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    if has_tokenizer_json:
        tokenizers_zoo.save(tokenizers_zoo.word_piece(), folder)
    tokenizer = Tokenizer.from_folder(folder, "mistral" if has_tokenizer_json else "auto")
    tokens = ranks()
    assert tokenizer.vocab_size == len(tokens) + NUM_SPECIAL
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.kind == "byte_level"
    for text in TEXTS:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(tokens[token_id - NUM_SPECIAL] for token_id in token_ids) == text.encode()
        assert tokenizer.decode(token_ids) == text
    check_streams(tokenizer)


def test_tekken_against_mistral_common(tmp_path: Path) -> None:
    library = pytest.importorskip("mistral_common.tokens.tokenizers.tekken").Tekkenizer.from_file(
        str(tekken(tmp_path) / "tekken.json")
    )
    tokenizer = Tokenizer.from_folder(tmp_path, "mistral")
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False) == library.encode(text, bos=False, eos=False)


def test_mistral_mode_needs_tekken(tmp_path: Path) -> None:
    tokenizers_zoo.save(tokenizers_zoo.byte_level(), tmp_path)
    with pytest.raises(ConfigError, match=r"--tokenizer-mode mistral reads tekken.json.*use --tokenizer-mode auto"):
        Tokenizer.from_folder(tmp_path, "mistral")


def test_slow_mode_converts_what_is_beside_tokenizer_json(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    expected = Tokenizer.from_folder(folder)
    tokenizers_zoo.save(tokenizers_zoo.word_piece(), folder)
    slow = Tokenizer.from_folder(folder, "slow")
    assert Tokenizer.from_folder(folder).encode(TEXTS[0]) != expected.encode(TEXTS[0])
    assert [slow.encode(text) for text in TEXTS] == [expected.encode(text) for text in TEXTS]
    (folder / "tokenizer.model").unlink()
    with pytest.raises(ConfigError, match=r"--tokenizer-mode slow converts .*; use --tokenizer-mode auto"):
        Tokenizer.from_folder(folder, "slow")


def test_byte_pairs_of_two_text_files(tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    model = json.loads(tokenizers_zoo.byte_level().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, model["merges"])]) + "\n")
    names = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<pad>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.kind == "byte_level"
    assert tokenizer.special_tokens["eos_token"] == "</s>"
    theirs = GPT2Tokenizer.from_pretrained(tmp_path, **names)
    check_against(theirs, tokenizer)


def test_word_pieces_of_a_text_file(tmp_path: Path) -> None:
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", ",", "world", "the", "quick", "f", "##ox", "!"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    check_against(BertTokenizer.from_pretrained(tmp_path), Tokenizer.from_folder(tmp_path))


@pytest.mark.parametrize(("package", "said"), [("sentencepiece", "sentencepiece"), ("google.protobuf", "protobuf")])
def test_a_missing_package_is_named(package: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    monkeypatch.setattr(conversion, "_is_installed", lambda name: name != package)
    with pytest.raises(ConfigError, match=rf"needs {said}.*pip install 'quire\[tokenizers\]'"):
        Tokenizer.from_folder(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    pytest.importorskip("tiktoken")
    (tmp_path / "tokenizer.model").write_bytes(b"no such format")
    with pytest.raises(ConfigError, match=r"Cannot make a tokenizer of .*tokenizer\.model"):
        Tokenizer.from_folder(tmp_path)

"""The tokenizer against Transformers' own, its files in all their forms, and errors if files are missing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.core.errors import ConfigError, ParameterError, TokenizerError
from quire.frontend.text.fast_backend import FastBackend
from quire.frontend.text.tokenizer import Tokenizer
from tests.frontend.text import tokenizers_zoo
from tests.frontend.text.tokenizers_zoo import save

TEXTS = ["Hello, world!", " the  quick 🙂", "你好 <s> in </s> text", "tabs\t\nand ünd so on", "a" * 50]


@pytest.mark.parametrize("name", tokenizers_zoo.ALL)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"extra_special_tokens": ["<new>"]},
        {"added_tokens_decoder": {"900": {"content": "<think>", "special": False, "normalized": False}}},
    ],
    ids=["plain", "bos", "bos-eos", "no-bos", "extra-token", "added-token"],
)
def test_ids_and_texts_are_those_of_transformers(name: str, config: dict, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = save(tokenizers_zoo.ALL[name](), tmp_path, tokenizer_class="PreTrainedTokenizerFast", **config)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = Tokenizer.from_folder(folder)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_token_ids >= set(theirs.all_special_ids)
    for text in [*TEXTS, "<think>so</think> <new>"]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            expected = theirs.decode(theirs.encode(text), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ours.encode(text), skip_special_tokens=skip) == expected
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]


def test_reading_a_tokenizer_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder = save(tokenizers_zoo.byte_level(), tmp_path)
    code = (
        "import sys, pathlib; from quire.frontend.text.tokenizer import Tokenizer;"
        f"Tokenizer.from_folder(pathlib.Path({str(folder)!r})).encode('hi');"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_pieces_are_the_bytes_of_tokens() -> None:
    tokenizer = Tokenizer(
        FastBackend(tokenizers_zoo.byte_fallback()), special_tokens={}, chat_templates={}, folder=Path("x")
    )
    assert tokenizer.piece(tokenizer.token_id("▁the")) == b" the"
    assert tokenizer.piece(tokenizer.token_id("<0xF0>")) == b"\xf0"
    assert tokenizer.token_text(tokenizer.token_id("<0xF0>")) == "\ufffd"
    assert tokenizer.piece(10**6) == b""
    level = Tokenizer(FastBackend(tokenizers_zoo.byte_level()), special_tokens={}, chat_templates={}, folder=Path("x"))
    rocket = level.encode("🚀", add_special_tokens=False)
    assert b"".join(map(level.piece, rocket)) == "🚀".encode()


@pytest.mark.parametrize("method", ["encode", "encode_batch"])
def test_lone_surrogates_are_the_requests_fault(method: str) -> None:
    tokenizer = Tokenizer(
        FastBackend(tokenizers_zoo.byte_level()), special_tokens={}, chat_templates={}, folder=Path("x")
    )
    text = "ok \ud83d broken"
    with pytest.raises(ParameterError, match=r"character 3 is a lone surrogate, U\+D83D"):
        getattr(tokenizer, method)(text if method == "encode" else ["fine", text])


def test_missing_tokenizer_names_folder_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer in .*--tokenizer.*--skip-tokenizer-init") as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_broken_tokenizer_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(ConfigError, match=r"Cannot read .*tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_other_formats_are_converted_by_transformers(tmp_path: Path) -> None:
    backend = tokenizers_zoo.byte_level()
    model = json.loads(backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    names = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("the quick fox") == backend.encode("the quick fox").ids


class TestChatTemplates:
    def test_string_in_tokenizer_config(self, tmp_path: Path) -> None:
        folder = save(tokenizers_zoo.byte_level(), tmp_path, chat_template="A")
        assert Tokenizer.from_folder(folder).chat_templates == {"default": "A"}

    def test_named_ones_in_tokenizer_config(self, tmp_path: Path) -> None:
        named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
        folder = save(tokenizers_zoo.byte_level(), tmp_path, chat_template=named)
        assert Tokenizer.from_folder(folder).chat_templates == {"default": "A", "tool_use": "B"}

    def test_files_win(self, tmp_path: Path) -> None:
        folder = save(tokenizers_zoo.byte_level(), tmp_path, chat_template="A")
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": "C"}))
        assert Tokenizer.from_folder(folder).chat_templates == {"default": "A"}
        (folder / "chat_template.jinja").write_text("D")
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "rag.jinja").write_text("E")
        assert Tokenizer.from_folder(folder).chat_templates == {"default": "D", "rag": "E"}


def with_part(folder: Path, part: str, state: dict) -> Tokenizer:
    """The tokenizer in `folder` with another part, which the library reads and cannot run."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: state}))
    return Tokenizer.from_folder(folder)


def test_a_panic_of_the_library_is_the_tokenizers_failure(tmp_path: Path) -> None:
    """A panic is no `Exception`, and would pass all handlers up to the event loop."""
    tokenizer = with_part(
        save(tokenizers_zoo.byte_level(), tmp_path), "pre_tokenizer", {"type": "FixedLength", "length": 0}
    )
    says = r"The model's tokenizer failed on this text: chunk size must be non-zero\. Its tokenizer.json is at fault"
    for call in (
        lambda: tokenizer.encode("Hello"),
        lambda: tokenizer.encode_batch(["Hello", "you"]),
        lambda: tokenizer.offsets("Hello"),
        lambda: tokenizer.encode_pairs([("Hello", "you")], lambda first, second, special: (first, second)),
    ):
        with pytest.raises(TokenizerError, match=says):
            call()


def test_an_error_of_the_library_is_the_tokenizers_failure(tmp_path: Path) -> None:
    folder = save(tokenizers_zoo.byte_level(), tmp_path)
    tokenizer = with_part(folder, "model", {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"})
    with pytest.raises(TokenizerError, match=r"failed on this text: .*\[UNK\]"):
        tokenizer.encode("zzz")
    with pytest.raises(ParameterError, match="surrogate"):
        tokenizer.encode("\ud800")

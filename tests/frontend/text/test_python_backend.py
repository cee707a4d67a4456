"""Tokenizers that exist in Python alone, against their own code."""

import asyncio
import json
import logging
import sys
from pathlib import Path

import pytest

from quire.core.config.structured_outputs import StructuredOutputsOptions
from quire.core.errors import ConfigError, ParameterError, TokenizerError
from quire.core.wire.structured_outputs import StructuredOutputsParams
from quire.frontend.grammar.compiler import GrammarCompiler
from quire.frontend.http.errors import describe
from quire.frontend.text.pairs import PairLimits
from quire.frontend.text.token_stream import open_stream
from quire.frontend.text.tokenizer import Tokenizer
from tests.frontend.text import python_tokenizers
from tests.frontend.text.python_tokenizers import OF_TRANSFORMERS
from tests.frontend.text.test_conversion import TEXTS, ranks

_TEXTS = [
    *TEXTS, "The fox's \"quick\" end-to-end hello, (really) world's 2.5!", "the the\nthe\tfox", "hello " * 60,
    "don't say 'the fox' \"the\" fox " * 12,
]  # fmt: skip


def stream(tokenizer: Tokenizer, token_ids: list[int], prompt: list[int], skip: bool = True) -> str:
    opened = open_stream(tokenizer, prompt, skip_special_tokens=skip)
    return "".join([*map(opened.push, token_ids), opened.flush()])


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_ids_and_texts_are_those_of_the_class(name: str, tmp_path: Path) -> None:
    OF_TRANSFORMERS[name](tmp_path)
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    assert type(theirs).__name__ == name
    assert ours.special_token_ids >= set(theirs.all_special_ids)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    every = list(range(len(theirs)))
    assert all(ours.token_id(ours.token(token_id)) is not None for token_id in every)
    for text in _TEXTS:
        for special in (True, False):
            assert ours.encode(text, add_special_tokens=special) == theirs.encode(text, add_special_tokens=special)
    pairs = [(_TEXTS[0], _TEXTS[1]), (_TEXTS[1], _TEXTS[0]), (_TEXTS[0], "")]
    for pair, found in zip(pairs, ours.encode_pairs(pairs, PairLimits().cut), strict=True):
        expected = theirs([pair], return_token_type_ids=True)
        assert [found.token_ids] == expected["input_ids"]
        assert [found.types] == expected["token_type_ids"]
    plain = [token_id for token_id in every if token_id not in ours.special_token_ids]
    for token_ids in [*map(theirs.encode, _TEXTS), plain[::-1], plain[7:] + plain[:7]]:
        for skip in (True, False):
            expected = theirs.decode(token_ids, skip_special_tokens=skip)
            assert ours.decode([*token_ids, 10**6], skip_special_tokens=skip) == expected
            assert stream(ours, token_ids, [], skip) == expected


@pytest.fixture
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A checkpoint whose tokenizer is its own code over a tiktoken file."""
    pytest.importorskip("tiktoken")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "own"
    folder.mkdir()
    python_tokenizers.own_code(folder)
    return folder


def test_code_of_a_checkpoint_is_imported_where_it_is_trusted(
    own_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="quire"):
        ours = Tokenizer.from_folder(own_folder, trust_remote_code=True)
    assert f"importing tokenization_own.OwnTokenizer of {own_folder}, as --trust-remote-code allows" in caplog.text
    tokens = ranks()
    end = ours.token_id("<|end|>")
    assert end == len(tokens)
    assert ours.special_token_ids == {end, end + 1}
    assert ours.kind == "byte_level"
    for text in _TEXTS:
        token_ids = ours.encode(text)
        assert b"".join(tokens[token_id] for token_id in token_ids) == text.encode()
        assert b"".join(map(ours.piece, token_ids)) == text.encode()
        assert stream(ours, [*token_ids, end], []) == ours.decode([*token_ids, end]) == text
        assert ours.encode(f"{text}<|end|>") == [*token_ids, end]
        assert ours.decode([*token_ids, end], skip_special_tokens=False) == f"{text}<|end|>"
    assert stream(ours, [0xC3, 0x28, 0xFF, 0xF0, 0x9F], []) == "\ufffd(\ufffd\ufffd"


@pytest.mark.parametrize("said", [["tokenization_own.OwnTokenizer", None], "tokenization_own.OwnTokenizer"])
def test_code_of_a_checkpoint_is_refused_where_it_is_not(said: object, own_folder: Path) -> None:
    (own_folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": said}}))
    (own_folder / "tokenization_own.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(
        ConfigError, match=r"\(tokenization_own\.OwnTokenizer\).*only imported with --trust-remote-code"
    ):
        Tokenizer.from_folder(own_folder)


def test_tokens_that_the_code_cannot_decode_have_no_text(own_folder: Path) -> None:
    """A model may sample them. The others, special ones among them, are what they are."""
    code, decode = own_folder / "tokenization_own.py", "        return self.model.decode("
    fails = "        if len(self.ranks) + 1 in token_ids:\n            raise ValueError\n"
    code.write_text(code.read_text().replace(decode, fails + decode))
    ours = Tokenizer.from_folder(own_folder, trust_remote_code=True)
    hello, end = ours.encode("hello"), len(ranks())
    user = end + 1
    assert end in ours.special_token_ids
    assert ours.decode([*hello, user, end, *hello], skip_special_tokens=False) == "hello<|end|>hello"
    assert stream(ours, [*hello, user, *hello], [], skip=False) == "hellohello"
    assert ours.piece(user) == b""


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [("", "import no_such_package\n", "no_such_package"), ("_decode(self, token_ids,", "_decode(self,", "token_ids")],
)
def test_code_that_fails_is_named(old: str, new: str, reason: str, own_folder: Path) -> None:
    code = own_folder / "tokenization_own.py"
    code.write_text(code.read_text().replace(old, new, 1))
    with pytest.raises(ConfigError, match=rf"Cannot make a tokenizer of .*own.*{reason}"):
        Tokenizer.from_folder(own_folder, trust_remote_code=True)


def test_what_the_code_cannot_do_is_the_requests_fault(tmp_path: Path) -> None:
    python_tokenizers.ctrl(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    with pytest.raises(ParameterError, match=r"character 3 is a lone surrogate"):
        tokenizer.encode("ok \ud83d broken")
    with pytest.raises(ParameterError, match="return_token_offsets"):
        tokenizer.offsets("the fox")
    compiler = GrammarCompiler(tokenizer, vocab_size=64, end_token_ids=[0], options=StructuredOutputsOptions())
    with pytest.raises(ParameterError, match="needs the bytes of each token"):
        asyncio.run(compiler.compile(StructuredOutputsParams(regex="a+")))


def test_code_that_fails_on_a_text_is_the_servers_fault(own_folder: Path) -> None:
    code, split = own_folder / "tokenization_own.py", "        return [self.by_id[i] for"
    fails = "        if 'fox' in text:\n            raise TypeError('no foxes')\n"
    code.write_text(code.read_text().replace(split, fails + split))
    ours = Tokenizer.from_folder(own_folder, trust_remote_code=True)
    for encode in (ours.encode, lambda text: ours.encode_batch(["hello", text])):
        with pytest.raises(TokenizerError, match=r"OwnTokenizer.*TypeError: no foxes \(tokenization_own.py, line"):
            encode("the fox")
        with pytest.raises(ParameterError, match=r"character 0 is a lone surrogate"):
            encode("\ud83d fox")
    problem = describe(TokenizerError("why"))
    assert (problem.status, problem.message, problem.param) == (500, "why", None)


def test_a_text_goes_on_where_the_prompt_ends(tmp_path: Path) -> None:
    """Wherever the prompt ends, what follows is the rest of the whole text, but for a mark that it loses."""
    python_tokenizers.ctrl(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    token_ids = tokenizer.encode("hello, the quick fox")
    whole = tokenizer.decode(token_ids)
    for cut in range(len(token_ids) + 1):
        before = tokenizer.decode(token_ids[:cut]).removesuffix("@@")
        assert before + stream(tokenizer, token_ids[cut:], token_ids[:cut]) == whole


def test_a_stream_of_a_decoder_that_looks_back_to_the_beginning_is_the_whole_text(own_folder: Path) -> None:
    """Quotes open and close by turns, as Moses has them, however far they are apart."""
    code, decode = own_folder / "tokenization_own.py", "    def _decode("
    turned = """    def _decode(self, token_ids, **options):
        first, *others = self._plain(token_ids, **options).split('"')
        return first + "".join("»«"[number % 2] + text for number, text in enumerate(others, 1))

    def _plain("""
    code.write_text(code.read_text().replace(decode, turned))
    ours = Tokenizer.from_folder(own_folder, trust_remote_code=True)
    assert ours.kind == "rewritten"
    token_ids = ours.encode("".join(f'he said "{"the fox " * length}" and ' for length in (1, 200, 40, 3, 70)))
    expected, num_decoded, decode_tokens = ours.decode(token_ids), 0, ours.decode
    assert expected.count("»") == 5

    def counted(token_ids: list[int], **options: bool) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return decode_tokens(token_ids, **options)

    ours.decode = counted  # type: ignore[method-assign, assignment]
    assert stream(ours, token_ids, []) == expected
    assert num_decoded < 400 * len(token_ids)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    (tmp_path / "vocab.json").write_text(json.dumps({"<unk>": 0}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "biogpt"}))
    with pytest.raises(ConfigError, match="sacremoses"):
        Tokenizer.from_folder(tmp_path)

"""Grammars for a vocabulary of today's usual size: allowed tokens, and memory."""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quire.core.config.structured_outputs import StructuredOutputsOptions
from quire.core.wire.protocol import Grammar
from quire.core.wire.structured_outputs import GrammarBackend, StructuredOutputsParams
from quire.executor.sampling.grammar.library import GrammarLibrary
from quire.executor.sampling.grammar.matcher import Matcher
from quire.frontend.grammar.compiler import MAX_GRAMMAR_BYTES, GrammarCompiler
from quire.frontend.text.tokenizer import Tokenizer
from tests.schemas import API_SCHEMAS

NUM_TOKENS = 150_000
VOCAB_SIZE = 151_936  # rows of the embedding: more than there are tokens
END = NUM_TOKENS
SPECIAL = ["<|end|>", "<think>", "</think>"]
BACKENDS: list[GrammarBackend] = ["auto", "guidance"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level BPE with random merges; letters and JSON's characters are more frequent than other bytes."""
    dice = random.Random(0)
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    likely = [name for name in names if name.isascii()] + ["Ġ", "Ċ"]
    ids = {name: token_id for token_id, name in enumerate(names)}
    merges = []
    while len(names) < NUM_TOKENS:
        pair = names[int(len(names) * dice.random() ** 3)], dice.choice(likely)
        if len(merged := "".join(pair)) <= 24 and merged not in ids:
            ids[merged] = len(names)
            names.append(merged)
            merges.append(pair)
    made = tokenizers.Tokenizer(models.BPE(ids, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    made.add_special_tokens(SPECIAL)
    folder = tmp_path_factory.mktemp("large-vocabulary")
    made.save(str(folder / "tokenizer.json"), pretty=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_folder(folder)


PLAIN = [
    {"choice": ["red", "reed", 'a "b"', "ё\n"]},
    {"json": {"enum": ["x", "xyz", 12]}},
    {"regex": "[a-f]{2}-(0|10)"},
]
TEXTS: list[list[str]] = [
    ["red", "reed", 'a "b"', "ё\n"],
    ['"x"', '"xyz"', "12"],
    [f"{first}{second}-{end}" for first in "abcdef" for second in "abcdef" for end in ("0", "10")],
]
"""Everything that these allow."""

TAG = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
CONSTRAINTS: list[dict[str, Any]] = [
    *PLAIN,
    {"choice": ["<think>"]},
    {"structural_tag": {"type": "structural_tag", "format": TAG}},
    *({"json": API_SCHEMAS[name]} for name in ("calendar event", "geometry", "folder tree", "error, in two parts")),
    {"json_object": True},
]


@pytest.fixture(scope="module")
def pieces(tokenizer: Tokenizer) -> dict[bytes, list[int]]:
    """Token ids by their text."""
    found: dict[bytes, list[int]] = {}
    for token_id in range(NUM_TOKENS):
        found.setdefault(tokenizer.piece(token_id), []).append(token_id)
    return found


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[dict[str, list[Grammar]]]:
    """The grammars of `CONSTRAINTS` by backend, all compiled by one helper with a server's limits."""
    compiler = GrammarCompiler(
        tokenizer, vocab_size=VOCAB_SIZE, end_token_ids=[END], options=StructuredOutputsOptions()
    )
    pids: set[int] = set()

    async def compile_all() -> dict[str, list[Grammar]]:
        made: dict[str, list[Grammar]] = {}
        for backend in BACKENDS:
            asked = [StructuredOutputsParams(backend=backend, **each) for each in CONSTRAINTS]
            made[backend] = [await compiler.compile(each) for each in asked]
            pids.update(compiler.helper_pids)
        return made

    made = asyncio.run(compile_all())
    assert len(pids) == 1  # the memory for a vocabulary of this size is no reason to replace the helper
    assert psutil.Process(pids.pop()).memory_info().rss < 400 * 2**20
    yield made
    compiler.close()


@pytest.fixture(scope="module")
def library() -> GrammarLibrary:
    return GrammarLibrary()


def allowed(matcher: Matcher) -> set[int]:
    bitmask = np.zeros((1, -(-VOCAB_SIZE // 32)), np.int32)
    matcher.fill(bitmask, 0)
    return set(np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", range(len(TEXTS)))
def test_masks_are_those_of_the_definition(
    pieces: dict[bytes, list[int]],
    grammars: dict[str, list[Grammar]],
    library: GrammarLibrary,
    backend: str,
    place: int,
) -> None:
    """A token is allowed if an allowed text continues with it, the end token if one ends, and padding never."""
    texts = [text.encode() for text in TEXTS[place]]
    spelled = {token_id: piece for piece, token_ids in pieces.items() for token_id in token_ids}
    dice = random.Random(place)
    for _ in range(8):
        matcher = library.matcher(grammars[backend][place])
        done = b""
        while True:
            rests = {text[len(done) :] for text in texts if text.startswith(done)}
            beginnings = {rest[: i + 1] for rest in rests for i in range(len(rest))}
            expected = {token_id for piece in beginnings for token_id in pieces.get(piece, ())}
            expected |= {END} if b"" in rests else set()
            assert allowed(matcher) == expected
            token_id = dice.choice(sorted(expected))
            assert matcher.accept(token_id)
            if token_id == END:
                break
            done += spelled[token_id]


def test_special_tokens_are_text_in_tags_alone(grammars: dict[str, list[Grammar]], library: GrammarLibrary) -> None:
    """In other constraints special tokens have no text, and no grammar allows them."""
    think = END + 1
    for backend in BACKENDS:
        plain, tagged = (allowed(library.matcher(each)) for each in grammars[backend][3:5])
        assert tagged - plain == {think}
        assert plain < tagged


def test_grammars_of_real_apis_are_small_enough_to_travel(
    grammars: dict[str, list[Grammar]], library: GrammarLibrary
) -> None:
    assert {grammar.backend for grammar in grammars["auto"]} == {"xgrammar", "guidance"}
    assert max(len(grammar.data) for grammar in grammars["auto"]) < MAX_GRAMMAR_BYTES / 4
    for grammar in (*grammars["auto"], *grammars["guidance"]):
        starts = allowed(library.matcher(grammar))
        assert starts
        assert max(starts) < NUM_TOKENS + len(SPECIAL)

"""Matchers of all libraries, and masks beside the sampler: what they allow, replay, take back and refuse."""

import threading
import zlib
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch

from quire import ops
from quire.core.protocol import Grammar, NewSlot, Vocabulary
from quire.core.sampling_params import SamplingParams
from quire.executor.request_table import RequestTable
from quire.executor.sampling.feature import SampleBatch
from quire.executor.sampling.grammar.library import GrammarLibrary
from quire.executor.sampling.grammar.masks import GrammarMasks
from quire.executor.sampling.grammar.matcher import Matcher
from quire.executor.sampling.sampler import Sampler

VOCAB_SIZE = 259
END = 256
"""Tokens are the bytes, then the end of the sequence, then two tokens of several bytes."""


@pytest.fixture(scope="module")
def grammar(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Grammar]:
    """`grammar("a+b", backend)`: a compiled regular expression."""
    path = tmp_path_factory.mktemp("grammar") / "vocabulary"
    vocabulary = Vocabulary([*(bytes([byte]) for byte in range(256)), b"", b"ab", b"aab"], [END])
    path.write_bytes(msgspec.msgpack.encode(vocabulary))

    def make(regex: str, backend: str = "guidance") -> Grammar:
        return Grammar(
            backend, f"{backend} {regex}".encode(), zlib.compress(_compile(regex, backend, vocabulary)), str(path)
        )

    return make


def _compile(regex: str, backend: str, vocabulary: Vocabulary) -> bytes:
    if backend == "guidance":
        import llguidance

        return llguidance.LLMatcher.grammar_from_regex(regex).encode()
    if backend == "xgrammar":
        from quire.executor.sampling.grammar.xgrammar_matcher import xgrammar

        info = xgrammar.TokenizerInfo(
            vocabulary.tokens, xgrammar.VocabType.RAW, vocab_size=VOCAB_SIZE, stop_token_ids=[END]
        )
        return xgrammar.GrammarCompiler(info).compile_regex(regex).serialize_json().encode()
    if backend == "outlines":
        outlines_core = pytest.importorskip("outlines_core")
        ids = {token: [i] for i, token in enumerate(vocabulary.tokens) if token}
        return outlines_core.Index(regex, outlines_core.Vocabulary(END, ids)).__reduce__()[1][0]
    pytest.importorskip("lmformatenforcer")
    return msgspec.msgpack.encode(["regex", regex])


def allowed(matcher: Matcher) -> list[int]:
    bitmask = np.zeros((2, -(-VOCAB_SIZE // 32)), np.int32)
    matcher.fill(bitmask, 1)
    assert not bitmask[0].any()
    return np.flatnonzero(np.unpackbits(bitmask[1].view(np.uint8), bitorder="little")).tolist()


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


@pytest.mark.parametrize("backend", ["xgrammar", "guidance", "outlines", "lm-format-enforcer"])
def test_a_matcher_allows_what_the_grammar_does_and_goes_back(grammar: Callable[..., Grammar], backend: str) -> None:
    matcher = GrammarLibrary().matcher(grammar("a{1,3}b?", backend))
    assert allowed(matcher) == [*ids("a"), 257, 258]
    assert matcher.accept(ord("a"))
    after_a = allowed(matcher)
    assert after_a == [*ids("ab"), END, 257, 258]
    assert not matcher.accept(ord("c"))
    assert allowed(matcher) == after_a  # a refused token changes nothing
    assert matcher.accept(258)
    assert allowed(matcher) == [END]
    matcher.rollback(1)
    assert allowed(matcher) == after_a
    assert matcher.accept(END)


class Bench:
    """A sampler on a table of four slots, whose logits the test gives."""

    def __init__(self) -> None:
        self.table = RequestTable(4, 64, 16, torch.device("cpu"))
        self.sampler = Sampler(4, VOCAB_SIZE, [END], ops=ops.bind("cpu"))
        self.lengths: dict[int, int] = {}

    @property
    def masks(self) -> GrammarMasks:
        return self.sampler.grammar

    def admit(self, slot: int, grammar: Grammar | None, output: list[int] | None = None, **params: object) -> None:
        sampling = SamplingParams(temperature=0.0, seed=1, **params)  # type: ignore[arg-type]
        tokens = [1, 2, *(output or [])]
        self.sampler.admit(NewSlot(slot, tokens, 2, [[0]], sampling, grammar))
        self.table.num_prompt_tokens[slot] = 2
        self.lengths[slot] = len(tokens)

    def step(self, logits: torch.Tensor, slots: list[int]) -> tuple[list[int], list[bool]]:
        rows = np.array(slots)
        positions = np.array([self.lengths[slot] for slot in slots])
        sampled = self.sampler.sample(logits.clone(), SampleBatch(rows, positions, self.table))
        token_ids, usable = sampled.token_ids.tolist(), sampled.usable.cpu().numpy()
        assert self.masks.advance(rows, token_ids, usable) == []
        for slot in slots:
            self.lengths[slot] += 1
        return token_ids, usable.tolist()


def preferring(*token_ids: int) -> torch.Tensor:
    """Logits of one row: the first of `token_ids` is the likeliest, then the second, then all others."""
    logits = torch.zeros(1, VOCAB_SIZE)
    for place, token_id in enumerate(token_ids):
        logits[0, token_id] = 10.0 - place
    return logits


def test_masks_apply_to_their_rows_alone_until_the_end(grammar: Callable[..., Grammar]) -> None:
    bench = Bench()
    bench.admit(0, None)
    bench.admit(2, grammar("ab"))
    bench.admit(3, grammar("x+", "xgrammar"))
    logits = torch.cat([preferring(ord("z"), END)] * 3)
    rows = [bench.step(logits, [0, 2, 3])[0] for _ in range(4)]
    assert [row[0] for row in rows] == [ord("z")] * 4
    assert [row[1] for row in rows][:1] in ([ord("a")], [257])
    assert [row[2] for row in rows] == [ord("x"), END, ord("z"), ord("z")]  # after the end nothing is held


def test_a_request_without_a_grammar_starts_no_thread_and_no_library() -> None:
    before = threading.enumerate()
    bench = Bench()
    bench.admit(0, None)
    bench.step(preferring(5), [0])
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("grammar") and thread not in before
    ]


def test_a_request_that_comes_again_goes_on_where_it_was(grammar: Callable[..., Grammar]) -> None:
    bench = Bench()
    bench.admit(1, grammar("abc"), output=ids("ab"))
    assert bench.step(preferring(ord("a"), ord("b")), [1])[0] == ids("c")


def test_a_slot_is_free_again_when_it_is_released(grammar: Callable[..., Grammar]) -> None:
    bench = Bench()
    bench.admit(1, grammar("abc"))
    bench.masks.release([1])
    bench.admit(1, None)
    assert bench.step(preferring(ord("z")), [1])[0] == ids("z")


def test_a_row_that_nothing_fits_is_refused_alone(grammar: Callable[..., Grammar]) -> None:
    bench = Bench()
    bench.admit(0, grammar("ab"), allowed_token_ids=[ord("z")])
    bench.admit(1, grammar("ab"))
    token_ids, usable = bench.step(torch.cat([preferring(ord("z"))] * 2), [0, 1])
    assert usable == [False, True]
    assert token_ids[1] in (ord("a"), 257)
    assert "structured_outputs" in (bench.masks.why_nothing_fits(0) or "")


def test_a_grammar_that_cannot_be_loaded_fails_its_own_request(grammar: Callable[..., Grammar]) -> None:
    bench = Bench()
    broken = msgspec.structs.replace(grammar("ab"), key=b"broken", data=b"no zlib")
    bench.admit(0, broken)
    bench.admit(1, grammar("b"))
    token_ids, usable = bench.step(torch.cat([preferring(ord("z"))] * 2), [0, 1])
    assert usable == [False, True]
    assert token_ids[1] == ord("b")
    assert "cannot be followed" in (bench.masks.why_nothing_fits(0) or "")


def test_min_tokens_waits_with_the_end_where_the_grammar_lets_it(grammar: Callable[..., Grammar]) -> None:
    bench = Bench()
    bench.admit(0, grammar("a+"), min_tokens=2)
    logits = preferring(END, ord("a"))
    assert [bench.step(logits, [0])[0][0] for _ in range(3)] == [ord("a"), ord("a"), END]


def test_what_was_loaded_is_kept_within_bytes(grammar: Callable[..., Grammar]) -> None:
    grammars = [grammar(f"{letter}+") for letter in "abcdefgh"]
    library = GrammarLibrary(cache_bytes=3 * len(zlib.decompress(grammars[0].data)))
    for each in grammars:
        library.matcher(each)
    assert library.num_grammars == 3
    assert allowed(library.matcher(grammars[1])) == ids("b")  # read again

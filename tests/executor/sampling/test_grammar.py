"""Matchers of all libraries, and masks beside the sampler: what they allow, replay, take back and refuse."""

import itertools
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire import ops
from quire.core.wire.protocol import Grammar, NewSlot, StepPlan, Vocabulary
from quire.core.wire.sampling_params import SamplingParams, ThinkingMarks
from quire.executor.sampling.custom import ProcessorContext, load_processors
from quire.executor.sampling.grammar.guidance_matcher import GuidanceMatcher
from quire.executor.sampling.grammar.library import GrammarLibrary
from quire.executor.sampling.grammar.masks import DeadEnd, GrammarMasks
from quire.executor.sampling.grammar.matcher import Matcher, MatcherError
from quire.executor.sampling.grammar.xgrammar_matcher import XGrammarMatcher, xgrammar
from quire.executor.sampling.sampler import Sampler
from quire.executor.sampling.sampling_feature import SampleBatch
from quire.executor.step.request_table import RequestTable
from quire.frontend.grammar.constraint import Constraint
from tests.checkpoints import VOCAB_SIZE as MODEL_VOCAB_SIZE
from tests.executor.step.test_model_runner import engine_config, execute, start_worker

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
        info = xgrammar.TokenizerInfo(
            vocabulary.tokens, xgrammar.VocabType.RAW, vocab_size=VOCAB_SIZE, stop_token_ids=[END]
        )
        return xgrammar.GrammarCompiler(info).compile_regex(regex).serialize_json().encode()
    if backend == "outlines":
        pytest.importorskip("outlines_core")
        from quire.frontend.grammar.backends.outlines_backend import OutlinesBackend

        return OutlinesBackend(vocabulary).compile(Constraint("regex", regex, ("outlines",)))
    pytest.importorskip("lmformatenforcer")
    return msgspec.msgpack.encode(["regex", regex, 0])


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


@pytest.mark.parametrize("backend", ["xgrammar", "guidance", "outlines", "lm-format-enforcer"])
def test_a_draft_is_taken_back_wherever_it_ended(grammar: Callable[..., Grammar], backend: str) -> None:
    """As with drafts: the matcher accepts some tokens, takes all or some of them back, and goes on with others."""
    matcher = GrammarLibrary().matcher(grammar("(ab|cd){3}", backend))
    masks = []
    for token_id in ids("abcd"):
        masks.append(allowed(matcher))
        assert matcher.accept(token_id)
    for num_back in (1, 2, 4):
        matcher.rollback(num_back)
        assert allowed(matcher) == masks[-num_back]
        for token_id in ids("abcd")[-num_back:]:
            assert matcher.accept(token_id)
    matcher.rollback(4)
    assert [matcher.accept(token_id) for token_id in ids("cdcdcd")] == [True] * 6
    assert allowed(matcher) == [END]
    assert not matcher.accept(ord("a"))
    matcher.rollback(5)
    assert allowed(matcher) == ids("d")


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_an_end_is_taken_back_too(grammar: Callable[..., Grammar], backend: str) -> None:
    matcher = GrammarLibrary().matcher(grammar("a{1,3}", backend))
    assert matcher.accept(ord("a"))
    before = allowed(matcher)
    assert matcher.accept(END)
    matcher.rollback(1)
    assert allowed(matcher) == before
    assert matcher.accept(ord("a"))


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
        self.sampler.collect(sampled)
        assert sampled.forbidden == []
        for slot in slots:
            self.lengths[slot] += 1
        return sampled.on_host

    def dead_end(self, slot: int, *, has_other_limits: bool = True) -> str:
        """Why the grammar of a request left no token; empty if it did not."""
        found = self.masks.why_nothing_fits(slot, has_other_limits=has_other_limits)
        return found.message if found else ""


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


def test_a_step_that_is_sampled_in_parts_follows_each_grammar(
    grammar: Callable[..., Grammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, choose = Bench(), Sampler._choose

    def short(sampler: Sampler, logits: torch.Tensor, batch: SampleBatch, wanted: int) -> Any:
        if len(logits) > 1:
            raise torch.OutOfMemoryError("no memory for two rows")
        return choose(sampler, logits, batch, wanted)

    monkeypatch.setattr(Sampler, "_choose", short)
    bench.admit(1, grammar("pqr"))
    bench.admit(3, grammar("xyz", "xgrammar"))
    tokens = []
    for place in range(4):
        batch = SampleBatch(np.array([1, 3]), np.array([2 + place, 2 + place]), bench.table)
        logits = torch.cat([preferring(END)] * 2)
        sampled = bench.sampler.sample_in_parts(logits, batch, lambda: None)
        bench.sampler.collect(sampled)
        assert sampled.forbidden == sampled.without_memory == []
        tokens.append(sampled.on_host[0])
    assert [*zip(*tokens, strict=True)] == [(*ids("pqr"), END), (*ids("xyz"), END)]


class Watch:
    """Notes, in their order, masks being made and applied, and whatever makes the host wait for the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.times: list[float] = []
        for owner in (GuidanceMatcher, XGrammarMatcher):
            self._note(monkeypatch, owner, "fill_all", "mask")
        self._note(monkeypatch, type(ops.bind("cpu").sampling), "apply_bitmask", "apply")
        for name in ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__array__"):
            self._note(monkeypatch, torch.Tensor, name, "read")

    def _note(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, event: str) -> None:
        original = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            self.events.append(event)
            self.times.append(time.monotonic())
            return original(*args, **options)

        static = isinstance(vars(owner).get(name), staticmethod)
        monkeypatch.setattr(owner, name, staticmethod(noted) if static else noted)

    def forget(self) -> None:
        """Clears the events."""
        self.events.clear()
        self.times.clear()


def test_one_operation_masks_all_rows_with_a_grammar_and_no_other(
    grammar: Callable[..., Grammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    bench.admit(0, None)
    bench.admit(1, grammar("a+"))
    bench.admit(3, grammar("x+", "xgrammar"))
    logits = torch.cat([preferring(ord("z"))] * 3)
    rows, batch = np.array([0, 1, 3]), np.array([2, 2, 2])
    watch = Watch(monkeypatch)
    sampled = bench.sampler.sample(logits, SampleBatch(rows, batch, bench.table))
    assert watch.events == ["mask", "mask", "apply"]  # and nothing was read: an accelerator would still be at work
    assert sampled.token_ids.tolist() == [ord("z"), ord("a"), ord("x")]


def test_a_step_without_grammars_does_nothing_for_them(
    grammar: Callable[..., Grammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request has a grammar, but only rows of the step count."""
    bench = Bench()
    bench.admit(0, None)
    bench.admit(1, None)
    bench.admit(2, grammar("a+"))
    watch = Watch(monkeypatch)
    asked: list[object] = []
    monkeypatch.setattr(GrammarMasks, "used", lambda masks, batch: asked.append(batch))
    monkeypatch.setattr(GrammarMasks, "apply", lambda masks, logits, batch: asked.append(batch))
    bench.sampler.sample(torch.cat([preferring(5)] * 2), SampleBatch(np.array([0, 1]), np.array([2, 2]), bench.table))
    assert (watch.events, asked) == ([], [])


def test_masks_are_made_when_the_forward_pass_is_under_way(
    grammar: Callable[..., Grammar],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Masks are made while the launched step runs, before its result is read, so they cost an accelerator no time."""
    watch = Watch(monkeypatch)
    worker = start_worker(engine_config(checkpoint("llama"), trace_folder=str(tmp_path)))
    made = grammar("a+")
    vocabulary = msgspec.msgpack.decode(Path(made.vocabulary_path).read_bytes(), type=Vocabulary)
    vocabulary.tokens.extend([b""] * (MODEL_VOCAB_SIZE - VOCAB_SIZE))
    (tmp_path / "vocabulary").write_bytes(msgspec.msgpack.encode(vocabulary))
    made = msgspec.structs.replace(made, vocabulary_path=str(tmp_path / "vocabulary"))
    new = NewSlot(0, [5, 6, 7], 3, [[0]], SamplingParams(temperature=0.0, seed=1), made)
    execute(worker, StepPlan(0, [], [new], [0], [0], [3], [1], []))
    execute(worker, StepPlan(1, [], [], [0], [3], [1], [1], []))  # the first of its shape makes views of host memory
    watch.forget()
    result = execute(worker, StepPlan(2, [], [], [0], [4], [1], [1], []))
    spans = {name: (begin, end) for name, begin, end in result.spans}
    done = dict(zip(watch.events, watch.times, strict=True))
    assert watch.events[:2] == ["mask", "apply"]
    assert spans["forward"][1] <= done["mask"] <= done["apply"] <= spans["result"][0]
    assert result.token_ids in ([[ord("a")]], [[END]])


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
    assert "other limits" in bench.dead_end(0)


@pytest.mark.parametrize("backend", ["xgrammar", "guidance", "outlines", "lm-format-enforcer"])
def test_several_matchers_are_filled_at_once_each_in_its_row(grammar: Callable[..., Grammar], backend: str) -> None:
    library = GrammarLibrary()
    matchers = [library.matcher(grammar(regex, backend)) for regex in ("a+b", "x?y", "(ab|cd)+")]
    for num_matchers in (1, 3):
        bitmask = np.zeros((5, -(-VOCAB_SIZE // 32)), np.int32)
        rows = [4, 0, 2][:num_matchers]
        type(matchers[0]).fill_all(matchers[:num_matchers], bitmask, rows)
        found = {row: np.flatnonzero(np.unpackbits(bitmask[row].view(np.uint8), bitorder="little")) for row in range(5)}
        expected = {row: allowed(matcher) for row, matcher in zip(rows, matchers, strict=False)}
        assert {row: ids.tolist() for row, ids in found.items()} == {row: expected.get(row, []) for row in range(5)}


class Tiring(Matcher):
    """Allows everything for a number of masks, then fails."""

    def __init__(self, num_times: int) -> None:
        self.num_times = num_times

    def fill(self, bitmask: np.ndarray, row: int) -> None:
        self.num_times -= 1
        if self.num_times < 0:
            raise MatcherError("too complex")
        bitmask[row] = -1

    def accept(self, token_id: int) -> bool:
        return True

    def rollback(self, num_tokens: int) -> None: ...


def test_a_matcher_that_gives_up_takes_none_of_its_library_along(
    grammar: Callable[..., Grammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    matchers = iter([Tiring(9), Tiring(1), Tiring(9)])
    monkeypatch.setattr(GrammarLibrary, "matcher", lambda library, grammar: next(matchers))
    bench = Bench()
    for slot in range(3):
        bench.admit(slot, grammar("a+"))
    logits = torch.cat([preferring(ord("z"))] * 3)
    assert bench.step(logits, [0, 1, 2]) == ([ord("z")] * 3, [True] * 3)
    token_ids, usable = bench.step(logits, [0, 1, 2])
    assert usable == [True, False, True]
    assert token_ids[::2] == [ord("z")] * 2
    assert "too complex" in bench.dead_end(1)


def test_a_grammar_is_blamed_for_what_it_did(grammar: Callable[..., Grammar]) -> None:
    """A mask that is empty, or leaves what other limits take away; not logits that the model broke."""
    bench = Bench()
    bench.admit(0, grammar("ab"))
    bench.admit(1, grammar("ab"), allowed_token_ids=[ord("z")])
    broken = torch.full((1, VOCAB_SIZE), torch.nan)
    assert bench.step(torch.cat([broken, preferring(ord("a"))]), [0, 1])[1] == [False, False]
    assert bench.sampler.why_nothing_fits(0) is None
    assert isinstance(bench.sampler.why_nothing_fits(1), DeadEnd)
    assert "other limits" in bench.dead_end(1)


def test_a_mask_without_tokens_is_a_dead_end(grammar: Callable[..., Grammar], monkeypatch: pytest.MonkeyPatch) -> None:
    class Trap(Tiring):
        """Allows one token, then neither a token nor the end."""

        def fill(self, bitmask: np.ndarray, row: int) -> None:
            self.num_times -= 1
            bitmask[row] = -(self.num_times >= 0)

    monkeypatch.setattr(GrammarLibrary, "matcher", lambda library, grammar: Trap(1))
    bench = Bench()
    bench.admit(0, grammar("a+"))
    assert bench.step(preferring(ord("z")), [0]) == ([ord("z")], [True])
    assert bench.step(preferring(ord("z")), [0])[1] == [False]
    assert "neither a token nor the end" in bench.dead_end(0, has_other_limits=False)


def test_a_token_that_came_back_after_the_mask_is_told(grammar: Callable[..., Grammar]) -> None:
    """For example the end of reasoning, which a thinking budget forces after the mask."""
    bench = Bench()
    thinking = ThinkingMarks(begin=[[ord("<")]], end=[[ord(">")]], opened=True)
    bench.admit(0, grammar("ab"))
    bench.admit(1, grammar("ab"), thinking_token_budget=0, thinking=thinking)
    rows, positions = np.array([0, 1]), np.array([2, 2])
    sampled = bench.sampler.sample(torch.zeros(2, VOCAB_SIZE), SampleBatch(rows, positions, bench.table))
    assert sampled.token_ids[1] == ord(">")
    bench.sampler.collect(sampled)
    assert sampled.forbidden == [1]


def test_a_grammar_that_cannot_be_loaded_fails_its_own_request(grammar: Callable[..., Grammar]) -> None:
    bench = Bench()
    broken = msgspec.structs.replace(grammar("ab"), key=b"broken", data=b"no zlib")
    bench.admit(0, broken)
    bench.admit(1, grammar("b"))
    token_ids, usable = bench.step(torch.cat([preferring(ord("z"))] * 2), [0, 1])
    assert usable == [False, True]
    assert token_ids[1] == ord("b")
    assert "cannot be followed" in bench.dead_end(0)


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


ALL_BACKENDS = ["xgrammar", "guidance", "outlines", "lm-format-enforcer"]


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_rows_with_drafts_have_the_masks_that_each_token_would_have_alone(
    grammar: Callable[..., Grammar], backend: str
) -> None:
    """Drafts that are right, wrong, forbidden or the end: after each step the matcher stands where the output does."""
    output = [*ids("abcdcd"), END]
    tried = ([ord("b")], ids("bcd"), ids("bcx"), ids("xcd"), ids("bcdcd"), [*ids("bcdcd"), END], [])
    for drafts, asks in itertools.product(tried, (False, True)):
        bench = Bench()
        bench.admit(1, grammar("(ab|cd){3}", backend))
        bench.admit(2, grammar("a+", backend))
        at = 0
        while at < len(output):
            right = [*output[at:], *([END] * 9)]
            told = drafts if not at else right[: len(drafts)]
            slots = [1] * (1 + len(told)) + [2]
            positions = [bench.lengths[1] + row for row in range(1 + len(told))] + [bench.lengths[2]]
            for row, draft in enumerate(told):
                bench.table.token_ids[1, bench.lengths[1] + row] = draft
            logits = torch.cat([preferring(token_id, END) for token_id in right[: 1 + len(told)]] + [preferring(97)])
            batch = SampleBatch(np.array(slots), np.array(positions), bench.table)
            if asks:  # so that some masks are known already
                bench.sampler.forced_tokens(1, 16)
            sampled = bench.sampler.sample(logits, batch)
            bench.sampler.collect(sampled)
            token_ids, _ = sampled.on_host
            assert sampled.forbidden == []
            accepted = 1
            while accepted <= len(told) and token_ids[accepted - 1] == told[accepted - 1] != END:
                accepted += 1
            assert token_ids[:accepted] == output[at : at + accepted]
            bench.table.token_ids[1, bench.lengths[1] : bench.lengths[1] + accepted] = torch.tensor(
                token_ids[:accepted], dtype=torch.int32
            )
            at += accepted
            bench.lengths[1] += accepted
            bench.lengths[2] += 1
        assert not bench.sampler.has_grammar(1)
        assert bench.sampler.has_grammar(2)
        assert bench.dead_end(1, has_other_limits=False) == ""


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_the_library_makes_no_mask_twice_for_the_pieces_that_it_forces(
    grammar: Callable[..., Grammar], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    bench.admit(0, grammar("(xyz|w)(1|2)", backend))
    bench.step(preferring(ord("x")), [0])
    forced = bench.sampler.forced_tokens(0, 16)
    assert forced == ids("yz")

    def fill(matcher: object, bitmask: np.ndarray, row: int) -> None:
        raise AssertionError("this mask is known")

    monkeypatch.setattr(type(bench.masks._matchers[0]), "fill", fill)
    bench.table.token_ids[0, bench.lengths[0] : bench.lengths[0] + 2] = torch.tensor(forced, dtype=torch.int32)
    batch = SampleBatch(np.array([0, 0, 0]), bench.lengths[0] + np.arange(3), bench.table)
    sampled = bench.sampler.sample(torch.cat([preferring(END, ord("w"), *ids("yz2"))] * 3), batch)
    assert sampled.on_host[0] == ids("yz2")


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize(
    ("regex", "output", "forced"),
    [
        ("xyz(1|2)w", "", ids("xyz")),
        ("xyz(1|2)w", "xyz1", [*ids("w"), END]),  # the end is forced, too
        ("xyz(1|2)w", "xyz", []),
        ("[a-z]+", "q", []),
        ("caabd", "c", [258, ord("d"), END]),  # the longest token of those that begin the text
    ],
)
def test_what_a_grammar_forces_is_known_ahead(
    grammar: Callable[..., Grammar], backend: str, regex: str, output: str, forced: list[int]
) -> None:
    bench = Bench()
    bench.admit(0, grammar(regex, backend))
    following = [*ids(output), *forced[:1]] or [0]
    for token_id in ids(output):
        bench.step(preferring(token_id), [0])
    assert bench.sampler.forced_tokens(0, 16) == forced
    assert bench.sampler.forced_tokens(0, 2) == forced[:2]
    if forced:  # and the next mask is that of the place where the output stands
        assert bench.step(preferring(END, *following[-1:]), [0])[0] == forced[:1]


def test_a_processor_beside_a_grammar_takes_no_drafts(grammar: Callable[..., Grammar]) -> None:
    """It may bring back a token that the grammar forbids, which the host notices once the step is done."""
    context = ProcessorContext(4, VOCAB_SIZE, torch.device("cpu"))
    custom = load_processors(["tests.executor.processors:NeverTwice"], context)
    sampler = Sampler(4, VOCAB_SIZE, [END], ops=ops.bind("cpu"), custom=custom)
    for slot, each in enumerate((None, grammar("a+b"))):
        sampler.admit(NewSlot(slot, [5, 6, 7], 3, [[0]], SamplingParams(temperature=0.0, seed=1), each))
    assert sampler.can_go_back(np.arange(2)).tolist() == [True, False]

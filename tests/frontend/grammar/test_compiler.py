"""Constraints become grammars in helper processes: the choice of library, refusals, and the cost of hostile schemas."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.core.config.structured_outputs import StructuredOutputsOptions
from quire.core.errors import ParameterError, UnavailableError
from quire.core.wire.structured_outputs import StructuredOutputsParams
from quire.frontend.grammar.cache import GrammarCache
from quire.frontend.grammar.compiler import GrammarCompiler
from quire.frontend.http.errors import describe
from quire.frontend.keys.caller import Caller, set_caller
from quire.frontend.keys.rate_limits import RateLimits
from quire.frontend.text.tokenizer import Tokenizer
from tests.checkpoints import EOS_TOKEN_ID

BOMB = {"choice": ["ab" * length for length in range(1, 500)]}  # takes minutes to compile
SMALL = {"json": {"type": "integer"}}


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Callable[..., Path]) -> Tokenizer:
    return Tokenizer.from_folder(checkpoint("llama"))


class Compilers:
    """Makes compilers with different limits, and closes them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.made: list[GrammarCompiler] = []

    def __call__(self, options: StructuredOutputsOptions | None = None, **limits: Any) -> GrammarCompiler:
        compiler = GrammarCompiler(
            self._tokenizer,
            vocab_size=self._tokenizer.vocab_size,
            end_token_ids=[EOS_TOKEN_ID],
            options=options or StructuredOutputsOptions(),
            **limits,
        )
        self.made.append(compiler)
        return compiler


@pytest.fixture
def compilers(tokenizer: Tokenizer) -> Any:
    made = Compilers(tokenizer)
    yield made
    for compiler in made.made:
        compiler.close()


def params(**constraint: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**constraint)


def test_the_first_library_that_can_do_a_constraint_takes_it(compilers: Compilers) -> None:
    async def backends() -> list[str]:
        compiler = compilers()
        constraints = [
            {"json": {"type": "string", "maxLength": 4}},
            {"json": {"type": "string", "maxLength": 200}},  # whose masks take XGrammar a tenth of a second each
            {"json": {"type": "string", "pattern": "^a+$", "maxLength": 4}},  # both at once are too much for XGrammar
            {"json": {"type": "number", "multipleOf": 0.5}},
            {"json": '{"enum": ["a", 1]}'},
            {"regex": "[a-z]+"},
            {"choice": ["a", "b"]},
            {"json_object": True},
            {"grammar": 'root ::= "a" | "b" root'},
            {"grammar": 'start: "a" | "b" start'},
            {"json": {"type": "object"}, "whitespace_pattern": "[ ]?"},
            {"structural_tag": {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]}},
        ]
        return [(await compiler.compile(params(**each))).backend for each in constraints]

    xgrammar, guidance = "xgrammar", "guidance"
    assert asyncio.run(backends()) == [
        *(xgrammar, guidance, guidance, guidance, xgrammar, xgrammar),
        *(xgrammar, xgrammar, xgrammar, guidance, guidance, xgrammar),
    ]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"properties": {"a": {"not": {"type": "string"}}}}}, "not"),
    ({"json": {"oneOf": [{"type": "object"}, {"type": "object", "required": ["a"]}]}}, "oneOf"),
    ({"json": {"$ref": "https://example.com/schema.json"}}, "ref"),
    ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "leads back to itself"),
    ({"json": {"type": "strin"}}, "strin"),
    ({"json": {"type": "string", "pattern": "(a"}}, "(a"),
    ({"json": {"uniqueItems": True}, "backend": "xgrammar"}, "uniqueItems"),
    ({"json": {"minimum": 3}, "backend": "outlines"}, "minimum"),
    ({"json": {"format": "date"}, "backend": "lm-format-enforcer"}, "format"),
    ({"json": {"type": "array", "items": {"const": 3}}, "backend": "lm-format-enforcer"}, "const"),
    ({"json_object": True, "backend": "lm-format-enforcer"}, "json_object is not supported"),
    ({"regex": "(?=a)b"}, "look"),
    ({"regex": "a)"}, "regex"),
    ({"grammar": "root ::= missing"}, "missing"),
    ({"structural_tag": {"type": "structural_tag", "format": {"type": "nothing"}}}, "nothing"),
    ({"structural_tag": {"structures": [{}], "triggers": []}}, "begin"),
    ({"grammar": 'root ::= "a"', "backend": "outlines"}, "grammar is not supported"),
]
"""Constraints, and what the message names."""


def test_what_no_library_can_do_is_refused_by_keyword(compilers: Compilers) -> None:
    async def refuse() -> None:
        compiler = compilers()
        for constraint, keyword in REFUSED:
            with pytest.raises(ParameterError) as caught:
                await compiler.compile(params(**constraint))
            assert caught.value.param == f"structured_outputs.{next(iter(constraint))}"
            assert keyword in str(caught.value)

    asyncio.run(refuse())


def test_options_choose_the_library_and_forbid_another(compilers: Compilers) -> None:
    both = params(json={"type": "string", "pattern": "^a+$", "maxLength": 4})
    assert asyncio.run(compilers(StructuredOutputsOptions(backend="guidance")).compile(params(**SMALL))).backend == (
        "guidance"
    )
    with pytest.raises(ParameterError, match="maxLength"):
        asyncio.run(compilers(StructuredOutputsOptions(disable_fallback=True)).compile(both))


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"json": "[" * 1000}, "valid JSON|levels deep"),
        ({"json": "[" * 100 + "]" * 100}, "levels deep"),
        ({"json": {"enum": ["x" * 300_000]}}, "300013 bytes"),
        ({"json": "3"}, "an object"),
        ({"regex": "a" * 20_000}, "at most 16384"),
        ({"choice": [str(i) for i in range(10_001)]}, "10001 entries"),
        ({"structural_tag": "[]"}, "an object"),
        ({"regex": "\ud800"}, "lone surrogate"),
    ],
)
def test_large_and_deep_constraints_never_reach_a_helper(
    compilers: Compilers, constraint: dict[str, Any], message: str
) -> None:
    compiler = compilers()
    with pytest.raises(ParameterError, match=message):
        asyncio.run(compiler.compile(params(**constraint)))
    assert compiler.helper_pids == []


def test_a_bomb_costs_itself_a_refusal_and_others_nothing(compilers: Compilers) -> None:
    """Other constraints are compiled meanwhile, and the bomb's process ends before its request is answered."""

    async def run() -> tuple[list[str], str, set[int], list[int]]:
        compiler = compilers(limit_cpu_seconds=1.5)
        await compiler.compile(params(**SMALL))
        first = set(compiler.helper_pids)
        bomb = asyncio.create_task(compiler.compile(params(**BOMB)))
        await asyncio.sleep(0)
        finished = []
        for number in range(3):
            await compiler.compile(params(json={"type": "integer", "minimum": number}))
            finished.append("done" if bomb.done() else "compiling")
        with pytest.raises(ParameterError) as caught:
            await bomb
        await compiler.compile(params(json={"type": "boolean"}))
        assert caught.value.param == "structured_outputs.choice"
        return finished, str(caught.value), first, compiler.helper_pids

    finished, message, before, after = asyncio.run(run())
    assert finished == ["compiling"] * 3
    assert "takes more than 1.5 s of processor time to compile; make it simpler" in message
    assert before.isdisjoint(after)
    assert not any(psutil.pid_exists(pid) for pid in before)


@pytest.fixture
def _stops_like_a_busy_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether a helper is stopped, so that a stop is what a host without a free core does to it."""
    monkeypatch.setattr("quire.frontend.helpers.helper.LOOK_SECONDS", 600.0)


@pytest.mark.usefixtures("_stops_like_a_busy_host")
def test_time_that_a_helper_waits_for_a_core_is_not_held_against_the_constraint(compilers: Compilers) -> None:
    """An extremely busy host: the helper is stopped for several times the limit of a compilation."""

    async def run() -> str:
        compiler = compilers(limit_cpu_seconds=0.5)
        await compiler.compile(params(**SMALL))
        [pid] = compiler.helper_pids
        os.kill(pid, signal.SIGSTOP)
        asked = asyncio.create_task(compiler.compile(params(regex="a+")))
        await asyncio.sleep(1.5)
        assert not asked.done()
        os.kill(pid, signal.SIGCONT)
        return (await asked).backend

    assert asyncio.run(run()) == "xgrammar"


def test_a_first_constraint_does_not_pay_for_the_start_of_its_helper(compilers: Compilers) -> None:
    """The limit for the constraint is lower here than the processor time of the imports."""
    assert asyncio.run(compilers(limit_cpu_seconds=0.1).compile(params(regex="a+"))).backend == "xgrammar"


async def _busy_helper(compiler: GrammarCompiler, asked: "asyncio.Task[Any]", but: int = 0) -> int:
    """The process of the helper that has the question; not `but`."""
    async with asyncio.timeout(60):
        while not (pids := [pid for pid in compiler.helper_pids if pid != but]):
            assert not asked.done()
            await asyncio.sleep(0.01)
    return pids[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_helper_that_somebody_ends_or_stops_is_replaced_once(number: signal.Signals, compilers: Compilers) -> None:
    """The constraint is not at fault, so it is not refused."""

    async def run() -> None:
        compiler = compilers()
        await compiler.compile(params(**SMALL))
        [first] = compiler.helper_pids
        os.kill(first, signal.SIGSTOP)  # it has not answered when it ends
        asked = asyncio.create_task(compiler.compile(params(regex="a+")))
        await asyncio.sleep(0)
        os.kill(first, number)
        if number == signal.SIGTERM:
            os.kill(first, signal.SIGCONT)
        assert (await asked).backend == "xgrammar"
        assert first not in compiler.helper_pids

        asked = asyncio.create_task(compiler.compile(params(regex="b+")))
        for _ in range(2):
            first = await _busy_helper(compiler, asked, first)
            os.kill(first, signal.SIGKILL)
        with pytest.raises(UnavailableError, match="twice"):
            await asked

    asyncio.run(run())


def test_a_small_constraint_does_not_wait_for_many_large_ones(compilers: Compilers) -> None:
    async def run() -> None:
        compiler = compilers()
        large = [{"choice": [f"{number}" + each for each in BOMB["choice"]]} for number in range(12)]
        slow = [asyncio.create_task(compiler.compile(params(**each))) for each in large]
        async with asyncio.timeout(60):
            while len(compiler.helper_pids) < 3:
                await asyncio.sleep(0.05)
        await compiler.compile(params(**SMALL))
        assert sum(task.done() for task in slow) < len(slow) / 2
        for task in slow:
            task.cancel()
        compiler.close()
        await asyncio.gather(*slow, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.usefixtures("_stops_like_a_busy_host")
def test_a_helper_that_never_runs_is_the_hosts_fault(compilers: Compilers) -> None:
    async def run() -> UnavailableError:
        compiler = compilers(backstop_seconds=1)
        asked = asyncio.create_task(compiler.compile(params(regex="a+")))
        while not (pids := compiler.helper_pids):
            await asyncio.sleep(0)
        [pid] = pids
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(UnavailableError) as caught:
            await asked
        assert not psutil.pid_exists(pid)
        return caught.value

    error = asyncio.run(run())
    assert "host is too busy" in str(error)
    assert "simpler" not in str(error)
    assert describe(error).headers["Retry-After"]


@pytest.mark.parametrize("limit_bytes", [40 * 2**20, 96 * 2**20])  # the next larger one is refused by another limit
def test_a_hunger_for_memory_ends_the_helper_alone(
    compilers: Compilers, limit_bytes: int, capfd: pytest.CaptureFixture[str]
) -> None:
    async def run() -> str:
        compiler = compilers(limit_bytes=limit_bytes, limit_cpu_seconds=60)
        with pytest.raises(ParameterError) as caught:
            await compiler.compile(params(regex="(((a|b){1,999}c){1,999}d){1,999}|" * 20 + "e"))
        await compiler.compile(params(**SMALL))
        return str(caught.value)

    message = asyncio.run(run())
    assert "memory" in message or "too complex" in message
    assert "Traceback" not in capfd.readouterr().err  # of the helper: the end was expected


def test_equal_constraints_are_compiled_once_and_kept(compilers: Compilers) -> None:
    async def run() -> tuple[bool, bool, bool]:
        compiler = compilers()
        first, second = await asyncio.gather(*(compiler.compile(params(**SMALL)) for _ in range(2)))
        other = await compiler.compile(params(**SMALL, disable_any_whitespace=True))
        compiler.close()  # nothing is compiled any more
        return first is second, await compiler.compile(params(**SMALL)) is first, other.key != first.key

    assert asyncio.run(run()) == (True, True, True)


def test_a_client_that_leaves_does_not_end_the_compilation_of_others(compilers: Compilers) -> None:
    async def run() -> str:
        compiler = compilers()
        impatient = asyncio.create_task(compiler.compile(params(**SMALL)))
        patient = asyncio.create_task(compiler.compile(params(**SMALL)))
        await asyncio.sleep(0.01)
        impatient.cancel()
        return (await patient).backend

    assert asyncio.run(run()) == "xgrammar"


def test_the_cache_is_bounded_in_bytes(compilers: Compilers) -> None:
    async def grammars() -> AsyncIterator[Any]:
        compiler = compilers()
        for number in range(6):
            yield await compiler.compile(params(json={"const": number}))

    async def run() -> None:
        made = [grammar async for grammar in grammars()]
        size = max(len(grammar.data) for grammar in made)
        cache = GrammarCache(3 * size)
        for grammar in made:
            cache.put(grammar)
            cache.get(made[0].key)  # used all the time
        assert cache.num_bytes <= 3 * size
        assert cache.get(made[0].key) is made[0]
        assert cache.get(made[1].key) is None
        assert cache.get(made[-1].key) is made[-1]

    asyncio.run(run())


def test_helpers_end_with_the_compiler(compilers: Compilers) -> None:
    async def run() -> list[int]:
        compiler = compilers()
        await compiler.compile(params(**SMALL))
        pids = compiler.helper_pids
        compiler.close()
        return pids

    [pid] = asyncio.run(run())
    assert not psutil.pid_exists(pid)


def test_without_tokenizer_or_end_token_nothing_is_constrained(tokenizer: Tokenizer) -> None:
    options = StructuredOutputsOptions()
    for given, ends, word in ((None, [2], "--skip-tokenizer-init"), (tokenizer, [], "end-of-sequence")):
        compiler = GrammarCompiler(given, vocab_size=320, end_token_ids=ends, options=options)
        with pytest.raises(ParameterError, match=word):
            asyncio.run(compiler.compile(params(**SMALL)))


@pytest.mark.parametrize("fields", [{}, {"regex": "a", "json_object": True}, {"json": False}, {"choice": []}])
def test_a_constraint_is_exactly_one(fields: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        params(**fields)
    assert (caught.value.param or "").startswith("structured_outputs")


def test_many_constraints_of_one_key_do_not_starve_anothers(compilers: Compilers) -> None:
    """Real helpers: a key's small constraint is compiled at once, and its large one with the next free helper."""
    enum = {"json": {"enum": [f"value {number}" for number in range(1000)]}}

    async def run() -> None:
        compiler = compilers(limit_cpu_seconds=1)

        async def compile_for(name: str, constraint: dict[str, Any]) -> None:
            set_caller(caller(name))
            await compiler.compile(params(**constraint))

        many = [{"choice": [f"{number}" + each for each in BOMB["choice"]]} for number in range(64)]
        slow = [asyncio.create_task(compile_for("many", each)) for each in many]
        async with asyncio.timeout(60):
            while len(compiler.helper_pids) < 3:
                await asyncio.sleep(0.05)
        await asyncio.gather(*(compile_for("one", each) for each in (SMALL, enum)))
        assert sum(task.done() for task in slow) < len(slow) / 2
        for task in slow:
            task.cancel()
        compiler.close()
        await asyncio.gather(*slow, return_exceptions=True)

    asyncio.run(run())


def caller(name: str) -> Caller:
    return Caller(
        name,
        weight=1.0,
        requests_per_minute=None,
        tokens_per_minute=None,
        limits=RateLimits(),
        count=lambda *_: None,
        is_alone=False,
    )


def test_a_tokenizer_that_is_gone_is_not_the_constraints_fault(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The client learns of no path; the log has it."""
    folder = tmp_path / "served"
    shutil.copytree(tokenizer.folder, folder)
    made = Compilers(Tokenizer.from_folder(folder))
    shutil.rmtree(folder)
    with pytest.raises(UnavailableError, match="can no longer read the model's tokenizer") as caught:
        asyncio.run(made().compile(params(**SMALL)))
    assert str(folder) not in str(caught.value)
    assert str(folder) in caplog.text
    made.made[0].close()


def test_constraints_that_come_at_once_are_all_compiled(compilers: Compilers) -> None:
    async def run() -> list[Any]:
        compiler = compilers()
        asked = (compiler.compile(params(json={"const": f"{number}"})) for number in range(100))
        return await asyncio.gather(*asked)

    made = asyncio.run(run())
    assert len({grammar.key for grammar in made}) == 100
    assert all(grammar.data for grammar in made)

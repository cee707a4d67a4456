"""No more than a key's limit is let through in any minute, and the wait that a refusal names is enough."""

import asyncio
import random

import pytest

from quire.core.errors import OverloadedError
from quire.frontend.keys.caller import Caller
from quire.frontend.keys.rate_limits import RateLimits


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_any_minute_has_the_limit_at_most() -> None:
    clock, rng = Clock(), random.Random(1)
    limits, passed = RateLimits(clock), []
    for _ in range(3000):
        clock.now += rng.random() / 2
        if not limits.take_now("a", "requests", 1, 20):
            passed.append(clock.now)
    assert len(passed) > 200
    for start in passed:
        assert sum(start <= each < start + 60 for each in passed) <= 20


@pytest.mark.parametrize(("amount", "limit"), [(1, 5), (30, 100), (500, 100)])
def test_who_waits_as_told_is_let_in(amount: int, limit: int) -> None:
    clock = Clock()
    limits = RateLimits(clock)
    for _ in range(20):
        seconds = limits.take_now("a", "tokens", amount, limit)
        if seconds:
            clock.now += seconds - 0.001
            assert limits.take_now("a", "tokens", amount, limit), "a shorter wait is not enough"
            clock.now += 0.002
            assert not limits.take_now("a", "tokens", amount, limit)


def test_keys_and_quantities_are_counted_apart() -> None:
    limits = RateLimits(Clock())
    assert not limits.take_now("a", "requests", 1, 1)
    assert limits.take_now("a", "requests", 1, 1)
    assert not limits.take_now("b", "requests", 1, 1)
    assert not limits.take_now("a", "tokens", 1, 1)


def test_outputs_count_against_the_next_prompt() -> None:
    clock = Clock()
    limits = RateLimits(clock)
    counted: list[tuple[str, str, int]] = []
    caller = Caller(
        "a",
        weight=1.0,
        requests_per_minute=None,
        tokens_per_minute=100,
        limits=limits,
        count=lambda *each: counted.append(each),
        is_alone=True,
    )

    async def use() -> None:
        await caller.admit_request()
        await caller.admit_tokens(10)
        caller.add_output(95)
        with pytest.raises(OverloadedError, match="The API key 'a' may use 100 tokens a minute") as caught:
            await caller.admit_tokens(10)
        clock.now += caught.value.retry_after_seconds
        await caller.admit_tokens(10)

    asyncio.run(use())
    assert counted == [
        ("a", "requests", 1),
        ("a", "prompt_tokens", 10),
        ("a", "generation_tokens", 95),
        ("a", "refused_tokens", 1),
        ("a", "prompt_tokens", 10),
    ]

"""Chooses an engine for each request: the one with the least load, less the worth of its cached prefix."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import NamedTuple

from msgspec import Struct

from quire.core.routing.engine_load import SEQUENCE_TOKENS
from quire.core.routing.prompt_blocks import BLOCK_TOKENS
from quire.core.routing.sent_prefixes import SentPrefixes

FEW = 16
"""The most engines with a prefix that are found bit by bit; more are found in one pass over all engines."""
_IS_ONE = bytes.maketrans(b"01", bytes([0, 1]))

FULL = math.inf
"""The load of an engine that takes no request."""


class RoutingRules(Struct, frozen=True, kw_only=True):
    """The router's settings.

    Attributes:
        block_tokens: tokens of a block of `prompt_blocks`.
        follows_prefixes: False routes by load alone.
        max_blocks: the blocks that are remembered of all engines together, at about 200 bytes each.
    """

    block_tokens: int = BLOCK_TOKENS
    follows_prefixes: bool = True
    max_blocks: int = 2**19


class Choice(NamedTuple):
    """An engine, and the tokens of the prompt that its cache probably has."""

    engine: int
    num_cached_tokens: int


class Router:
    """Sends each request to the engine e with the least

        cost(e) = load(e) - sqrt(2 * w * cached(e))

    in tokens. `load` is the engine's `EngineLoad`, where each sequence counts w = SEQUENCE_TOKENS. `cached` counts the
    tokens at the prompt's beginning that were sent to e before. The root is the economic order quantity (Harris 1913):
    a prefix of S tokens can be computed once on another engine, which then has it, too. If requests follow the prefix
    to one engine instead, each finds w more tokens of load than the one before. The q-th waits for w * q tokens, and
    all together for w * q**2 / 2. That equals the cost of the copy at w * q = sqrt(2 * w * S).

    Ties go to the engine with more cached tokens; engines without any alternate. The choice depends only on earlier
    calls. Its time grows with the blocks of the prompt, with the engines that have some of them, and, a little, with
    the number of engines.

    Args:
        num_engines: engines, numbered from 0. They take requests from their first `set_load` on.
    """

    def __init__(self, num_engines: int, rules: RoutingRules | None = None) -> None:
        self.rules = rules or RoutingRules()
        self._prefixes = SentPrefixes(num_engines, self.rules.max_blocks)
        self._loads: list[float] = [FULL] * num_engines
        self._next = 0  # the engine whose turn it is

    def set_load(self, engine: int, load: float) -> None:
        """Sets an engine's load, in tokens; `FULL` for one that takes no requests."""
        self._loads[engine] = load

    def set_capacity(self, engine: int, num_tokens: int) -> None:
        """Sets the number of tokens that an engine's cache can hold."""
        self._prefixes.set_capacity(engine, num_tokens // self.rules.block_tokens)

    def forget(self, engine: int) -> None:
        """Forgets an engine's prefixes, because its cache is empty."""
        self._prefixes.forget(engine)

    def choose(self, blocks: Sequence[int]) -> Choice | None:
        """The engine for a prompt of these blocks (`prompt_blocks`); None if no engine takes requests."""
        least = min(self._loads)
        if least == FULL:
            return None
        best, best_cost, best_depth = -1, least, 0
        for depth, engines in self._prefixes.matches(blocks if self.rules.follows_prefixes else ()):
            engine = min(_bits(engines), key=self._loads.__getitem__)
            cost = self._loads[engine] - math.sqrt(2 * SEQUENCE_TOKENS * depth * self.rules.block_tokens)
            if cost <= best_cost:  # a later one has more of the prompt
                best, best_cost, best_depth = engine, cost, depth
        if best < 0:
            best = self._take_turn(least)
        return Choice(best, best_depth * self.rules.block_tokens)

    def add_prompt(self, engine: int, blocks: Sequence[int]) -> int:
        """Notes that an engine was sent a prompt. Returns the number of its tokens that were sent there before."""
        return self._prefixes.add(engine, blocks) * self.rules.block_tokens

    def _take_turn(self, load: float) -> int:
        try:
            engine = self._loads.index(load, self._next)
        except ValueError:
            engine = self._loads.index(load)
        self._next = engine + 1
        return engine


def _bits(number: int) -> Iterable[int]:
    """The positions of the set bits, the lowest first."""
    if number.bit_count() <= FEW:
        return _few_bits(number)
    digits = f"{number:b}"[::-1].encode().translate(_IS_ONE)  # each step on a long integer would touch all of it
    return compress(range(len(digits)), digits)


def _few_bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest

"""Requests as they arrive at a large service: in bursts, with prefixes in common, of very different lengths."""

import math
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta, Struct

VOCABULARY = 100_000
"""Token ids of made-up prompts."""
SPREAD = 0.8
"""Standard deviation of the logarithms of lengths."""


class FleetLoad(Struct, frozen=True, kw_only=True):
    """The arriving requests. Lengths are log-normal around their medians."""

    rate: Annotated[float, Meta(gt=0, description="Requests a second for each engine.")] = 1.5
    burstiness: Annotated[
        float,
        Meta(gt=0, description="Shape of the gamma distribution of pauses: 1 is Poisson, less is bursts."),
    ] = 0.5
    seconds: Annotated[float, Meta(gt=0, description="Virtual seconds of arrivals.")] = 30.0
    families: Annotated[int, Meta(ge=1, description="Families of prompts, for each engine.")] = 2
    zipf: Annotated[
        float, Meta(ge=0, description="Exponent of the families' popularity: the k-th has a weight of k**-zipf.")
    ] = 1.0
    shared_len: Annotated[int, Meta(ge=0, description="Tokens that a family's prompts begin with, the median.")] = 1000
    suffix_len: Annotated[int, Meta(ge=1, description="Tokens of a prompt after its prefix, the median.")] = 200
    output_len: Annotated[int, Meta(ge=1, description="Output tokens, the median.")] = 80
    seed: Annotated[int, Meta(description="Of all that is drawn.")] = 0


class Arrival(NamedTuple):
    """A request, and whether an earlier one had its prefix."""

    at: float
    prompt: list[int]
    output_len: int
    num_repeated: int  # leading tokens of the prompt that an earlier request had


def arrivals(load: FleetLoad, num_engines: int, longest: int) -> Iterator[Arrival]:
    """The requests in the order of their arrival; prompt and output together have `longest` tokens at most."""
    random = np.random.default_rng(load.seed)
    num_families = load.families * num_engines
    weights = np.arange(1, num_families + 1) ** -load.zipf
    edges = np.cumsum(weights / weights.sum())
    prefix_lens = np.minimum(_lengths(random, load.shared_len, num_families), longest // 2)
    prefixes: dict[int, list[int]] = {}
    now, pause = 0.0, 1 / (load.rate * num_engines)
    while True:
        now += random.gamma(load.burstiness, pause / load.burstiness)
        if now > load.seconds:
            return
        family = min(int(np.searchsorted(edges, random.random())), num_families - 1)
        prefix = prefixes.get(family)
        num_repeated = 0 if prefix is None else len(prefix)
        if prefix is None:
            prefix = prefixes[family] = random.integers(0, VOCABULARY, prefix_lens[family]).tolist()
        suffix_len, output_len = (
            int(min(_lengths(random, median, 1)[0], longest // 4)) for median in (load.suffix_len, load.output_len)
        )
        suffix = random.integers(0, VOCABULARY, suffix_len).tolist()
        yield Arrival(now, prefix + suffix, max(1, output_len), num_repeated)


def _lengths(random: np.random.Generator, median: int, count: int) -> np.ndarray:
    if not median:
        return np.zeros(count, int)
    return np.maximum(1, random.lognormal(math.log(median), SPREAD, count)).astype(int)

"""Generators of conversations with two tool calls: both in one turn, or one after the result of the other."""

from __future__ import annotations

import random

from . import tasks as t
from . import tools
from . import words as w

AT_ONCE = ["{0} and {1}", "{0} {1}", "{0} Also, {1}", "{0} And {1}", "{0}, and {1}"]
IN_A_ROW = ["First: {0} Then: {1}", "{0} After that: {1}", "{0} Then: {1}", "First {0} and then {1}"]
BOTH_PLACES = [
    ("What is the weather in {0} and {1}?", "get_weather"), ("What is the weather in {0} and in {1}?", "get_weather"),
    ("How is the weather in {0} and {1}?", "get_weather"), ("Compare the weather in {0} and {1}.", "get_weather"),
    ("What's the weather like in {0} and {1}?", "get_weather"), ("Weather in {0} and {1}?", "get_weather"),
    ("What time is it in {0} and {1}?", "get_time"), ("What time is it in {0} and in {1}?", "get_time"),
    ("How many people live in {0} and {1}?", "get_population"),
]  # fmt: skip
SHORT_KINDS = [kind for kind in tools.KINDS if len(kind.params) == 1]


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _joined(pattern: str, first: str, second: str) -> str:
    """Two questions as one request."""
    bare = first.rstrip("?.") if pattern[3:7] in (" and", ", an") or " {0} and then" in pattern else first
    if "Also" in pattern or "And" in pattern or " and " in pattern:
        second = _lower_first(second)
    return pattern.format(_lower_first(bare) if pattern.startswith("First {") else bare, second)


Ask = tuple[tools.Offer, tools.Values]


def _same_tool(rng: random.Random, test: bool) -> tuple[list[tools.Offer], str, list[Ask], bool]:
    question, name = rng.choice(BOTH_PLACES)
    kind = next(kind for kind in tools.KINDS if name in kind.names)
    offer = tools._offer(kind, rng)
    places = [t.draw(lambda: (lambda p: (f"value {p}", p))(w.place(rng)), test) for _ in range(2)]
    offers = [offer]
    if rng.random() < 0.4:
        other = tools._offer(rng.choice(tools.KINDS), rng)
        if other.kind.texts != kind.texts and other.name != offer.name:
            offers.append(other)
    return offers, question.format(*places), [(offer, [place]) for place in places], True


def _two_tools(rng: random.Random, test: bool) -> tuple[list[tools.Offer], str, list[Ask], bool]:
    while True:
        kinds = rng.sample(tools.KINDS if rng.random() < 0.3 else SHORT_KINDS, 2)
        if rng.random() < 0.3:
            kinds = rng.sample(tools.KINDS[:3], 2)
        offers = [tools._offer(kind, rng) for kind in kinds]
        if offers[0].name != offers[1].name:
            break
    drawn = [tools._question(offer, rng, test) for offer in offers]
    at_once = rng.random() < 0.6
    request = _joined(rng.choice(AT_ONCE if at_once else IN_A_ROW), drawn[0][0], drawn[1][0])
    return offers, request, [(offer, values) for offer, (_, values) in zip(offers, drawn, strict=True)], at_once


def two_calls(rng: random.Random, test: bool) -> t.Sample:
    """A request for two things: both calls at once, the first or the second call of a row, or the answer."""
    offers, request, asks, at_once = (_same_tool if rng.random() < 0.45 else _two_tools)(rng, test)
    shown = [offer.schema for offer in rng.sample(offers, len(offers))]
    turns = [tools._call(offer, values, rng) for offer, values in asks]
    results = [tools._result(offer, values, rng) for offer, values in asks]
    sample = t.Sample("two calls", [t.user(request)], shown, last_only=True)
    both = {**turns[0], "tool_calls": turns[0]["tool_calls"] + turns[1]["tool_calls"]}
    answer = t.assistant(f"{results[0][1]} {results[1][1]}")
    roll = rng.random()
    if roll < 0.5:
        sample.messages += [both] if at_once else [turns[0]]
    elif roll < 0.8:
        sample.messages += [turns[0], results[0][0], turns[1]]
    elif at_once:
        sample.messages += [both, results[0][0], results[1][0], answer]
    else:
        sample.messages += [turns[0], results[0][0], turns[1], results[1][0], answer]
    return sample


def answer_after_two(rng: random.Random, test: bool) -> t.Sample:
    """The answer that is told from the results of two calls."""
    while True:
        sample = two_calls(rng, test)
        if "tool_calls" not in sample.messages[-1]:
            return sample

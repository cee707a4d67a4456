"""The training mixture and the evaluation sets."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from . import everyday as e
from . import tasks as t
from .tools import tool_task
from .two_tools import answer_after_two, two_calls

CATEGORIES = {
    "greetings": t.greeting,
    "facts": t.fact,
    "arithmetic": t.arithmetic,
    "words": t.word_task,
    "json": t.json_task,
    "tools": tool_task,
    "thinking": t.thinking,
}
EVERYDAY = {"loose facts": e.loose_fact, "enforced": e.enforced, "two calls": two_calls, "completions": e.completion}
EVERYDAY_SCORES = {"loose facts": "known facts at temperature 1", "enforced": "under a grammar",
                   "two calls": "two tool calls", "completions": "completions"}  # fmt: skip
LATER = {**EVERYDAY, "tools": tool_task, "one word": e.one_word, "short greetings": e.short_greeting,
         "answers": answer_after_two}  # fmt: skip
NEW_FIRST = {"loose facts": 26, "enforced": 26, "two calls": 14, "completions": 14, "before": 20}
NOTHING_LOST = {"loose facts": 20, "enforced": 26, "two calls": 16, "completions": 12, "before": 14, "tools": 16}
BOTH = {"loose facts": 14, "enforced": 22, "two calls": 18, "completions": 7, "before": 36, "tools": 3}
FINISH = {"loose facts": 9, "one word": 5, "enforced": 19, "two calls": 13, "answers": 7, "completions": 6,
          "before": 28, "tools": 4, "short greetings": 7, "long": 2}  # fmt: skip
ONE_WORD = FINISH | {"one word": 26, "loose facts": 12, "answers": 5, "short greetings": 5, "long": 1}
LENGTHENED_FROM, FINISH_FROM, ONE_WORD_FROM = 50, 83, 95
EVERYDAY_PHASES = [(14, NEW_FIRST), (LENGTHENED_FROM, NOTHING_LOST), (FINISH_FROM, BOTH),
                   (ONE_WORD_FROM, FINISH)]  # fmt: skip
BROAD = {"greetings": 7, "facts": 18, "arithmetic": 22, "words": 22, "json": 14, "tools": 16, "thinking": 13}
EXACT = {"greetings": 5, "facts": 30, "arithmetic": 55, "words": 34, "json": 18, "tools": 20, "thinking": 26}
CAREFUL = {"greetings": 7, "facts": 30, "arithmetic": 20, "words": 22, "json": 42, "tools": 42, "thinking": 45}


@dataclass(frozen=True)
class Phase:
    """A part of the training: the weights of the categories, and whether sums are answered without their step."""

    weights: dict[str, int]
    bare_sums: bool


OPENING = Phase(BROAD, bare_sums=True)
CLOSING = Phase(CAREFUL, bare_sums=False)
PHASES = [(10, OPENING), (15, Phase(EXACT, bare_sums=True)), (30, Phase(EXACT, bare_sums=False))]


def phase_of_pool(number: int) -> Phase:
    """The phase of a pool: all categories alike, then more short exact tasks, then sums with steps, then copying."""
    return next((phase for end, phase in PHASES if number < end), CLOSING)


def _drop_steps(sample: t.Sample) -> None:
    """Shorten the sums of a sample: `47 + 38 = 70 + 15 = 85` to `47 + 38 = 85`."""
    for message in sample.messages:
        if message["role"] == "assistant" and message.get("content"):
            message["content"] = re.sub(r"^(\d+ [+-] \d+) = .* = (-?\d+)$", r"\1 = \2", message["content"])


def _one(rng: random.Random, phase: Phase) -> t.Sample:
    while True:
        category = rng.choices(list(phase.weights), list(phase.weights.values()))[0]
        sample = CATEGORIES[category](rng, False)
        if phase.bare_sums:
            _drop_steps(sample)
            return sample
        if "bare sum" not in sample.tags:
            return sample


def _plain(rng: random.Random, phase: Phase) -> t.Sample:
    """A sample that may be anywhere in a conversation: without tools, and without thoughts, which later turns hide."""
    while True:
        sample = _one(rng, phase)
        if sample.category not in ("tools", "thinking") and sample.messages[0]["role"] != "system":
            return sample


def _turns_before(rng: random.Random, share: float = 0.15) -> int:
    """The number of exchanges before a sample: mostly none, in a share of them a few, rarely many."""
    roll = rng.random()
    if roll < 0.012:
        return rng.randint(8, 34)
    return rng.choice((1, 1, 2, 2, 3, 4, 6)) if roll < share else 0


def _lengthen(sample: t.Sample, turns: int, rng: random.Random, phase: Phase) -> None:
    """Insert other exchanges before a sample, after its system message."""
    first = int(sample.messages[0]["role"] == "system")
    for _ in range(turns):
        sample.messages[first:first] = _plain(rng, phase).messages


def training_sample(rng: random.Random, phase: Phase, system_share: float = 0.25) -> t.Sample:
    """One training conversation: mostly a single exchange, some with more turns before it or a system message."""
    sample = _one(rng, phase)
    _lengthen(sample, _turns_before(rng), rng, phase)
    if rng.random() < system_share and sample.messages[0]["role"] != "system":
        sample.messages.insert(0, {"role": "system", "content": rng.choice(t.SYSTEM_PROMPTS)})
    return sample


def _long_conversation(rng: random.Random) -> t.Sample:
    """One kind of exchange many times, then another; only the last reply is learned."""
    often = rng.choice(["arithmetic", "arithmetic", "facts", "words", "greetings"])
    phase = Phase({often: 1}, bare_sums=rng.random() < 0.7)
    last = _plain(rng, Phase({"words": 4, "facts": 3, "arithmetic": 2, "greetings": 2}, bare_sums=False))
    _lengthen(last, rng.randint(30, 200), rng, phase)
    last.last_only = True
    return last


def everyday_sample(rng: random.Random, number: int) -> t.Sample:
    """One sample of a pool of the second stage: a new ability, or something of the first stage.

    Later pools have more single calls, which are forgotten beside two calls, then more of the first stage and longer
    conversations; the last ones have more short greetings, answers after two calls, and a few very long conversations,
    then more answers in one word.
    """
    weights = next((weights for end, weights in EVERYDAY_PHASES if number < end), ONE_WORD)
    category = rng.choices(list(weights), list(weights.values()))[0]
    if category == "before":
        return training_sample(rng, CLOSING)
    if category == "long":
        return _long_conversation(rng)
    sample = LATER[category](rng, False)
    if number >= LENGTHENED_FROM and not sample.plain:
        _lengthen(sample, _turns_before(rng, 0.3), rng, CLOSING)
    return sample


def evaluation_set(category: str, count: int, seed: int) -> list[t.Sample]:
    """Distinct held-out items of one category; `conversations` are items of all categories after other exchanges."""
    rng, seen, samples = random.Random(f"{seed} {category}"), set(), []
    while len(samples) < count:
        name = rng.choice(list(CATEGORIES)) if category == "conversations" else category
        sample = {**CATEGORIES, **EVERYDAY}[name](rng, True)
        if category == "conversations":
            _lengthen(sample, rng.randint(1, 8), rng, CLOSING)
        key = repr((sample.messages, sample.tools))
        if key not in seen and "bare sum" not in sample.tags:
            seen.add(key)
            samples.append(sample)
    return samples

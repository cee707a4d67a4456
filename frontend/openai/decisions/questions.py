"""Questions whose answers are labels, as the model reads them: a letter, a digit, or yes or no for each option."""

import math
import string
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from quire.core.errors import ParameterError

LETTERS = tuple(string.ascii_uppercase)
MAX_QUESTIONS = 64
"""Most questions of one request, as in vLLM."""


class Option(Struct, frozen=True):
    """The meaning of a label."""

    name: str
    description: str | None = None


class Question(Struct, frozen=True, kw_only=True):
    """One question, with a label for each option."""

    instructions: str
    labels: tuple[str, ...]
    lines: tuple[str, ...]  # the meaning of each label
    reply: str  # the form of the reply, for the prompt

    def prompt(self, state: str) -> str:
        """The turn that asks about `state`. Its words are vLLM's: others would get other probabilities."""
        body = "\n".join((*self.lines, self.reply))
        asked = f"Question: {self.instructions}\n{body}" if self.instructions else body
        return f"{state}\n\n{asked}"


def choice(instructions: str, options: Sequence[Option], where: str) -> Question:
    """A question with a letter for each option.

    Raises:
        ParameterError: there are more options than letters; `where` names the question.
    """
    if len(options) > len(LETTERS):
        raise ParameterError(f"{where} has {len(options)} options; there may be {len(LETTERS)}.", param="questions")
    labels = LETTERS[: len(options)]
    lines = [
        f"{label}: {each.name} - {each.description}" if each.description else f"{label}: {each.name}"
        for label, each in zip(labels, options, strict=True)
    ]
    return Question(
        instructions=instructions,
        labels=labels,
        lines=tuple(lines),
        reply="Answer with the letter of one option only.",
    )


def score(instructions: str, levels: Sequence[str], where: str) -> Question:
    """A question with a digit for each level of a scale, from 0. Errors are those of `choice`."""
    if len(levels) > len(string.digits):
        raise ParameterError(f"{where} has {len(levels)} levels; there may be {len(string.digits)}.", param="questions")
    labels = tuple(string.digits[: len(levels)])
    return Question(
        instructions=instructions,
        labels=labels,
        lines=tuple(f"{label}: {level}" for label, level in zip(labels, levels, strict=True)),
        reply="Answer with the number of one level only.",
    )


def yes_or_no(instructions: str, true: str | None, false: str | None) -> Question:
    """A question that is answered with yes or no, which may be described."""
    lines = [f"{label}: {told}" if told else label for label, told in (("yes", true), ("no", false))]
    return Question(
        instructions=instructions, labels=("yes", "no"), lines=tuple(lines), reply="Answer with yes or no only."
    )


class LabelRead(Struct, frozen=True, kw_only=True):
    """The probabilities that the model gives to a question's labels."""

    probabilities: list[float]  # among the labels: they sum to 1
    label_mass: float  # of all labels among all tokens
    argmax_is_label: bool
    input_tokens: int
    output_tokens: int
    cached_tokens: int

    @property
    def best(self) -> int:
        """The likeliest label; the first of equal ones."""
        return self.probabilities.index(max(self.probabilities))

    @property
    def confidence(self) -> float:
        """The probability of the likeliest label among all tokens."""
        return self.probabilities[self.best] * self.label_mass

    @property
    def mean(self) -> float:
        """The expected index of a label."""
        return sum(index * each for index, each in enumerate(self.probabilities))


def among(logprobs: Sequence[float]) -> list[float]:
    """Probabilities of tokens, normalized among these."""
    highest = max(logprobs)
    odds = [math.exp(each - highest) for each in logprobs]
    return [each / sum(odds) for each in odds]


def as_text(value: Any) -> str:
    """A client's value as text for the model; empty for None."""
    return "" if value is None else str(value)

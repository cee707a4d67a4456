"""The questions of /v1/systemone, and the answers to them."""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from quire.core.errors import ParameterError
from quire.frontend.openai.decisions.questions import LabelRead, Option, Question, as_text, choice, score, yes_or_no

_FIELDS = {"type", "instructions", "criteria"}


class NamedQuestion(Struct, frozen=True):
    """A question, and the function that turns a read of its labels into an answer."""

    question: Question
    answer: Callable[[LabelRead], dict[str, Any]]


def read_question(name: str, given: dict[str, Any]) -> NamedQuestion:
    """The question with a client's name. Raises ParameterError."""
    where = f"questions.{name}"
    if not name:
        raise ParameterError("questions must have names.", param="questions")
    if unknown := sorted(set(given) - _FIELDS):
        raise ParameterError(f"{where} has unknown fields: {', '.join(unknown)}.", param="questions")
    instructions, criteria = as_text(given.get("instructions")), given.get("criteria")
    match given.get("type"):
        case "choice":
            return _choice(instructions, criteria, where)
        case "noul":
            return _yes_or_no(instructions, criteria, where)
        case "score":
            return _score(instructions, criteria, where)
        case kind:
            raise ParameterError(f"{where}.type must be choice, noul or score, got {kind!r}.", param="questions")


def _choice(instructions: str, criteria: Any, where: str) -> NamedQuestion:
    if not isinstance(criteria, dict) or not criteria:
        raise ParameterError(
            f"{where}.criteria must map the options to their descriptions, or to null.", param="questions"
        )
    options = [Option(name, None if told is None else str(told)) for name, told in criteria.items()]
    names = [each.name for each in options]

    def answer(read: LabelRead) -> dict[str, Any]:
        probabilities = dict(zip(names, read.probabilities, strict=True))
        return {
            "type": "choice",
            "choice": names[read.best],
            "probabilities": probabilities,
            "confidence": read.confidence,
        }

    return NamedQuestion(choice(instructions, options, where), answer)


def _yes_or_no(instructions: str, criteria: Any, where: str) -> NamedQuestion:
    if criteria is not None and (not isinstance(criteria, dict) or not criteria.keys() <= {"true", "false"}):
        raise ParameterError(f"{where}.criteria may describe true and false.", param="questions")
    told = {side: None if text is None else str(text) for side, text in (criteria or {}).items()}

    def answer(read: LabelRead) -> dict[str, Any]:
        yes, no = read.probabilities
        return {
            "type": "noul",
            "noul": yes,
            "probabilities": {"yes": yes, "no": no},
            "confidence": read.confidence,
        }

    return NamedQuestion(yes_or_no(instructions, told.get("true"), told.get("false")), answer)


def _score(instructions: str, criteria: Any, where: str) -> NamedQuestion:
    if not isinstance(criteria, list) or len(criteria) < 2:
        raise ParameterError(f"{where}.criteria must list the levels, two or more.", param="questions")
    levels = list(map(str, criteria))
    if len(set(levels)) < len(levels):
        raise ParameterError(f"{where}.criteria must differ.", param="questions")

    def answer(read: LabelRead) -> dict[str, Any]:
        return {
            "type": "score",
            "score": read.mean,
            "legend": {str(index): level for index, level in enumerate(levels)},
            "probabilities": {str(index): each for index, each in enumerate(read.probabilities)},
            "confidence": read.confidence,
        }

    return NamedQuestion(score(instructions, levels, where), answer)

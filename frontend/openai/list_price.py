"""What lists cost that every completion of a request holds for itself: priced before the first is opened."""

from typing import TYPE_CHECKING

from quire.core.errors import ParameterError

if TYPE_CHECKING:
    from quire.frontend.openai.schema import GenerationRequest

MAX_LISTED = 2**22
"""Token ids, and characters of words, times completions."""

MAX_STOP_CHARACTERS = 2**18
"""Characters of stop strings times completions: each is looked for in every piece of text."""


def check_lists(request: "GenerationRequest", num_completions: int) -> None:
    """Refuses lists that are too long for so many completions.

    Raises:
        ParameterError: the field, by name.
    """
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    _check("stop", sum(map(len, stops)), num_completions, MAX_STOP_CHARACTERS, "characters")
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
        _check(name, len(getattr(request, name) or ()), num_completions, MAX_LISTED, "token ids")
    _check("bad_words", sum(map(len, request.bad_words or ())), num_completions, MAX_LISTED, "characters")


def _check(name: str, size: int, num_completions: int, most: int, unit: str) -> None:
    if size * num_completions > most:
        raise ParameterError(
            f"{name} holds {size} {unit}, which for {num_completions} completion(s) is more than {most}; "
            "shorten it, or ask for fewer at once.",
            param=name,
        )

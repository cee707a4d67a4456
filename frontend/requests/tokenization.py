"""Options of tokenization, as vLLM's methods take them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.core.errors import ParameterError
from quire.frontend.text.truncation import Truncation


class Tokenization(NamedTuple):
    """Options that turn a prompt of text into token ids."""

    add_special_tokens: bool = True
    truncation: Truncation | None = None  # None refuses a prompt that is too long

    @classmethod
    def read(cls, options: Mapping[str, Any] | None, *, add_special_tokens: bool = True) -> "Tokenization":
        """Reads `tokenization_kwargs`.

        Args:
            options: `add_special_tokens`, `truncate_prompt_tokens` or `truncation` with `max_length`, and
                `truncation_side`.
            add_special_tokens: the default.

        Raises:
            ParameterError: an option has no effect here, by name.
        """
        rest = dict(options or {})
        special = rest.pop("add_special_tokens", add_special_tokens)
        most, length, cut = (rest.pop(name, None) for name in ("truncate_prompt_tokens", "max_length", "truncation"))
        side = rest.pop("truncation_side", None)
        for name in ("padding", "pad_prompt_tokens"):
            if rest.get(name) in (None, False, "do_not_pad"):
                rest.pop(name, None)
        if rest:
            raise ParameterError(
                f"tokenization_kwargs takes add_special_tokens, truncate_prompt_tokens, truncation, max_length and "
                f"truncation_side; not {sorted(rest)[0]!r}.",
                param="tokenization_kwargs",
            )
        if cut not in (None, True, False, "longest_first", "do_not_truncate"):
            raise ParameterError(f"truncation must be True or False, got {cut!r}.", param="tokenization_kwargs")
        for name, value in (("truncate_prompt_tokens", most), ("max_length", length)):
            if value is not None and type(value) is not int:
                raise ParameterError(f"{name} must be a whole number, got {value!r}.", param="tokenization_kwargs")
        if side not in (None, "left", "right"):
            raise ParameterError(f"truncation_side must be left or right, got {side!r}.", param="tokenization_kwargs")
        if cut in (True, "longest_first"):
            most = -1 if length is None else length
        elif length is not None:
            raise ParameterError(
                "max_length needs truncation=True; set max_model_len to limit prompts.", param="tokenization_kwargs"
            )
        name = "truncate_prompt_tokens" if length is None else "max_length"
        return cls(bool(special), None if most is None else Truncation(most, side, name=name))

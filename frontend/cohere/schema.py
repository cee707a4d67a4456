"""Bodies of requests, as Cohere's API has them."""

from typing import Any, Literal

from msgspec import Struct

from quire.core.errors import ParameterError
from quire.frontend.pooling.fields import MAX_INPUTS
from quire.frontend.requests.request_fields import check_priority
from quire.frontend.text.truncation import Truncation

EmbeddingType = Literal["float", "binary", "ubinary", "base64"]


class Part(Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of an input."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: Any = None  # refused


class Input(Struct, forbid_unknown_fields=True, kw_only=True):
    """An input in parts."""

    content: list[Part]


class EmbedRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v2/embed."""

    model: str | None = None
    input_type: str | None = None  # the name of a text that is written before each input
    texts: list[str] | None = None
    images: Any = None  # refused
    inputs: list[Input] | None = None
    output_dimension: int | None = None
    embedding_types: list[EmbeddingType] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: int | None = None
    priority: int | None = None

    def check(self) -> None:
        """Raises ParameterError for a field that cannot be honoured, by name."""
        check_priority(self.priority)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ParameterError(f"max_tokens must be at least 1, got {self.max_tokens}.", param="max_tokens")

    @property
    def types(self) -> list[EmbeddingType]:
        """The forms of vectors that the client wants."""
        return self.embedding_types or ["float"]

    @property
    def truncation(self) -> Truncation | None:
        """The cut of a text that is too long; None refuses it."""
        if self.truncate == "NONE":
            return None
        most = -1 if self.max_tokens is None else self.max_tokens
        return Truncation(most, "left" if self.truncate == "START" else None, text_side="right", name="max_tokens")

    def inputs_in_texts(self) -> list[str]:
        """The inputs.

        Raises:
            ParameterError: there is not exactly one list of them, it is empty or too long, or has an image.
        """
        given = [name for name in ("texts", "images", "inputs") if getattr(self, name) is not None]
        if len(given) != 1 or not getattr(self, given[0]):
            raise ParameterError("The body must have texts or inputs, one of them, not empty.", param="texts")
        if self.images is not None:
            raise ParameterError("images are refused: this server takes and gives text only.", param="images")
        texts = self.texts if self.texts is not None else [_text_of(each) for each in self.inputs or []]
        if len(texts) > MAX_INPUTS:
            raise ParameterError(
                f"{given[0]} has {len(texts)} entries, but one request may have {MAX_INPUTS}; send several requests.",
                param=given[0],
            )
        return texts


def _text_of(given: Input) -> str:
    if any(part.type != "text" or part.text is None for part in given.content):
        raise ParameterError(
            "inputs must have parts of type text, each with text: this server takes and gives text only.",
            param="inputs",
        )
    return "".join(part.text or "" for part in given.content)

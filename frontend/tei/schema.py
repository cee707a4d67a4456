"""Bodies of requests, as Text Embeddings Inference has them."""

from typing import Any, Literal

from msgspec import Raw, Struct

from quire.core.errors import ParameterError
from quire.frontend.text.truncation import Truncation

Inputs = str | list[int | str | list[int]]
Direction = Literal["Left", "Right", "left", "right"]


class Cut(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields about texts that are too long."""

    truncate: bool | None = None
    truncation_direction: Direction | None = None  # the end that is cut off

    @property
    def truncation(self) -> Truncation | None:
        """The cut to the model's length; None refuses what is too long."""
        if not self.truncate:
            return None
        return Truncation(-1, text_side="left" if (self.truncation_direction or "").lower() == "left" else "right")


class TextsBody(Cut, kw_only=True):
    """Fields of bodies with texts that become vectors."""

    inputs: Inputs
    prompt_name: str | None = None  # of a text that is written before each input


class EmbedRequest(TextsBody, kw_only=True):
    """Body of POST /embed."""

    normalize: bool | None = None  # true
    dimensions: int | None = None


class EmbedAllRequest(TextsBody, kw_only=True):
    """Body of POST /embed_all."""


class EmbedSparseRequest(TextsBody, kw_only=True):
    """Body of POST /embed_sparse."""


class PredictRequest(Cut, kw_only=True):
    """Body of POST /predict: a text, a pair of texts, or a list of lists with one text or two."""

    inputs: str | list[str | list[str]]
    raw_scores: bool | None = None

    @property
    def is_batch(self) -> bool:
        """True if `inputs` is a list of inputs."""
        return isinstance(self.inputs, list) and any(isinstance(each, list) for each in self.inputs)

    def sequences(self) -> list[list[str]]:
        """Each input: one text, or two.

        Raises:
            ParameterError: an input has neither one text nor two.
        """
        given: list[Any] = [self.inputs] if isinstance(self.inputs, str) else self.inputs
        batch = given if self.is_batch else [given]
        if not batch or not all(isinstance(each, list) and len(each) in (1, 2) for each in batch):
            raise ParameterError(
                "inputs must be a text, a pair of texts, or a list of lists with one text or two each.", param="inputs"
            )
        return batch


class RerankRequest(Cut, kw_only=True):
    """Body of POST /rerank."""

    query: str
    texts: list[str]
    raw_scores: bool | None = None
    return_text: bool | None = None


class SimilarityInput(Struct, forbid_unknown_fields=True, kw_only=True):
    """A sentence, and those that it is compared with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(Cut, kw_only=True):
    """Options of a comparison."""

    prompt_name: str | None = None


class SimilarityRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /similarity."""

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /tokenize."""

    inputs: str | list[str]
    add_special_tokens: bool | None = None  # true
    prompt_name: str | None = None  # of a text that is written before each input


class DecodeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /decode."""

    ids: list[int | list[int]]
    skip_special_tokens: bool | None = None  # true

    def rows(self) -> list[list[int]]:
        """The lists of ids; ids by themselves are one list.

        Raises:
            ParameterError: ids and lists of them are mixed.
        """
        lists = [each for each in self.ids if isinstance(each, list)]
        ids = [each for each in self.ids if isinstance(each, int)]
        if lists and ids:
            raise ParameterError("ids must be token ids, or lists of them, not a mixture.", param="ids")
        return [ids] if ids else lists


class VertexRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /vertex: bodies of the model's own route."""

    instances: list[Raw]

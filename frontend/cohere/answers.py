"""Response bodies, as Cohere's API has them."""

import builtins
from typing import Literal

from msgspec import UNSET, Struct, UnsetType


class ApiVersion(Struct):
    """The version of the API that an answer is of."""

    version: str = "2"


class BilledUnits(Struct):
    """Tokens of a request."""

    input_tokens: int
    image_tokens: int = 0


class Meta(Struct):
    """Facts beside the vectors."""

    api_version: ApiVersion
    billed_units: BilledUnits


class Embeddings(Struct, kw_only=True):
    """The vectors in the forms that the client wants, a row for each input."""

    float: list[list[builtins.float]] | UnsetType = UNSET  # the field hides the type of its name
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET
    base64: list[str] | UnsetType = UNSET


class EmbedResponse(Struct, kw_only=True):
    """Answer of POST /v2/embed."""

    id: str
    embeddings: Embeddings
    texts: list[str] | UnsetType = UNSET
    meta: Meta
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"

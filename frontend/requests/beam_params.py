"""Parameters of a beam search."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from quire.core.errors import ParameterError
from quire.core.wire.field_types import check_types, read_numbers
from quire.core.wire.structured_outputs import StructuredOutputsParams

MAX_BEAM_WIDTH = 256
EarlyStopping = bool | Literal["never"]


class BeamSearchParams(Struct):
    """Parameters of a beam search, with vLLM's names, order and defaults. Quire's own come last.

    Raises:
        ParameterError: a value is out of its range; `param` names the field.
    """

    beam_width: Annotated[int, Meta(description="Beams, and outputs.")]
    max_tokens: Annotated[int, Meta(description="Most tokens of an output.")]
    ignore_eos: Annotated[bool, Meta(description="Go on past the end-of-sequence token.")] = False
    temperature: Annotated[float, Meta(description="Nothing is drawn, so only 0 and 1 are taken.")] = 0.0
    length_penalty: Annotated[
        float, Meta(description="A score is the sum of log-probabilities, over the length to this power.")
    ] = 1.0
    include_stop_str_in_output: Annotated[bool, Meta(description="Keep the token that ended an output.")] = False
    structured_outputs: Annotated[
        StructuredOutputsParams | None, Meta(description="Only None: the beams follow no grammar.")
    ] = None
    skip_special_tokens: Annotated[bool, Meta(description="Leave special tokens out of the text.")] = True
    watermarking: Annotated[bool | None, Meta(description="Only None and false: there is no watermark.")] = None
    early_stopping: Annotated[
        EarlyStopping,
        Meta(
            description="True ends as soon as beam_width outputs are complete; otherwise the search goes on until no "
            "other can become better."
        ),
    ] = False
    stop_token_ids: Annotated[list[int], Meta(description="Token ids that end an output.")] = []
    shown_special_token_ids: Annotated[
        list[int], Meta(description="Special tokens that stay in the text when the others are left out.")
    ] = []

    def __post_init__(self) -> None:
        read_numbers(self)
        check_types(self)
        if type(self.beam_width) is not int or not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise ParameterError(
                f"beam_width must be between 1 and {MAX_BEAM_WIDTH}, got {self.beam_width}.", param="beam_width"
            )
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise ParameterError(f"max_tokens must be at least 1, got {self.max_tokens}.", param="max_tokens")
        if self.temperature not in (0, 1):
            raise ParameterError(
                f"temperature must be 0 or 1 with beam search, which draws nothing; got {self.temperature}.",
                param="temperature",
            )
        if not -100 <= self.length_penalty <= 100:
            raise ParameterError(
                f"length_penalty must be between -100 and 100, got {self.length_penalty}.", param="length_penalty"
            )
        if self.structured_outputs is not None:
            raise ParameterError(
                "structured_outputs do not go with beam search, whose beams follow no grammar; use SamplingParams.",
                param="structured_outputs",
            )
        if self.watermarking:
            raise ParameterError(
                "watermarking is not supported: there is no watermark. Leave it out.", param="watermarking"
            )
        if self.early_stopping not in (True, False, "never"):
            raise ParameterError(
                f"early_stopping must be true, false or never, got {self.early_stopping!r}.", param="early_stopping"
            )

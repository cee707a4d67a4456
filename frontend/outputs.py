"""The output of a request: texts, token ids, log-probabilities and times, or vectors and scores, with vLLM's attribute
names."""

import sys
from array import array
from collections.abc import Iterable, Iterator, MutableSequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar, overload

from msgspec import Struct

if TYPE_CHECKING:
    import numpy as np

    from quire.frontend.checkpoint.adapters import LoRARequest


class Logprob(Struct):
    """One token's log-probability at one position.

    `rank` is 1-based within the whole distribution, and None for a token of the request's `logprob_token_ids`.
    `decoded_token` is None if the request asked for no text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Row = dict[int, Logprob]
"""Log-probabilities at one position, by token id."""


class FlatLogprobs(MutableSequence[Row]):
    """Rows of log-probabilities in a few long lists, which spare the garbage collector many small objects.

    It reads like a list of rows, and grows at its end alone. An absent row reads as an empty one.

    Attributes:
        start_indices, end_indices: for each row, the part of the other lists that is its own.
        token_ids, logprobs, ranks, decoded_tokens: the entries of all rows, one after the other.
    """

    def __init__(self) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []

    @classmethod
    def of(cls, rows: Iterable[Row | None]) -> "FlatLogprobs":
        """The rows, flat."""
        flat = cls()
        for row in rows:
            flat.append(row)
        return flat

    def append(self, value: Row | None) -> None:
        """Adds a row at the end."""
        self.start_indices.append(len(self.logprobs))
        for token_id, entry in (value or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.logprobs))

    def copy(self) -> "FlatLogprobs":
        """A copy that does not grow with this one."""
        copied = FlatLogprobs()
        for name, values in vars(self).items():
            setattr(copied, name, values.copy())
        return copied

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...

    def __getitem__(self, index: int | slice) -> "Row | FlatLogprobs":
        if isinstance(index, slice):
            return FlatLogprobs.of([self[place] for place in range(*index.indices(len(self)))])
        span = slice(self.start_indices[index], self.end_indices[index])
        entries = map(Logprob, self.logprobs[span], self.ranks[span], self.decoded_tokens[span])
        return dict(zip(self.token_ids[span], entries, strict=True))

    def __iter__(self) -> Iterator[Row]:
        return (self[place] for place in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlatLogprobs) and vars(self) == vars(other)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("FlatLogprobs grow at the end alone: a row cannot be changed.")

    def __delitem__(self, index: Any) -> None:
        raise TypeError("FlatLogprobs grow at the end alone: a row cannot be removed.")

    def insert(self, index: int, value: Row | None) -> None:
        """Raises TypeError: rows are appended."""
        raise TypeError("FlatLogprobs grow at the end alone: use append.")


SampleLogprobs = FlatLogprobs | list[Row]
PromptLogprobs = FlatLogprobs | list[Row | None]


class CompletionOutput(Struct, kw_only=True):
    """One of a request's `n` completions.

    With `RequestOutputKind.DELTA`, `text`, `token_ids` and `logprobs` contain only the part since the last output.
    `cumulative_logprob` always covers the whole completion.

    The class attributes are fields of vLLM's that are None for what Quire does.
    """

    routed_experts: ClassVar[None] = None
    lora_request: ClassVar[None] = None
    sampling_mask: ClassVar[None] = None
    spec_decode_metrics: ClassVar[None] = None
    weight_versions: ClassVar[None] = None

    index: int
    text: str = ""
    token_ids: list[int] = []
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None  # per token: the sampled one first, then the likeliest
    finish_reason: str | None = None  # stop, length, abort or error
    stop_reason: int | str | None = None  # the stop string or stop token id that ended the completion; None for EOS

    def finished(self) -> bool:
        """True if this completion has ended."""
        return self.finish_reason is not None


class RequestTimes(Struct, kw_only=True):
    """The times of a request's events: CLOCK_MONOTONIC seconds, except `arrival_time` (Unix seconds).

    A field is None until its event has happened. With n > 1, the earliest completion sets the first times, and the last
    completion sets `finished_time`.
    """

    arrival_time: float
    queued_time: float | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    time_in_queue: float | None = None  # seconds between queueing and the first step
    first_token_latency: float | None = None  # seconds from arrival
    num_generation_tokens: int = 0
    num_preemptions: int = 0


class RequestOutput(Struct, kw_only=True):
    """All completions of one prompt, so far or at the end.

    The class attributes are fields of vLLM's that are None for what Quire does.
    """

    num_cache_creation_tokens: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    ec_transfer_params: ClassVar[None] = None

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: PromptLogprobs | None = None  # per prompt token; None for the first
    prompt_token_id_logprobs: "np.ndarray | None" = None  # [scored positions, ids]; -inf where a row named no id
    num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache
    metrics: RequestTimes | None = None  # with DELTA, in the last output only
    lora_request: "LoRARequest | None" = None  # the adapter that the program gave; None: none
    encoder_prompt: str | None = None  # of a model with an encoder; the prompt is the decoder's
    encoder_prompt_token_ids: list[int] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, and of the encoder's."""
        return len(self.prompt_token_ids) + len(self.encoder_prompt_token_ids or ())


# --------------------------------------------------------------------------------------------------- vectors and scores


class PoolingOutput(Struct, frozen=True, eq=False):
    """The vector of a text, or those of its tokens.

    Attributes:
        values: float32, little-endian, row by row.
        shape: [width], or [number of vectors, width].
    """

    values: bytes
    shape: tuple[int, ...]

    @classmethod
    def of(cls, rows: Iterable[float]) -> "PoolingOutput":
        """One vector of these numbers."""
        values = array("f", rows)
        return cls(_little_endian(values), (len(values),))

    @property
    def array(self) -> "np.ndarray":
        """The values as a NumPy array of `shape`, read-only."""
        import numpy as np  # imported here, because most servers do without

        return np.frombuffer(self.values, "<f4").reshape(self.shape)

    @property
    def data(self) -> Any:
        """The values as a tensor of torch, which is imported for it: a frontend itself does without."""
        return resolve_name("torch:from_numpy")(self.array.copy())

    def tolist(self) -> list[float]:
        """All values, row by row."""
        values = array("f", self.values)
        if sys.byteorder == "big":
            values.byteswap()
        return values.tolist()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and (self.values, self.shape) == (other.values, other.shape)

    def __repr__(self) -> str:
        return f"PoolingOutput(shape={list(self.shape)})"


def _little_endian(values: "array[float]") -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


class EmbeddingOutput(Struct, frozen=True):
    """The vector of a text."""

    pooled: PoolingOutput

    @classmethod
    def from_base(cls, pooling_output: PoolingOutput) -> "EmbeddingOutput":
        """Raises ValueError for several vectors."""
        return cls(_one_vector(pooling_output))

    @property
    def embedding(self) -> list[float]:
        """The vector's elements; made anew by each call."""
        return self.pooled.tolist()

    @property
    def hidden_size(self) -> int:
        return self.pooled.shape[0]

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"


class ClassificationOutput(Struct, frozen=True):
    """The probabilities of a text's classes."""

    probs: list[float]

    @classmethod
    def from_base(cls, pooling_output: PoolingOutput) -> "ClassificationOutput":
        """Raises ValueError for those of several tokens."""
        return cls(_one_vector(pooling_output).tolist())

    @property
    def num_classes(self) -> int:
        return len(self.probs)

    def __repr__(self) -> str:
        return f"ClassificationOutput(num_classes={self.num_classes})"


class ScoringOutput(Struct, frozen=True):
    """How alike the texts of a pair are, or how well the second one answers the first."""

    score: float

    @classmethod
    def from_base(cls, pooling_output: PoolingOutput) -> "ScoringOutput":
        """Raises ValueError for more than one number."""
        values = pooling_output.tolist()
        if len(values) != 1:
            raise ValueError(f"A score is one number, not {len(values)}.")
        return cls(values[0])


def _one_vector(output: PoolingOutput) -> PoolingOutput:
    if len(output.shape) != 1:
        raise ValueError(f"One vector is needed, not values of shape {list(output.shape)}.")
    return output


Pooled = TypeVar("Pooled", covariant=True)


class PoolingRequestOutput(Struct, Generic[Pooled], kw_only=True):
    """The output of one request for vectors, classes or a score; it is whole.

    The class attributes are fields of vLLM's that are None for what Quire does.
    """

    error: ClassVar[None] = None

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True
    late_chunking: "LateChunkingMetadata | None" = None
    metrics: RequestTimes | None = None

    def with_outputs(self, kind: "type[AnyRequestOutput]", outputs: Any) -> "AnyRequestOutput":
        """The same request's output in another form."""
        return kind(
            request_id=self.request_id,
            outputs=outputs,
            prompt_token_ids=self.prompt_token_ids,
            num_cached_tokens=self.num_cached_tokens,
            finished=self.finished,
            metrics=self.metrics,
        )


AnyRequestOutput = TypeVar("AnyRequestOutput", bound=PoolingRequestOutput[Any])


class LateChunk(NamedTuple):
    """The tokens of one chunk, and its characters if the prompt was a text: begin and end."""

    token_range: tuple[int, int]
    char_range: tuple[int, int] | None = None


class LateChunkingMetadata(Struct, frozen=True):
    """The chunks of `LateChunkingParams`."""

    chunk_size: int
    input_tokens: int
    chunks: list[LateChunk]
    strategy: str = "fixed_tokens"


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput], kw_only=True):
    """The vector of one text."""

    @classmethod
    def from_base(cls, request_output: PoolingRequestOutput[PoolingOutput]) -> "EmbeddingRequestOutput":
        """Raises ValueError for several vectors."""
        return request_output.with_outputs(cls, EmbeddingOutput.from_base(request_output.outputs))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput], kw_only=True):
    """The probabilities of one text's classes."""

    @classmethod
    def from_base(cls, request_output: PoolingRequestOutput[PoolingOutput]) -> "ClassificationRequestOutput":
        """Raises ValueError for those of several tokens."""
        return request_output.with_outputs(cls, ClassificationOutput.from_base(request_output.outputs))


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput], kw_only=True):
    """The score of one pair."""

    @classmethod
    def from_base(cls, request_output: PoolingRequestOutput[PoolingOutput]) -> "ScoringRequestOutput":
        """Raises ValueError for more than one number."""
        return request_output.with_outputs(cls, ScoringOutput.from_base(request_output.outputs))

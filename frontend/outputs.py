"""The output of a request: texts, token ids, log-probabilities and times, with vLLM's attribute names."""

from collections.abc import Iterable, Iterator, MutableSequence
from typing import TYPE_CHECKING, Any, ClassVar, overload

from msgspec import Struct

if TYPE_CHECKING:
    import numpy as np


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

    lora_request: ClassVar[None] = None
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
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

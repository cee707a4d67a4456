"""The output of a request: texts, token ids, log-probabilities and times, with vLLM's attribute names."""

from msgspec import Struct


class Logprob(Struct):
    """One token's log-probability at one position.

    `rank` is 1-based within the whole distribution, and None for a token of the request's `logprob_token_ids`.
    `decoded_token` is None if the request asked for no text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class CompletionOutput(Struct, kw_only=True):
    """One of a request's `n` completions.

    With `RequestOutputKind.DELTA`, `text`, `token_ids` and `logprobs` contain only the part since the last output.
    `cumulative_logprob` always covers the whole completion.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # per token: the sampled one first, then the likeliest
    finish_reason: str | None = None  # stop, length, abort or error
    stop_reason: int | str | None = None  # the stop string or stop token id that ended the completion; None for EOS

    @property
    def finished(self) -> bool:
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
    """All completions of one prompt, so far or at the end."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # per prompt token; None for the first
    num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache
    metrics: RequestTimes | None = None  # with DELTA, in the last output only

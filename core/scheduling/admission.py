"""Admits requests to the waiting queue: checks them against the limits, and bounds the queue.

A refusal is a RequestFailure that names the limit and the remedy. This file knows nothing of running requests.
"""

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence

from quire.core.config.resolved import SchedulerLimits
from quire.core.kv.kv_cache import KVCacheManager
from quire.core.scheduling.request import Request
from quire.core.scheduling.throughput import Throughput
from quire.core.wire.prefix_spans import PrefixSpan
from quire.core.wire.protocol import EngineRequest, SequenceStart
from quire.core.wire.row_outputs import RequestFailure

ALWAYS_QUEUED = 1024
"""Requests that may wait however long it takes: --max-queue-seconds refuses those beyond."""


class Admission:
    """Checks requests before the scheduler queues them.

    Args:
        limits: budgets and the bound on the queue.
        max_model_len: longest prompt plus output, tokens.
        kv: knows how many pages a request of a given length takes.
        throughput: measured by the scheduler, read here.
        generates: the model can continue a sequence; False for an encoder.
        num_token_types: segments that the tokens of a prompt can be of.
        encoder_rows: most rows of what the model's encoder reads; None: it has none.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        max_model_len: int,
        kv: KVCacheManager,
        throughput: Throughput,
        generates: bool = True,
        num_token_types: int = 1,
        encoder_rows: int | None = None,
    ) -> None:
        self._limits = limits
        self._max_model_len = max_model_len
        self._kv = kv
        self._throughput = throughput
        self._generates = generates
        self._num_token_types = num_token_types
        self._encoder_rows = encoder_rows

    def max_num_tokens(self, wire: EngineRequest) -> int:
        """The length, prompt included, at which a request ends."""
        if wire.pooling is not None:
            return len(wire.prompt_token_ids) + 1  # it ends before a token is sampled
        max_tokens = self._max_model_len if wire.sampling.max_tokens is None else wire.sampling.max_tokens
        return min(len(wire.prompt_token_ids) + max_tokens, self._max_model_len)

    def fault(self, wire: EngineRequest, prefix_spans: Sequence[PrefixSpan]) -> RequestFailure | None:
        """The reason why a request can never be served here; None if it can."""
        message = (
            self._kind_fault(wire)
            or self._adapter_fault(wire)
            or self._encoder_fault(wire)
            or self._length_fault(wire)
            or self._memory_fault(wire)
            or self._step_fault(wire, prefix_spans)
        )
        return None if message is None else RequestFailure("invalid", message)

    def resume_fault(self, wire: EngineRequest, start: SequenceStart) -> RequestFailure | None:
        """The reason why one sequence of a valid request cannot continue after its delivered tokens; None if it can."""
        num_output, max_output = len(start.output_token_ids), self.max_num_tokens(wire) - len(wire.prompt_token_ids)
        if num_output < max_output:
            return None
        message = f"The request resumes with {num_output} output tokens of {max_output}: it has finished already."
        return RequestFailure("invalid", message)

    def overload(
        self,
        *,
        num_waiting: int,
        num_free_slots: int,
        num_waiting_tokens: int,
        num_waiting_bytes: int,
        running: Collection[Request],
        now: float,
    ) -> RequestFailure | None:
        """Refuses a request if the queue is full.

        Args:
            num_waiting: requests in the queue.
            num_free_slots: of these, the ones that the next plan admits; they do not count.
            num_waiting_tokens: of prompts, that waiting requests have to compute.
            num_waiting_bytes: of memory, that waiting requests hold.
        """
        limits, num_queued = self._limits, num_waiting - num_free_slots
        if limits.max_num_queued_reqs is not None and num_queued >= limits.max_num_queued_reqs:
            limit, waits = "max_num_queued_reqs", f"{num_waiting} requests wait"
        elif (
            limits.max_num_queued_tokens is not None
            and num_queued > 0
            and num_waiting_tokens >= limits.max_num_queued_tokens
        ):
            limit, waits = "max_num_queued_tokens", f"requests with {num_waiting_tokens} tokens of prompts wait"
        elif (
            limits.max_num_queued_bytes is not None
            and num_queued > 0
            and num_waiting_bytes >= limits.max_num_queued_bytes
        ):
            limit, waits = "max_num_queued_bytes", f"requests that hold {num_waiting_bytes} bytes wait"
        elif limits.max_queue_seconds and num_queued >= ALWAYS_QUEUED:
            wait = self._throughput.wait_seconds(now, num_waiting)
            if wait is None or wait <= limits.max_queue_seconds:
                return None
            limit, waits = "max_queue_seconds", f"{num_waiting} requests wait, the last of them about {wait:.0f} s"
        else:
            return None
        seconds = math.ceil(  # as in the header Retry-After
            self._throughput.retry_after_seconds(
                now,
                num_waiting=num_waiting,
                num_pending_tokens=sum(request.max_num_tokens - request.num_tokens for request in running),
            )
        )
        flag = "--" + limit.replace("_", "-")
        message = (
            f"The server is overloaded: {waits}, and {flag} is {getattr(limits, limit)}. Try again in {seconds} s."
        )
        return RequestFailure("overloaded", message, seconds, limit)

    def _kind_fault(self, wire: EngineRequest) -> str | None:
        if not self._generates and wire.pooling is None:
            return "This model is an encoder: it generates no text. Ask it for vectors, classes or scores."
        types, num_prompt = wire.token_type_ids, len(wire.prompt_token_ids)
        if types is not None and len(types) != num_prompt:
            return f"token_type_ids has {len(types)} numbers for a prompt of {num_prompt} tokens; give one for each."
        if types and not 0 <= min(types) <= max(types) < self._num_token_types:
            return (
                f"token_type_ids must be from 0 to {self._num_token_types - 1} for this model, got {min(types)} to "
                f"{max(types)}."
            )
        return None

    def _adapter_fault(self, wire: EngineRequest) -> str | None:
        if wire.adapter is None or self._limits.max_adapters:
            return None
        return (
            f"The engine takes no adapters, and the request names {wire.adapter.name!r}; start it with --enable-lora."
        )

    def _encoder_fault(self, wire: EngineRequest) -> str | None:
        if self._encoder_rows is None:
            return None if wire.encoder is None else "encoder_prompt is for models with an encoder; this one has none."
        if wire.encoder is None or not wire.encoder.num_rows:
            return (
                "This model's encoder reads a text of at least one token, and the request has none; add encoder_prompt."
            )
        num_rows, budget = wire.encoder.num_rows, self._limits.max_num_batched_tokens
        if num_rows > self._encoder_rows:
            return (
                f"encoder_prompt has {num_rows} tokens, but the model's encoder reads {self._encoder_rows}. Shorten it."
            )
        num_beside = 1 if self._limits.enable_chunked_prefill else len(wire.prompt_token_ids)
        if num_rows + num_beside > budget:
            return (
                f"encoder_prompt has {num_rows} tokens. One step encodes them all, with {num_beside} of the decoder's, "
                f"and --max-num-batched-tokens is {budget}. Shorten it or raise --max-num-batched-tokens."
            )
        return None

    def _length_fault(self, wire: EngineRequest) -> str | None:
        num_prompt = len(wire.prompt_token_ids)
        if not num_prompt:
            return "The prompt holds no tokens; at least one is needed."
        if wire.pooling is not None:
            if num_prompt > self._max_model_len:
                return (
                    f"The prompt has {num_prompt} tokens, but the model computes {self._max_model_len}. Shorten the "
                    "prompt or raise --max-model-len."
                )
        elif num_prompt >= self._max_model_len:
            return (
                f"The prompt has {num_prompt} tokens, but prompt and output together may have {self._max_model_len}, "
                "at least one of them output. Shorten the prompt or raise --max-model-len."
            )
        return None

    def _memory_fault(self, wire: EngineRequest) -> str | None:
        max_num_tokens = self.max_num_tokens(wire)
        num_computed = max_num_tokens - 1  # the last token is sampled, never computed
        num_rows = 0 if wire.encoder is None else wire.encoder.num_rows

        def pages(num_tokens: int) -> int:
            return self._kv.max_pages(num_tokens, num_rows)

        if pages(num_computed) > self._kv.num_pages:
            fitting = max(0, bisect_right(range(num_computed), self._kv.num_pages, key=pages) - 1)
            return (
                f"Prompt and output may reach {max_num_tokens} tokens, but the KV cache holds {fitting}. "
                "Shorten the prompt, lower max_tokens, or give the server a larger cache "
                "with --kv-cache-memory-bytes, --gpu-memory-utilization or --num-gpu-blocks-override."
            )
        return None

    def _step_fault(self, wire: EngineRequest, prefix_spans: Sequence[PrefixSpan]) -> str | None:
        num_prompt, largest = len(wire.prompt_token_ids), self._limits.largest_chunk
        if num_prompt <= largest:
            return None
        begin, end = max(prefix_spans, key=lambda span: span[1] - span[0], default=(0, 0))
        if end - begin > largest:
            flag = "max-num-batched-tokens"
            if largest < self._limits.max_num_batched_tokens:
                flag = "long-prefill-token-threshold"
            who = f"Its tokens {begin} to {end - 1} see each other"
            if end - begin == num_prompt:
                who = "All tokens of a prompt see each other in this model"
            return (
                f"The prompt has {num_prompt} tokens. {who}, so one step computes them all, and --{flag} is {largest}. "
                f"Shorten the prompt or raise --{flag}."
            )
        if not self._limits.enable_chunked_prefill:
            return (
                f"The prompt has {num_prompt} tokens, but chunked prefill is off and max_num_batched_tokens is "
                f"{largest}. Shorten the prompt, raise --max-num-batched-tokens or pass --enable-chunked-prefill."
            )
        return None

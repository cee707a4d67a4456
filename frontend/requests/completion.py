"""One of a request's n sequences: deltas become text, token ids and log-probabilities, in portions for the reader."""

from collections.abc import Callable, Sequence

from quire.core.wire.protocol import FinishReason, RequestDelta
from quire.core.wire.row_outputs import TokenLogprobs
from quire.core.wire.sampling_params import RequestOutputKind, SamplingParams
from quire.frontend.outputs import CompletionOutput, FlatLogprobs, SampleLogprobs
from quire.frontend.requests.token_logprobs import RowReader
from quire.frontend.text.detokenizer import Detokenizer
from quire.frontend.text.tokenizer import Tokenizer

Watch = Callable[[str, Sequence[int]], bool]
"""Takes the text of the next token and its id; returns True if the sequence ends with them."""


class Completion:
    """The output of one sequence, and the part of it that the reader has not taken yet."""

    # A step evicts this object from the processor's caches, because the step reads all weights. With slots, the fields
    # that a token touches share a few cache lines; a dictionary would add more.
    __slots__ = (
        *("request_id", "index", "finish_reason", "stop_reason", "num_tokens", "num_cached_tokens", "num_preemptions"),
        *("queued_at", "scheduled_at", "first_token_at", "last_token_at", "has_news", "_interval", "_num_told"),
        *("_kind", "_include_stop", "_tokenizer", "_detokenizer", "_texts", "_token_ids", "_logprobs"),
        *("_cumulative_logprob", "_new_logprobs", "_rows", "_watch", "_num_virtual"),
    )

    def __init__(
        self,
        index: int,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        tokenizer: Tokenizer | None,
        interval: int = 1,
        num_virtual: int = 0,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.queued_at = self.scheduled_at = self.first_token_at = self.last_token_at = 0.0  # 0: not yet
        self.has_news = False  # the reader should get an output
        self._num_virtual = num_virtual  # rows before the prompt, which are none of its tokens
        self._interval = interval  # tokens between two outputs; the first token and the end always cause one
        self._num_told = 0
        self._kind = sampling.output_kind
        self._include_stop = sampling.include_stop_str_in_output
        self._tokenizer = tokenizer
        self._detokenizer = None
        if sampling.detokenize and tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, sampling)
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        wants_logprobs = sampling.wants_logprobs
        self._new_logprobs = FlatLogprobs if sampling.flat_logprobs else list
        self._logprobs: SampleLogprobs | None = self._new_logprobs() if wants_logprobs else None
        self._cumulative_logprob: float | None = 0.0 if wants_logprobs else None
        self._rows = RowReader(self.text_tokenizer, prompt_token_ids) if wants_logprobs else None
        self._watch: Watch | None = None

    def watch(self, watch: Watch) -> None:
        """Lets `watch` end the sequence. The token does not depend on the reader's pace. Call before `add`."""
        self._watch = watch

    def add(self, delta: RequestDelta) -> None:
        """Takes a delta. Sets `finish_reason` at the end of the sequence, which may be a stop string found here."""
        if not self.num_tokens:
            self.num_cached_tokens = max(0, delta.num_cached_tokens - self._num_virtual)
            self.queued_at, self.scheduled_at = delta.queued_at, delta.scheduled_at
        if delta.num_preemptions > self.num_preemptions:
            self.num_preemptions = delta.num_preemptions
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_token_id
        if delta.finish_reason is FinishReason.REPETITION:
            self.stop_reason = "repetition_detected"
        elif delta.failure is not None:
            self.stop_reason = "grammar_dead_end"
        token_ids = delta.token_ids
        count = len(token_ids) if self._detokenizer is None else self._add_text(delta)
        self._token_ids += token_ids if count == len(token_ids) else token_ids[:count]
        self.num_tokens += count
        if self._logprobs is not None:
            positions = (delta.logprobs or [])[:count]
            for place, position in enumerate(positions, start=1):
                self._add_logprobs(position, is_last=self.finish_reason is not None and place == len(positions))
        self.has_news = self._interval == 1 or self._is_due()

    def _is_due(self) -> bool:
        if self.finish_reason is not None or not self._num_told:
            return True
        return self.num_tokens - self._num_told >= self._interval

    def _add_text(self, delta: RequestDelta) -> int:
        """Detokenizes; returns how many of the delta's tokens count."""
        assert self._detokenizer is not None
        token_ids = delta.token_ids
        if delta.finish_reason is FinishReason.STOP and not self._include_stop:
            token_ids = token_ids[:-1]  # EOS or a stop token: counted, but no text
        text, count, ended = self._push(token_ids)
        if delta.finish_reason is not None and not ended and self._detokenizer.stop is None:
            text += self._flush()
        if text:
            self._texts.append(text)
        if ended:
            self.finish_reason, self.stop_reason = FinishReason.STOP, None
            return count
        if self._detokenizer.stop is None:
            return len(delta.token_ids)
        self.finish_reason = FinishReason.STOP
        self.stop_reason = self._detokenizer.stop
        return count

    def _push(self, token_ids: Sequence[int]) -> tuple[str, int, bool]:
        """Detokenizes; returns the new text, the number of tokens that count, and True if the watch ended the sequence
        with the last of them."""
        assert self._detokenizer is not None
        if self._watch is None:
            return *self._detokenizer.push(token_ids), False
        texts = []
        for count, token_id in enumerate(token_ids, start=1):
            text, _ = self._detokenizer.push([token_id])
            texts.append(text)
            ended = self._watch(text, [token_id])
            if ended or self._detokenizer.stop is not None:
                return "".join(texts), count, ended
        return "".join(texts), len(token_ids), False

    def _flush(self) -> str:
        """The text that was held back until the sequence ended."""
        assert self._detokenizer is not None
        text = self._detokenizer.finish()
        if text and self._watch is not None:
            self._watch(text, [])
        return text

    def _add_logprobs(self, position: TokenLogprobs, *, is_last: bool) -> None:
        assert self._logprobs is not None
        assert self._cumulative_logprob is not None
        assert self._rows is not None
        self._logprobs.append(self._rows.read(position, is_last=is_last))
        self._cumulative_logprob += position.logprobs[0]

    @property
    def text_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None when the request wants no text."""
        return self._tokenizer if self._detokenizer is not None else None

    def take_output(self) -> CompletionOutput:
        """The reader's next output: only the new part with DELTA, everything otherwise."""
        self.has_news = False
        self._num_told = self.num_tokens
        text = "".join(self._texts)
        token_ids, logprobs = self._token_ids, self._logprobs
        if self._kind is RequestOutputKind.DELTA:
            self._texts, self._token_ids = [], []
            self._logprobs = None if logprobs is None else self._new_logprobs()
        else:
            self._texts = [text]
            token_ids = token_ids.copy()
            logprobs = None if logprobs is None else logprobs.copy()
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self._cumulative_logprob,
            logprobs=logprobs,
            finish_reason=None if self.finish_reason is None else str(self.finish_reason),
            stop_reason=self.stop_reason,
        )

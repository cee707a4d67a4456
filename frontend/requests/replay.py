"""Reads tokens that another server has generated, as if an engine here had sampled them."""

from collections.abc import Collection, Sequence

from quire.core.wire.protocol import FinishReason, RequestDelta
from quire.core.wire.sampling_params import RequestOutputKind, SamplingParams
from quire.frontend.outputs import CompletionOutput
from quire.frontend.requests.completion import Completion
from quire.frontend.text.tokenizer import Tokenizer


class Replay:
    """The text of one sequence. Tokens come in the portions in which they came from the engine.

    Args:
        sampling: the sampling parameters of the sequence.
        end_token_ids: the tokens with which the model ends.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        end_token_ids: Collection[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt_token_ids = list(prompt_token_ids)
        self._sampling = sampling
        self._end_token_ids = () if sampling.ignore_eos else end_token_ids
        self._completion = self._open([])

    def push(self, token_ids: list[int]) -> CompletionOutput:
        """Takes tokens after which the sequence went on."""
        self._completion.add(RequestDelta("", token_ids))
        return self._completion.take_output()

    def finish(self, token_ids: list[int], reason: str, stop_reason: int | str | None) -> CompletionOutput:
        """Takes the last tokens of a sequence that was pushed before. They may not be cut at a stop string."""
        return self._end(self._completion, token_ids, reason, stop_reason)

    def whole(self, token_ids: list[int], reason: str, stop_reason: int | str | None) -> CompletionOutput:
        """Takes a whole sequence, and cuts its text at the stop string that ended it."""
        stops: list[str] = []
        if reason == "stop" and isinstance(stop_reason, str):
            stops = [stop_reason]
        elif reason == "stop" and stop_reason is None:
            stops = self._sampling.stop_strings
        return self._end(self._open(stops), token_ids, reason, stop_reason)

    def _open(self, stops: list[str]) -> Completion:
        sampling = self._sampling.replace(
            stop=stops, output_kind=RequestOutputKind.DELTA, logprobs=None, logprob_token_ids=None
        )
        return Completion(0, "", self._prompt_token_ids, sampling, self._tokenizer)

    def _end(
        self, completion: Completion, token_ids: list[int], reason: str, stop_reason: int | str | None
    ) -> CompletionOutput:
        ended = reason == "stop" and bool(token_ids)
        if ended and stop_reason is None and token_ids[-1] not in self._end_token_ids:
            ended = token_ids[-1] in (self._sampling.stop_token_ids or ())
            stop_reason = token_ids[-1] if ended else None
        elif ended and stop_reason is not None:
            ended = token_ids[-1] == stop_reason
        if ended:
            completion.add(RequestDelta("", token_ids, finish_reason=FinishReason.STOP))
        else:
            completion.add(RequestDelta("", token_ids))
            if completion.finish_reason is None:
                completion.add(RequestDelta("", [], finish_reason=FinishReason.LENGTH))  # gives the rest of the text
        output = completion.take_output()
        found = output.stop_reason if isinstance(output.stop_reason, str) else stop_reason
        output.token_ids, output.finish_reason, output.stop_reason = token_ids, reason, found
        return output

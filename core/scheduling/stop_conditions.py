"""The conditions that end a request's output: a stop token, the length limit, or a repetition."""

from collections.abc import Collection
from typing import NamedTuple

from quire.core.scheduling.request import Request
from quire.core.wire.protocol import FinishReason
from quire.core.wire.sampling_params import SamplingParams


class End(NamedTuple):
    """Why an output ended."""

    reason: FinishReason
    stop_token_id: int | None = None  # the stop_token_ids entry that ended it; None for EOS and all other ends


class StopConditions:
    """Finds the end of outputs.

    Args:
        eos_token_ids: tokens that end a sequence unless it ignores them.
    """

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)

    def stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """All tokens that end a sequence."""
        stop_ids = frozenset() if sampling.ignore_eos else self._eos_token_ids
        return stop_ids.union(sampling.stop_token_ids) if sampling.stop_token_ids else stop_ids

    def first(self, request: Request, tokens: list[int]) -> End | None:
        """The first end among `tokens`, the newest of the request. Drops later tokens from `tokens` and the request.

        The result is the same whether tokens come one by one or several at once.
        """
        output = request.output_token_ids
        num_before = len(output) - len(tokens)
        for count, token in enumerate(tokens, start=1):
            end = self._at(request, num_before + count, token)
            if end is not None:
                del tokens[count:]
                del output[num_before + count :]
                return end
        return None

    def _at(self, request: Request, num_tokens: int, token: int) -> End | None:
        """The end, if any, of an output after its first `num_tokens` tokens; `token` is the last of these."""
        sampling = request.sampling
        may_stop = num_tokens >= sampling.min_tokens
        if may_stop and token in request.stop_ids:
            is_eos = token in self._eos_token_ids and not sampling.ignore_eos
            return End(FinishReason.STOP, None if is_eos else token)
        if num_tokens == request.max_num_output_tokens:
            return End(FinishReason.LENGTH)
        detection = sampling.repetition_detection
        if may_stop and detection is not None:
            output = request.output_token_ids
            if detection.found_at_end(output if num_tokens == len(output) else output[:num_tokens]):
                return End(FinishReason.REPETITION)
        return None

"""Requests of the scheduler's own, which tell whether the device still computes usable values."""

from collections.abc import Collection

from quire.core.scheduling.request import Prompt, Request
from quire.core.wire.pooling import Pooling
from quire.core.wire.protocol import EngineRequest, SequenceStart
from quire.core.wire.sampling_params import SamplingParams

PROBE_ID = "/probe"
"""The id of a probe. Nobody waits for its deltas."""


class Probes:
    """Remembers a prompt whose values were fine, and makes probes of it: the shortest text so far.

    Args:
        eos_token_ids: of the model.

    Attributes:
        num_made: probes so far.
        description: of the last probe, for messages.
    """

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos_token_ids = sorted(eos_token_ids)
        self._fine: Prompt | None = None
        self._pooling: Pooling | None = None
        self._length = (True, 0)
        self.num_made = 0
        self.description = ""

    def add(self, request: Request) -> None:
        """Notes a request that got usable values for its prompt. Prompts with numbers from outside are not kept."""
        prompt = request.prompt
        if request.adapter is not None or prompt.embeds is not None:
            return
        length = bool(prompt.media), len(prompt.token_ids)
        if self._fine is None or length < self._length:
            self._fine, self._pooling, self._length = prompt, request.pooling, length

    def make(self, failed: Request) -> EngineRequest | None:
        """A probe, after a request of the same model has failed: the prompt that was fine, or else one of a single
        token. None: the model reads more than tokens, and nothing of it has been fine yet."""
        self.num_made += 1
        if self._fine is not None:
            self.description = "a prompt that had been fine before"
            return _request(self._fine.token_ids, self._pooling, self._fine)
        if failed.prompt.encoder is not None:
            return None
        self.description = "a prompt of one token"
        token_id = self._eos_token_ids[0] if self._eos_token_ids else failed.prompt.token_ids[0]
        return _request([token_id], None if failed.pooling is None else Pooling("last"), None)


def _request(token_ids: list[int], pooling: Pooling | None, prompt: Prompt | None) -> EngineRequest:
    """One step's worth of a prompt, which is computed whole, whatever the prefix cache has."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, seed=0, skip_reading_prefix_cache=True)
    return EngineRequest(
        [SequenceStart(PROBE_ID, 0)],
        token_ids,
        sampling,
        cache_salt=None if prompt is None else prompt.cache_salt,
        num_new_tokens=len(token_ids),
        pooling=pooling,
        token_type_ids=None if prompt is None else prompt.token_type_ids,
        prefix_spans=[] if prompt is None else prompt.prefix_spans,
        encoder=None if prompt is None else prompt.encoder,
        media=[] if prompt is None else prompt.media,
        is_accepted=True,
    )

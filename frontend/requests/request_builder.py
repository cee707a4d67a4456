"""Builds engine requests out of prompts and sampling parameters."""

import hashlib
import random

from quire.core.wire.protocol import EngineRequest, Grammar, SequenceStart
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.requests.context_limit import ContextLimit
from quire.frontend.requests.prompt import Prompt, check_embeds
from quire.frontend.requests.sampling_input import SamplingInput, check_id_rows
from quire.frontend.requests.time_slices import in_time_slices


class RequestBuilder:
    """Builds complete and valid requests for one model.

    Args:
        sampling_input: checks sampling parameters against the model.
        limit: the length of the model's context.
        seed: of the random generator that seeds requests without a seed.
    """

    def __init__(self, sampling_input: SamplingInput, limit: ContextLimit, *, seed: int) -> None:
        self._sampling_input = sampling_input
        self._limit = limit
        self._seeds = random.Random(seed)

    async def build(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        fit_context: bool = False,
        limit_logprobs: bool = True,
        grammar: Grammar | None = None,
    ) -> EngineRequest:
        """The engine's request for one prompt: `n` sequences, with every default filled in.

        The first sequence keeps the request's seed, the others derive theirs from it; a request without a seed draws
        one here. Thousands of sequences are built in turns, so that other requests do not wait.

        Args:
            fit_context: lower a `max_tokens` that is too large for the context, instead of refusing it.
            limit_logprobs: refuse more logprobs than the server allows.
            grammar: `sampling.structured_outputs`, compiled.

        Raises:
            ParameterError: lengths or parameters that this model cannot serve, by name.
        """
        changes = self._sampling_input.changes(sampling, limit_logprobs=limit_logprobs)
        max_tokens = self._limit.output_tokens(len(prompt.token_ids), sampling.max_tokens, fit_context=fit_context)
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        if prompt.embeds is not None:
            check_embeds(sampling)
        check_id_rows(sampling, len(prompt.token_ids))
        sequences = [
            SequenceStart(
                request_id if sampling.n == 1 else f"{request_id}_{index}",
                child_seed(seed, index),
                scores_prompt=index == 0,
            )
            async for index in in_time_slices(range(sampling.n))
        ]
        return EngineRequest(
            sequences,
            prompt.token_ids,
            sampling.replace(**changes, n=1, max_tokens=max_tokens, seed=None, stop=None, structured_outputs=None),
            priority,
            cache_salt if cache_salt is not None else prompt.cache_salt,
            grammar,
            prompt.embeds,
        )


def child_seed(seed: int, index: int) -> int:
    """Seed of the `index`-th of n completions: the first keeps the request's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

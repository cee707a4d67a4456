"""Prompts and sampling parameters as the requests that the engine gets, one for each sequence."""

import hashlib
import random
from collections.abc import Iterator

from quire.core.errors import ParameterError
from quire.core.wire.protocol import EngineRequest, Grammar
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.requests.context_limit import ContextLimit
from quire.frontend.requests.prompt import Prompt, check_embeds
from quire.frontend.requests.sampling_input import SamplingInput

MAX_GRAMMAR_BYTES = 2**26
"""Of compiled grammars that one request may bring: each of its n sequences carries its own copy."""


class RequestBuilder:
    """Completes requests for one model, or says what is wrong with them.

    Args:
        sampling_input: checks sampling parameters against the model.
        limit: of the model's context.
        seed: start of the stream from which requests without a seed draw theirs.
    """

    def __init__(self, sampling_input: SamplingInput, limit: ContextLimit, *, seed: int) -> None:
        self._sampling_input = sampling_input
        self._limit = limit
        self._seeds = random.Random(seed)

    def build(
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
    ) -> Iterator[EngineRequest]:
        """The `n` engine requests for one prompt, with every default filled in: checked now, made one by one.

        The first keeps the request's seed, the others derive theirs from it; one without a seed draws it here.

        Args:
            fit_context: lower a `max_tokens` that the context has no room for, instead of refusing it.
            limit_logprobs: refuse more logprobs than the server allows.
            grammar: `sampling.structured_outputs`, compiled.

        Raises:
            ParameterError: lengths or parameters that this model cannot serve, by name.
        """
        changes = self._sampling_input.changes(sampling, limit_logprobs=limit_logprobs)
        max_tokens = self._limit.output_tokens(len(prompt.token_ids), sampling.max_tokens, fit_context=fit_context)
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        if grammar is not None and len(grammar.data) * sampling.n > MAX_GRAMMAR_BYTES:
            raise ParameterError(
                f"n={sampling.n} times a compiled grammar of {len(grammar.data)} bytes is more than "
                f"{MAX_GRAMMAR_BYTES}; lower n or make structured_outputs simpler.",
                param="n",
            )
        if prompt.embeds is not None:
            check_embeds(prompt.embeds, sampling)
        return (
            EngineRequest(
                request_id=request_id if sampling.n == 1 else f"{request_id}_{index}",
                prompt_token_ids=prompt.token_ids,
                sampling=sampling.replace(
                    **changes,
                    n=1,
                    max_tokens=max_tokens,
                    seed=child_seed(seed, index),
                    stop=None,
                    structured_outputs=None,
                    prompt_logprobs=None if index else sampling.prompt_logprobs,  # the same for all
                ),
                priority=priority,
                cache_salt=cache_salt if cache_salt is not None else prompt.cache_salt,
                grammar=grammar,
                prompt_embeds=prompt.embeds,
            )
            for index in range(sampling.n)
        )


def child_seed(seed: int, index: int) -> int:
    """Seed of the `index`-th of n completions: the first keeps the request's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

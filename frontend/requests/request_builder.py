"""Builds engine requests out of prompts and sampling parameters."""

import hashlib
import random

from quire.core.wire.encoder_input import EncoderInput
from quire.core.wire.pooling import Pooling
from quire.core.wire.pooling_params import PoolingParams
from quire.core.wire.protocol import EngineRequest, Grammar, SequenceStart
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.requests.context_limit import ContextLimit
from quire.frontend.requests.decoder_rules import output_rules, rule_changes
from quire.frontend.requests.prompt import Prompt, check_embeds
from quire.frontend.requests.sampling_input import SamplingInput, check_id_rows
from quire.frontend.requests.soft_prompts import check_soft_prompt
from quire.frontend.requests.submission import ResolvedSubmission, Submission
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
        submission: ResolvedSubmission,
        *,
        limit_logprobs: bool = True,
        grammar: Grammar | None = None,
        heeds_rules: bool = True,
    ) -> EngineRequest:
        """Builds the engine's request: `n` sequences, with every default filled in.

        The first sequence keeps the request's seed, the others derive theirs from it; a request without a seed draws
        one here. Thousands of sequences are built in turns, so that other requests do not wait.

        Args:
            limit_logprobs: refuse more logprobs than the server allows.
            grammar: the parameters' `structured_outputs`, compiled.
            heeds_rules: the output is a whole one, for which the checkpoint's rules hold.

        Raises:
            ParameterError: lengths or parameters that this model cannot serve, by name.
        """
        prompt, sampling, request_id = submission.prompt, submission.params, submission.request_id
        changes = self._sampling_input.changes(sampling, limit_logprobs=limit_logprobs)
        token_ids, embeds = prompt.token_ids, prompt.embeds
        if (soft_prompt := submission.soft_prompt) is not None:
            check_soft_prompt(prompt, sampling)
            token_ids, embeds = [0] * soft_prompt.num_rows + token_ids, soft_prompt
        max_tokens = self._limit.output_tokens(len(token_ids), sampling.max_tokens, fit_context=submission.fit_context)
        rules = self._sampling_input.decoder if heeds_rules else None
        if rules is not None:
            changes |= rule_changes(rules, changes, sampling, len(prompt.token_ids), max_tokens)
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
            token_ids,
            sampling.replace(**changes, n=1, max_tokens=max_tokens, seed=None, stop=None, structured_outputs=None),
            submission.priority,
            submission.salted(prompt),
            grammar,
            embeds,
            encoder=_encoder_input(prompt),
            rules=None if rules is None else output_rules(rules, prompt.token_ids, sampling, max_tokens),
            tenant=submission.tenant,
            media=list(prompt.media),
            adapter=submission.found_adapter,
            prediction=submission.prediction,
            adapter_start=submission.adapter_start,
        )


def _encoder_input(prompt: Prompt) -> EncoderInput | None:
    encoder = prompt.encoder
    return None if encoder is None else EncoderInput(encoder.token_ids, encoder.features)


def build_vector_request(submission: Submission[Prompt, PoolingParams], pooling: Pooling) -> EngineRequest:
    """Builds the engine's request for vectors of a prompt."""
    prompt = submission.prompt
    return EngineRequest(
        [SequenceStart(submission.request_id, 0)],
        prompt.token_ids,
        SamplingParams(skip_reading_prefix_cache=submission.params.skip_reading_prefix_cache),
        submission.priority,
        submission.salted(prompt),
        prompt_embeds=prompt.embeds,
        pooling=pooling,
        encoder=_encoder_input(prompt),
        token_type_ids=prompt.token_type_ids,
        tenant=submission.tenant,
        media=list(prompt.media),
        adapter=submission.found_adapter,
        adapter_start=submission.adapter_start,
    )


def child_seed(seed: int, index: int) -> int:
    """Seed of the `index`-th of n completions: the first keeps the request's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

"""The probabilities of chosen tokens as the first of an answer, for several prompts at once."""

from collections.abc import Sequence

from quire.core.wire.request_ids import engine_id
from quire.core.wire.sampling_params import RequestOutputKind, SamplingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.outputs import RequestOutput
from quire.frontend.requests.merging import merge
from quire.frontend.requests.request_stream import RequestStream
from quire.frontend.requests.submission import Submission
from quire.frontend.requests.time_slices import in_time_slices


class FirstTokens:
    """Reads the probabilities."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    async def read(
        self,
        prompts: Sequence[tuple[list[int], list[int]]],
        reply_id: str,
        *,
        temperature: float = 1.0,
        priority: int = 0,
        cache_salt: str | None = None,
        data_parallel_rank: int | None = None,
    ) -> list[RequestOutput]:
        """An output of one token for each prompt; cancelling aborts them in the engine.

        Args:
            prompts: the token ids of each prompt, and the tokens whose log-probabilities its output has.
            temperature: of the token that is sampled.

        Raises:
            ParameterError: a token is not in the vocabulary, or a prompt is too long.
            EngineError: the engine failed.
        """
        streams: list[RequestStream] = []
        outputs: dict[int, RequestOutput] = {}
        try:
            async for ids, tokens in in_time_slices(prompts):
                sampling = SamplingParams(
                    max_tokens=1, temperature=temperature, logprob_token_ids=tokens,
                    output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False, ignore_eos=True,
                )  # fmt: skip
                stream = await self._engine.open_stream(
                    Submission(
                        {"prompt_token_ids": ids},
                        sampling,
                        engine_id(reply_id, len(streams)),
                        priority=priority,
                        cache_salt=cache_salt,
                        data_parallel_rank=data_parallel_rank,
                    ),
                )
                streams.append(stream)
            async for index, output in merge(streams):
                outputs[index] = output
        finally:
            for stream in streams:
                stream.close()
        return [outputs[index] for index in range(len(prompts))]


def logprobs_of(output: RequestOutput, tokens: Sequence[int]) -> list[float]:
    """The log-probabilities of tokens in an output of one token."""
    [completion] = output.outputs
    assert completion.logprobs is not None
    [row] = completion.logprobs
    return [row[token].logprob for token in tokens]

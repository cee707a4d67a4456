"""Runs the prompts of one request through the engine."""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from quire.core.wire.adapters import Adapter
from quire.core.wire.pooling_params import PoolingParams
from quire.core.wire.request_ids import engine_id
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.client_headers import RANK_HEADER
from quire.frontend.chat.renaming import renamed
from quire.frontend.outputs import PoolingOutput, PoolingRequestOutput
from quire.frontend.requests.chunked_vectors import ChunkedVectors
from quire.frontend.requests.pooling_stream import PoolingStream
from quire.frontend.requests.prompt import Prompt
from quire.frontend.requests.submission import Submission
from quire.frontend.requests.time_slices import in_time_slices

VectorsOutput = PoolingRequestOutput[PoolingOutput]


class Caller(Struct, frozen=True, kw_only=True):
    """The part of a request that all its prompts share.

    Attributes:
        reply_id: the answer's id, from which those of the prompts are made.
        adapter: None: the one that the request names as its model, if any.
    """

    reply_id: str
    priority: int = 0
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    adapter: Adapter | None = None


class Encoding:
    """Computes the pooled outputs of prompts."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    async def encode(self, prompts: Sequence[Prompt], params: PoolingParams, caller: Caller) -> list[VectorsOutput]:
        """The output of each prompt; equal prompts are computed once. Cancelling aborts them in the engine.

        Raises:
            ParameterError: a prompt or a parameter is wrong, by name.
            EngineError: the engine failed.
        """
        places: dict[tuple[object, ...], int] = {}  # of streams, by the content of a prompt
        streams: list[PoolingStream | ChunkedVectors] = []
        chosen = []
        try:
            async for prompt in in_time_slices(prompts):
                place = places.setdefault(prompt.content, len(streams))
                if place == len(streams):
                    streams.append(await self._open(prompt, params, caller, place))
                chosen.append(place)
            outputs = [await stream.output() async for stream in in_time_slices(streams)]
        finally:
            for stream in streams:
                stream.close()
        return [outputs[place] for place in chosen]

    async def _open(
        self, prompt: Prompt, params: PoolingParams, caller: Caller, place: int
    ) -> PoolingStream | ChunkedVectors:
        submission = Submission(
            prompt,
            params,
            engine_id(caller.reply_id, place),
            priority=caller.priority,
            cache_salt=caller.cache_salt,
            data_parallel_rank=caller.data_parallel_rank,
        )
        if caller.adapter is not None:
            submission = replace(submission, adapter=caller.adapter)
        with renamed(data_parallel_rank=RANK_HEADER):
            return await self._engine.open_vectors(submission)

"""POST /v1/embeddings: a vector for each text or conversation; of models of token vectors, one for each token."""

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from quire.core.errors import ParameterError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.pooling.answers import Chunk, Embedding, EmbeddingResponse, LateChunking
from quire.frontend.pooling.encoding import Encoding, VectorsOutput
from quire.frontend.pooling.inputs import Inputs, conversations_of
from quire.frontend.pooling.replies import Reply, begin, bytes_facts, caller_of, usage
from quire.frontend.pooling.schema import EmbeddingRequest
from quire.frontend.pooling.tasks import Tasks
from quire.frontend.pooling.vectors import VectorBytes, json_writer, plain_bytes
from quire.frontend.requests.prompt import Prompt
from quire.frontend.requests.task_adapters import choose_task
from quire.frontend.requests.time_slices import in_time_slices


class Embeddings:
    """Answers requests for embeddings. It needs no HTTP, so the batch runner uses it too."""

    def __init__(self, engine: AsyncLLM, inputs: Inputs, encoding: Encoding, tasks: Tasks) -> None:
        self._engine = engine
        self._inputs = inputs
        self._encoding = encoding
        self._tasks = tasks

    async def create(
        self, request: EmbeddingRequest, headers: ClientHeaders = ClientHeaders()
    ) -> EmbeddingResponse | VectorBytes:
        """The vectors; cancelling aborts them in the engine. Raises RequestError and EngineError."""
        reply = begin(self._engine, request, headers, "embd")
        kinds = ("embed", "token_embed") if request.late_chunking_params is None else ("token_embed",)
        task = self._tasks.choose(*kinds)
        if task == "token_embed" and request.format != "float":
            raise ParameterError(
                "This model has a vector for each token, and here gives them with encoding_format float alone; "
                "/pooling gives them as bytes.",
                param="encoding_format",
            )
        chosen = choose_task(self._engine.config.pooling, request.task)
        prompts = await self._inputs.read(request, before=chosen.before)
        caller = replace(caller_of(request, reply, headers), adapter=chosen.adapter)
        outputs = await self._encoding.encode(prompts, request.params(task), caller)
        return await self._answer(request, reply, prompts, outputs)

    async def _answer(
        self, request: EmbeddingRequest, reply: Reply, prompts: list[Prompt], outputs: list[VectorsOutput]
    ) -> EmbeddingResponse | VectorBytes:
        counted = usage(outputs)
        if request.format in ("bytes", "bytes_only"):
            facts = bytes_facts(reply, counted) if request.format == "bytes" else None
            return plain_bytes([output.outputs.array for output in outputs], *request.number_format, facts)
        write = json_writer(request.format, *request.number_format)
        return EmbeddingResponse(
            id=reply.id,
            created=reply.created,
            model=reply.model,
            data=[
                Embedding(
                    index=index,
                    embedding=write(output.outputs.array),
                    late_chunking=self._chunks(request, output, prompts[index]),
                )
                async for index, output in in_time_slices(enumerate(outputs))
            ],
            usage=counted,
        )

    def _chunks(self, request: EmbeddingRequest, output: VectorsOutput, prompt: Prompt) -> LateChunking | UnsetType:
        """The places of late chunks; their characters only where the tokens are those of a text."""
        found = output.late_chunking
        if found is None:
            return UNSET
        offsets: list[tuple[int, int]] = []
        if prompt.text is not None:
            special = request.add_special_tokens
            special = conversations_of(request) is None if special is None else special
            offsets = self._engine.async_tokenizer.tokenizer.offsets(prompt.text, add_special_tokens=special)
        return LateChunking(
            chunk_size=found.chunk_size,
            input_tokens=found.input_tokens,
            strategy=found.strategy,
            chunks=[Chunk(each.token_range, _characters(offsets[slice(*each.token_range)])) for each in found.chunks],
        )


def _characters(offsets: list[tuple[int, int]]) -> tuple[int, int] | None:
    """The begin and the end of the characters of some tokens; those of special tokens are empty."""
    real = [(start, end) for start, end in offsets if start < end]
    return (min(start for start, _ in real), max(end for _, end in real)) if real else None

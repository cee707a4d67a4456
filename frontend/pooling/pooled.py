"""POST /pooling: the output of any task of the model."""

from quire.core.errors import ParameterError
from quire.core.wire.pooling_params import PoolingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.io_processors.plugin import Plugin
from quire.frontend.pooling.answers import PluginResponse, PooledData, PoolingResponse
from quire.frontend.pooling.encoding import Encoding
from quire.frontend.pooling.inputs import Inputs
from quire.frontend.pooling.replies import Reply, begin, bytes_facts, caller_of, plain, usage
from quire.frontend.pooling.schema import PoolingRequest
from quire.frontend.pooling.tasks import Tasks
from quire.frontend.pooling.vectors import VectorBytes, json_writer, plain_bytes
from quire.frontend.requests.time_slices import in_time_slices


class PooledOutputs:
    """Answers requests for pooled outputs."""

    def __init__(
        self, engine: AsyncLLM, inputs: Inputs, encoding: Encoding, tasks: Tasks, plugin: Plugin | None
    ) -> None:
        self._engine = engine
        self._inputs = inputs
        self._encoding = encoding
        self._tasks = tasks
        self._plugin = plugin

    async def create(
        self, request: PoolingRequest, headers: ClientHeaders = ClientHeaders()
    ) -> PoolingResponse | PluginResponse | VectorBytes:
        """The outputs; cancelling aborts them in the engine. Raises RequestError and EngineError."""
        reply = begin(self._engine, request, headers, "pooling")
        if request.data is not None:
            return await self._by_plugin(request, reply, headers)
        task = self._tasks.asked(request.task)
        params = PoolingParams(task=task, dimensions=request.dimensions, use_activation=request.use_activation)
        prompts = await self._inputs.read(request)
        outputs = await self._encoding.encode(prompts, params, caller_of(request, reply, headers))
        counted = usage(outputs)
        if request.format in ("bytes", "bytes_only"):
            facts = bytes_facts(reply, counted) if request.format == "bytes" else None
            return plain_bytes([output.outputs.array for output in outputs], *request.number_format, facts)
        write = json_writer(request.format, *request.number_format)
        return PoolingResponse(
            id=reply.id,
            created=reply.created,
            model=reply.model,
            data=[
                PooledData(index=index, data=write(output.outputs.array))
                async for index, output in in_time_slices(enumerate(outputs))
            ],
            usage=counted,
        )

    async def _by_plugin(self, request: PoolingRequest, reply: Reply, headers: ClientHeaders) -> PluginResponse:
        """The answer that the plugin makes of a client's own data."""
        if self._plugin is None:
            raise ParameterError(
                "data is for a plugin, and this server has none: start it with --io-processor-plugin, or send input.",
                param="data",
            )
        made = await self._plugin.prompts(request.data, reply.id)
        prompts = await self._inputs.read_prompts(made, must_fit=request.truncation is None, name="data")
        prompts = self._inputs.fit(prompts, request.truncation, has_special_tokens=True, name="data")
        outputs = await self._encoding.encode(prompts, self._plugin.params(), caller_of(request, reply, headers))
        answer = await self._plugin.answer(outputs, reply.id)
        return PluginResponse(request_id=reply.id, created_at=reply.created, data=plain(answer))

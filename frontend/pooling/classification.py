"""POST /classify: the probabilities of labels for each text or conversation."""

from quire.core.wire.pooling_params import PoolingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.pooling.answers import Classification, ClassificationResponse
from quire.frontend.pooling.encoding import Encoding
from quire.frontend.pooling.inputs import Inputs
from quire.frontend.pooling.replies import begin, caller_of, usage
from quire.frontend.pooling.schema import ClassificationRequest
from quire.frontend.pooling.tasks import Tasks
from quire.frontend.pooling.vectors import json_numbers
from quire.frontend.requests.time_slices import in_time_slices


class Classifications:
    """Answers requests for labels."""

    def __init__(self, engine: AsyncLLM, inputs: Inputs, encoding: Encoding, tasks: Tasks) -> None:
        self._engine = engine
        self._inputs = inputs
        self._encoding = encoding
        self._tasks = tasks

    async def create(
        self, request: ClassificationRequest, headers: ClientHeaders = ClientHeaders()
    ) -> ClassificationResponse:
        """The probabilities; cancelling aborts them in the engine. Raises RequestError and EngineError."""
        reply = begin(self._engine, request, headers, "classify")
        task = self._tasks.choose("classify")
        names = self._tasks.spec.classes
        prompts = await self._inputs.read(request)
        params = PoolingParams(task=task, use_activation=request.use_activation)
        outputs = await self._encoding.encode(prompts, params, caller_of(request, reply, headers))
        found = []
        async for index, output in in_time_slices(enumerate(outputs)):
            values = output.outputs.array
            likeliest = int(values.argmax())
            found.append(
                Classification(
                    index=index,
                    label=names[likeliest] if likeliest < len(names) else None,
                    probs=json_numbers(values),
                    num_classes=len(values),
                )
            )
        return ClassificationResponse(
            id=reply.id, created=reply.created, model=reply.model, data=found, usage=usage(outputs)
        )

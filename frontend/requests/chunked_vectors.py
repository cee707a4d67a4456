"""The vector of a prompt that is longer than the model's context: the mean of its parts' vectors."""

import asyncio
from collections.abc import Callable
from typing import Self

from quire.core.wire.pooling import Pooling
from quire.frontend.outputs import PoolingOutput, PoolingRequestOutput
from quire.frontend.requests.pooling_stream import PoolingStream, VectorsOutput
from quire.frontend.requests.prompt import Prompt


class ChunkedVectors:
    """A request whose parts are requests of their own; to its reader it is like a `PoolingStream`.

    A part counts by its tokens, so that the means of parts become the mean of the whole. The parts' vectors are neither
    cut nor normalized; the mean is.

    Args:
        pooling: what the whole request wants.
        on_close: called once, when the request has ended.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        pooling: Pooling,
        on_close: Callable[["ChunkedVectors"], None],
    ) -> None:
        self.request_id = request_id
        self._prompt = prompt
        self._pooling = pooling
        self._parts: list[PoolingStream] = []
        self._left_out: list[int] = []  # tokens of each part
        self._on_close = on_close
        self._is_read = False

    def add(self, part: PoolingStream, num_left_out: int) -> None:
        """Takes the next part, whose mean is without some of its tokens."""
        self._parts.append(part)
        self._left_out.append(num_left_out)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> VectorsOutput:
        """The output, once; raises as `output` does."""
        if self._is_read:
            raise StopAsyncIteration
        self._is_read = True
        return await self.output()

    async def output(self) -> VectorsOutput:
        """The output, once all parts are there; errors are those of `PoolingStream.output`."""
        import numpy as np  # imported here, because most servers do without

        outputs = await asyncio.gather(*(part.output() for part in self._parts))
        counts = [
            len(output.prompt_token_ids) - left_out for output, left_out in zip(outputs, self._left_out, strict=True)
        ]
        weights = np.array(counts, np.float64)
        rows = np.stack([output.outputs.array for output in outputs]).astype(np.float64)
        vector = (weights @ rows / max(weights.sum(), 1))[: self._pooling.dimensions]
        if self._pooling.activation:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return PoolingRequestOutput(
            request_id=self.request_id,
            outputs=PoolingOutput(vector.astype("<f4").tobytes(), (len(vector),)),
            prompt_token_ids=self._prompt.token_ids,
            num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
        )

    def abort(self) -> None:
        """Ends all parts now; see `PoolingStream.abort`."""
        for part in self._parts:
            part.abort()
        self._on_close(self)

    def close(self) -> None:
        """Aborts the unfinished parts, because the reader is gone. Harmless at the end."""
        self.abort()

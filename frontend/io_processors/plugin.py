"""Runs a plugin's processor around the prompts of one request."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any

from quire.core.errors import ParameterError
from quire.core.wire.pooling_params import PoolingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.io_processors.loading import load_processor
from quire.frontend.outputs import PoolingOutput, PoolingRequestOutput
from quire.frontend.requests.prompt import PromptLike


class Plugin:
    """The processor of one server or `LLM`. Its methods run in a thread, because they may take long.

    Args:
        processor: an `IOProcessor`, or an object with its methods.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    @classmethod
    def of(cls, llm: AsyncLLM) -> "Plugin | None":
        """The one that the options or the checkpoint name; None if they name none. Raises ConfigError."""
        processor = load_processor(llm)
        return None if processor is None else cls(processor)

    async def prompts(self, data: Any, request_id: str | None) -> list[PromptLike]:
        """The prompts of a client's data.

        Raises:
            ParameterError: the processor refuses the data, or makes no prompt of it.
        """
        made = await asyncio.to_thread(self._pre_process, data, request_id)
        prompts = [made] if _is_one_prompt(made) else list(made)
        if not prompts:
            raise ParameterError("The plugin made no prompt of data.", param="data")
        return prompts

    def _pre_process(self, data: Any, request_id: str | None) -> Any:
        return _checked(lambda: self._processor.pre_process(self._processor.parse_data(data), request_id=request_id))

    def params(self, given: PoolingParams | None = None) -> PoolingParams:
        """The parameters of the prompts, where the processor may change those that the caller gave."""
        merged = self._processor.merge_pooling_params(given)
        if not isinstance(merged, PoolingParams):  # vLLM's own
            values = {name: getattr(merged, name, None) for name in PoolingParams.__struct_fields__}
            merged = PoolingParams(**{name: value for name, value in values.items() if value is not None})
        if merged.task == "plugin":
            merged = merged.clone()
            merged.task = None
        return merged

    async def answer(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]], request_id: str | None) -> Any:
        """Returns what the processor computes from the outputs."""
        return await asyncio.to_thread(
            functools.partial(self._processor.post_process, list(outputs), request_id=request_id)
        )


def _is_one_prompt(made: Any) -> bool:
    if isinstance(made, (str, dict)):
        return True
    return isinstance(made, (list, tuple)) and bool(made) and isinstance(made[0], int)


def _checked(work: Callable[[], Any]) -> Any:
    """The result of work on a client's data, whose errors of values and types are the client's."""
    try:
        return work()
    except ParameterError:
        raise
    except (ValueError, TypeError) as error:
        raise ParameterError(f"The plugin refused data: {error}", param="data") from error

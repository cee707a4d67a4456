"""The class that a plugin's processor derives from, with vLLM's methods."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from quire.core.wire.pooling_params import PoolingParams
from quire.frontend.outputs import PoolingOutput, PoolingRequestOutput
from quire.frontend.requests.prompt import PromptLike

Data = TypeVar("Data")
Answer = TypeVar("Answer")


class IOProcessor(ABC, Generic[Data, Answer]):
    """Makes prompts of data, and an answer of their outputs. Its methods run in a thread, several at once.

    A package names it by an entry point of the group `quire.io_processor_plugins`, or `vllm.io_processor_plugins`: a
    function that returns the class as `module.Class`.

    Args:
        vllm_config: the resolved options, by vLLM's names.
        renderer: has `get_tokenizer()`, which returns the checkpoint's tokenizer as Transformers' class.
    """

    def __init__(self, vllm_config: Any, renderer: Any) -> None:
        self.vllm_config = vllm_config
        self.renderer = renderer

    @abstractmethod
    def parse_data(self, data: Any) -> Data:
        """The field `data` of a request, checked. A ValueError or TypeError tells the client what is wrong."""

    @abstractmethod
    def pre_process(
        self, prompt: Data, request_id: str | None = None, **kwargs: Any
    ) -> PromptLike | Sequence[PromptLike]:
        """The prompt of checked data, or several."""

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        """The parameters of the prompts; without a task, or with "plugin", they are for the model's first task."""
        return params or PoolingParams(task="plugin")

    @abstractmethod
    def post_process(
        self,
        model_output: Sequence[PoolingRequestOutput[PoolingOutput]],
        request_id: str | None = None,
        **kwargs: Any,
    ) -> Answer:
        """The answer's `data`, of the outputs in the order of the prompts."""

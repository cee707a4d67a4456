"""A request's parameters where vectors are its output, with vLLM's names, order and defaults."""

import copy
from typing import Annotated, Any

from msgspec import Meta, Struct

from quire.core.errors import ParameterError
from quire.core.wire.field_types import check_types, read_numbers
from quire.core.wire.pooling import PoolingTask
from quire.core.wire.sampling_params import RequestOutputKind

_REMOVED_TASKS = {
    "score": "take classify.",
    "encode": "take token_embed or token_classify.",
    "reward": "take classify, or token_classify for a reward of each token.",
}


def check_task(task: Any) -> None:
    """Raises ParameterError for a name that older versions of vLLM had for a task."""
    if isinstance(task, str) and task in _REMOVED_TASKS:
        raise ParameterError(f"There is no task {task!r}: {_REMOVED_TASKS[task]}", param="task")


class LateChunkingParams(Struct, omit_defaults=True):
    """Chunks of equally many tokens, with one vector a chunk: the mean of its tokens' hidden states.

    Raises:
        ParameterError: `chunk_size` is no whole number of 1 to 2^63 - 1.
    """

    chunk_size: int

    def __post_init__(self) -> None:
        if type(self.chunk_size) is not int or not 0 < self.chunk_size < 2**63:
            raise ParameterError("chunk_size must be a positive whole number below 2^63.", param="chunk_size")


class PoolingParams(Struct, omit_defaults=True):
    """Parameters of one request for vectors, classes or scores.

    Raises:
        ParameterError: a value has a wrong type or is out of its range; `param` names the field.
    """

    use_activation: Annotated[
        bool | None,
        Meta(description="Normalize a vector, or make probabilities of a class's logits; None: as the model says."),
    ] = None
    dimensions: Annotated[
        int | None, Meta(description="The first elements of a vector to return, where the model is trained for it.")
    ] = None
    step_tag_id: Annotated[
        int | None, Meta(description="With STEP pooling: return the vectors of tokens with this id alone.")
    ] = None
    returned_token_ids: Annotated[
        list[int] | None, Meta(description="With STEP pooling: return the logits of these tokens.")
    ] = None
    task: Annotated[PoolingTask | None, Meta(description="The task; None: the first one that the model serves.")] = None
    requires_token_ids: Annotated[bool, Meta(description="Set by the engine; nothing reads it.")] = False
    skip_reading_prefix_cache: Annotated[
        bool | None, Meta(description="Compute the whole prompt, whatever the prefix cache has.")
    ] = None
    late_interaction_params: Annotated[
        None, Meta(description="None alone: token vectors are compared where the request came in.")
    ] = None
    extra_kwargs: Annotated[
        dict[str, Any] | None,
        Meta(description="max_tokens_per_query and max_tokens_per_doc of a score, chat_template_kwargs of its prompt."),
    ] = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    late_chunking_params: Annotated[
        LateChunkingParams | None,
        Meta(description="For token_embed: one vector for each chunk of so many tokens, the mean of theirs."),
    ] = None

    def __post_init__(self) -> None:
        read_numbers(self)
        check_task(self.task)
        if self.late_interaction_params is not None:
            raise ParameterError(
                "late_interaction_params are vLLM's own: leave them out, and token vectors are compared by `score`.",
                param="late_interaction_params",
            )
        check_types(self)
        if self.output_kind is not RequestOutputKind.FINAL_ONLY:
            raise ParameterError("Vectors come at the end: output_kind must be FINAL_ONLY.", param="output_kind")

    def clone(self) -> "PoolingParams":
        """A copy that shares nothing with this one."""
        return copy.deepcopy(self)

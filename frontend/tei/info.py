"""GET /info: the served model and the server's limits."""

import os

import quire
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.pooling.fields import MAX_INPUTS
from quire.frontend.pooling.tasks import Tasks
from quire.frontend.tei.answers import ClassifierModel, EmbeddingModel, Info, ModelType

_POOLINGS = {"CLS": "cls", "LAST": "last_token", "MEAN": "mean", "SPLADE_MAX": "splade", "SPLADE_SUM": "splade"}


def describe_model(engine: AsyncLLM, tasks: Tasks) -> Info:
    """The answer. Raises WrongTaskError for a model that generates text."""
    limits = engine.config.limits
    return Info(
        model_id=engine.model.folder,
        model_dtype=engine.config.spec.dtype,
        served_model_name=engine.model.name,
        model_type=_kind(tasks),
        max_concurrent_requests=limits.max_num_seqs + (limits.max_num_queued_reqs or 0),
        max_input_length=engine.max_model_len,
        max_batch_tokens=limits.max_num_batched_tokens,
        max_batch_requests=limits.max_num_seqs,
        max_client_batch_size=MAX_INPUTS,
        tokenization_workers=os.cpu_count() or 1,
        version=quire.__version__,
    )


def _kind(tasks: Tasks) -> ModelType:
    spec = tasks.spec
    if spec.embeds:
        return ModelType(embedding=EmbeddingModel(pooling=_POOLINGS[spec.sequence]))
    classes = ClassifierModel(
        {str(index): name for index, name in enumerate(spec.classes)},
        {name: index for index, name in enumerate(spec.classes)},
    )
    return ModelType(reranker=classes) if len(spec.classes) == 1 else ModelType(classifier=classes)

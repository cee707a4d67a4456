"""Jina Reranker v3 (arXiv:2509.25085): Qwen3 that reads a query and its documents together."""

import torch

from quire.core.config.resolved import ModelSpec
from quire.core.wire.pooling import EMBED
from quire.executor.layers.context import ModelContext
from quire.executor.models.dense.qwen3 import Qwen3ForCausalLM
from quire.executor.models.vector_heads import EmbeddingHead, VectorHead, linear_head

_DEFAULT_SIZE = 512


class JinaForRanking(Qwen3ForCausalLM):
    """Two linear layers make the vector of a text of the hidden state of the token behind it."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        super().__init__(spec, context)
        size = spec.hidden_size
        first = linear_head(context, "projector.0", size // 2, size)
        last = linear_head(context, "projector.2", spec.config_json.get("embedding_size", _DEFAULT_SIZE), size // 2)
        self.vector_heads: dict[str, VectorHead] = {EMBED: EmbeddingHead([first, torch.relu, last])}

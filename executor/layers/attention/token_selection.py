"""Selects the tokens for sparse latent attention: DeepSeek's lightning indexer (arXiv:2512.02556, section 2.1)."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, whole
from quire.executor.layers.norm import NormStyle
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.step_context import StepContext
from quire.ops.latent import Selection


class TokenSelector(Protocol):
    """Selects the tokens that a layer's tokens attend to.

    Attributes:
        key_size: elements that it caches for each token, in the layer's cache.
        activation_size: values that it computes for each token.
    """

    key_size: int
    activation_size: int

    def __call__(self, x: Tensor, q_latent: Tensor, step: StepContext, keys: Tensor, group: int) -> Selection:
        """Returns the selection of the tokens with an output.

        `x` [num_tokens, hidden] is the layer's input, `q_latent` [num_tokens, q_lora_rank] the queries' latent, `keys`
        [num_pages, block_size, row_size(key_size)] the layer's own cache, in the KV group `group`.
        """
        ...


@dataclass(frozen=True)
class IndexerShape:
    """Sizes of a model's indexers; every rank has all of their heads.

    Attributes:
        q_lora_rank: of the queries' latent, from which index queries are projected as well.
        top_k: the most tokens that a token attends to.
    """

    hidden_size: int
    q_lora_rank: int
    num_heads: int
    head_dim: int
    top_k: int


class LightningIndexer:
    """Scores tokens with additional small heads, and selects the `top_k` best; see `LatentOperations.select_tokens`.

    Index keys are layer-normalized. The first elements of keys and of each query are rotated as halves. Keys are cached
    in the cache's dtype; the reference rounds them to 8 bits, after a Hadamard transform, which preserves products.
    """

    def __init__(
        self, context: ModelContext, place: LayerPlace, name: str, shape: IndexerShape, rotary: RotaryEmbedding
    ) -> None:
        heads, size = shape.num_heads, shape.head_dim
        self._ops = context.ops
        self._is_last = place.is_last
        self._shape = shape
        self._rotary = rotary
        self._q = ColumnLinear(context, [whole(f"{name}.wq_b", heads * size)], shape.q_lora_rank)
        self._k = ColumnLinear(context, [whole(f"{name}.wk", size)], shape.hidden_size)
        self._weights = ColumnLinear(context, [whole(f"{name}.weights_proj", heads)], shape.hidden_size)
        self._k_norm = _NORM.layer(context, f"{name}.k_norm", size)
        self.key_size = size
        self.activation_size = 2 * (heads * size + size) + heads + 2 * shape.top_k

    def __call__(self, x: Tensor, q_latent: Tensor, step: StepContext, keys: Tensor, group: int) -> Selection:
        """Selects tokens, and stores the selection of all tokens as `step.selection`."""
        shape, batch = self._shape, step.attention[group]
        cos, sin = step.rotation(self._rotary)
        k = self._ops.rotary(self._k_norm(self._k(x)).unsqueeze(1), cos, sin)
        self._ops.latent.store_rows(k.squeeze(1), keys, batch.slot_mapping)
        q = self._ops.rotary(self._q(q_latent).unflatten(1, (shape.num_heads, shape.head_dim)), cos, sin)
        weights = self._weights(x)
        if self._is_last and step.wanted is not None:
            tokens, batch = step.wanted.tokens, step.wanted.attention[group]
            q = self._ops.take_rows(q.flatten(1), tokens).unflatten(1, q.shape[1:])
            weights = self._ops.take_rows(weights, tokens)
        scale = (shape.num_heads * shape.head_dim) ** -0.5
        step.selection = self._ops.latent.select_tokens(q, weights, keys, batch, top_k=shape.top_k, scale=scale)
        return step.selection


class SharedSelection:
    """Attends to the tokens that the last indexer before this layer selected (arXiv:2603.12201)."""

    key_size = 0
    activation_size = 0

    def __init__(self, context: ModelContext, place: LayerPlace) -> None:
        self._ops = context.ops
        self._is_last = place.is_last

    def __call__(self, x: Tensor, q_latent: Tensor, step: StepContext, keys: Tensor, group: int) -> Selection:
        assert step.selection is not None, "no layer before this one has an indexer"
        if not self._is_last or step.wanted is None:
            return step.selection
        slots, counts = step.selection
        tokens = step.wanted.tokens
        return Selection(
            self._ops.take_rows(slots, tokens), self._ops.take_rows(counts.unsqueeze(1), tokens).squeeze(1)
        )  # fmt: skip


_NORM = NormStyle(1e-6, is_centred=True, has_bias=True)

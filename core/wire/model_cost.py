"""The cost of one step of a model on one rank, counted without running it: bytes to read and weights to multiply by."""

from msgspec import Struct

from quire.core.wire.kv_groups import KVGroupSpec


class WeightCost(Struct, array_like=True, frozen=True):
    """Weights of one kind on one rank: their bytes, and the number of weights that a token is multiplied by."""

    num_bytes: int = 0
    num_weights: int = 0


class AttentionCost(Struct, array_like=True, frozen=True):
    """Attention layers with the same window on one rank, all together."""

    window: int | None  # tokens that a token sees, itself included; None: all before it
    bytes_per_token: int  # of keys and values, for each token that is seen
    operations: int  # multiplications and additions for each token and each token that it sees


class ShardCost(Struct, array_like=True, frozen=True):
    """The whole model's layers on the first of `tensor` ranks that divide each of them.

    Attributes:
        layers: linear layers of the blocks that every token passes, shared experts too.
        head: the language-model head, which only tokens with logits pass.
        experts: all routed experts' parts that this rank has.
        rest_bytes: all else that every step reads: norms, routers, convolutions.
        embedding_bytes: rows of which a step reads only its tokens'.
        state_bytes: of one sequence's recurrent states; `page_bytes`: of one page of the pool.
    """

    tensor: int
    layers: WeightCost
    head: WeightCost
    experts: WeightCost
    rest_bytes: int
    embedding_bytes: int
    workspace_bytes: int
    state_bytes: int
    page_bytes: int
    kv_groups: list[KVGroupSpec]
    attention: list[AttentionCost]

    @property
    def weights_bytes(self) -> int:
        """All that the rank holds of the model."""
        parts = (self.layers, self.head, self.experts)
        return sum(part.num_bytes for part in parts) + self.rest_bytes + self.embedding_bytes


class ModelCost(Struct, array_like=True, tag="cost"):
    """A model, and its cost on a rank for each number of ranks that can divide its layers."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    activation_bytes: int  # of one element of the residual stream
    num_experts: int  # of one layer; 0: there are none
    experts_per_token: int
    num_expert_layers: int
    shards: list[ShardCost]
    refusals: list[tuple[int, str]]  # numbers of ranks that cannot divide the layers, and why

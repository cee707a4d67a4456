"""Per-layer embeddings: each layer has a small embedding of the token, and a projection of the model's embedding."""

import torch
from torch import Tensor

from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, whole
from quire.executor.layers.norm import NormStyle, RMSNorm
from quire.executor.layers.step_context import StepContext
from quire.executor.layers.vocabulary import VocabEmbedding, VocabularyWeight
from quire.ops.activations import PlainActivation


class PerLayerInputs:
    """The inputs of all layers for each token: [num_tokens, num_layers * size], one layer after the other.

    Attributes:
        activation_size: values of each token.
    """

    def __init__(
        self, context: ModelContext, norm: NormStyle, *, hidden_size: int, size: int, num_layers: int,
        vocab_size: int, table_size: int,
    ) -> None:  # fmt: skip
        """Takes as `table_size` the number of tokens with an embedding; others have that of token 0."""
        self._ops = context.ops
        self._size = size
        self._scale = hidden_size**-0.5
        self.activation_size = num_layers * size
        name = "model.embed_tokens_per_layer.weight"
        weight = VocabularyWeight(context, name, table_size, num_layers * size)
        self._embed = VocabEmbedding(context, weight, torch.tensor(size**0.5, dtype=context.dtype).item())
        self._rows: Tensor | None = None
        if table_size < vocab_size:
            rows = torch.arange(vocab_size, device=context.device)
            self._rows = rows.masked_fill_(rows >= table_size, 0).unsqueeze(1)
        outputs = whole("model.per_layer_model_projection", num_layers * size)
        self._project = ColumnLinear(context, [outputs], hidden_size)
        self._norm = (norm.read(context, "model.per_layer_projection_norm", size), norm.eps)

    def __call__(self, token_ids: Tensor, embeds: Tensor, step: StepContext) -> Tensor:
        """Takes `token_ids` [num_tokens] and `embeds` [num_tokens, hidden]. Tokens with given rows have only the
        projection, unless other tokens' embeddings of layers stand beside these.
        """
        projected = self._ops.scale(self._project(embeds), self._scale).unflatten(1, (-1, self._size))
        projected = self._ops.rms_norm(projected, *self._norm).flatten(1)
        given = step.input_embeds
        if given is not None and given.layer_tokens is not None:
            token_ids = token_ids.index_copy(0, given.places, given.layer_tokens.clamp(min=0))
        if self._rows is not None:
            token_ids = self._ops.take_rows(self._rows, token_ids).flatten()
        inputs = self._ops.scale(self._ops.add(projected, self._embed.rows_of(token_ids)), 0.5**0.5)
        if given is not None:
            alone = given.places if given.layer_tokens is None else given.places[given.layer_tokens < 0]
            inputs[alone] = projected[alone]
        return inputs


class PerLayerBlock:
    """Computes a layer's addition from its input: `norm(projection(activation(gate(x)) * input))`."""

    def __init__(
        self, context: ModelContext, name: str, index: int, hidden_size: int, size: int, norm: NormStyle,
        activation: PlainActivation,
    ) -> None:  # fmt: skip
        """Takes the layer's `index` and `name`."""
        self._ops = context.ops
        self._columns = slice(index * size, (index + 1) * size)
        self._activation = activation
        self._gate = ColumnLinear(context, [whole(f"{name}.per_layer_input_gate", size)], hidden_size)
        self._project = ColumnLinear(context, [whole(f"{name}.per_layer_projection", hidden_size)], size)
        self._norm = RMSNorm(context, f"{name}.post_per_layer_input_norm", hidden_size, norm)

    def __call__(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Maps `x` [num_tokens, hidden] to the same shape; `inputs` of these tokens are as `PerLayerInputs` computes
        them.
        """
        gate = self._gate(x, self._activation)
        gated = self._ops.recurrent.multiply_gate(inputs[:, self._columns], gate, "identity")
        return self._norm(self._project(gated))

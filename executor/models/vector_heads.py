"""The heads that make vectors, scores or probabilities of hidden states, with the checkpoint's weights.

Heads compute in float32: they are small, and their values are what the client gets.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.config.pooling import DenseLayer, PoolingSpec, SequencePooling, TokenScores
from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.core.wire.pooling import CLASSIFY, EMBED, Pooling
from quire.executor.layers.adapted import label_head_adapters
from quire.executor.layers.adapters import LayerAdapters
from quire.executor.layers.context import ModelContext
from quire.executor.layers.vocabulary import stored_ends
from quire.executor.weights.readers import Shard
from quire.executor.weights.tensor_files import open_file

VectorHead = Callable[[Tensor, Pooling], Tensor]
"""Maps hidden states [n, hidden] float32 to [n, width] float32, as the request's parameters say."""

Projection = Callable[[Tensor], Tensor]
"""Maps [n, in_features] float32 to [n, out_features] float32."""


@runtime_checkable
class ClassifyingModel(Protocol):
    """A model whose file reads the checkpoint's classifier."""

    def classify(self, hidden: Tensor) -> Tensor:
        """Maps pooled hidden states [n, hidden] float32 to logits [n, num_classes] float32."""
        ...


@runtime_checkable
class PooledLabels(ClassifyingModel, Protocol):
    """A model that knows the poolings whose vector its classifier is for; none: any."""

    label_poolings: Sequence[SequencePooling]


@runtime_checkable
class ManyHeadedModel(Protocol):
    """A model with further heads."""

    vector_heads: Mapping[str, VectorHead]
    """By the name that a request's `Pooling` has for them."""


def plain(hidden: Tensor, pooling: Pooling) -> Tensor:
    """Returns the hidden states as they are."""
    return hidden


class EmbeddingHead:
    """Dense layers, the cut to the dimensions that the request asks for, and normalization."""

    def __init__(self, dense: list[Projection]) -> None:
        self._dense = dense

    def __call__(self, hidden: Tensor, pooling: Pooling) -> Tensor:
        for layer in self._dense:
            hidden = layer(hidden)
        if pooling.dimensions is not None:
            hidden = hidden[:, : pooling.dimensions]
        return F.normalize(hidden, dim=-1) if pooling.activation else hidden


class ClassificationHead:
    """Logits of classes, their calibration, and the function that makes probabilities of them."""

    def __init__(
        self, classifier: Projection, activation: Projection, mean: float | None = None, sigma: float | None = None
    ) -> None:
        self._classifier = classifier
        self._activation = activation
        self._mean = mean
        self._sigma = sigma

    def __call__(self, hidden: Tensor, pooling: Pooling) -> Tensor:
        logits = self._classifier(hidden)
        if self._mean is not None:
            logits = logits - self._mean
        if self._sigma is not None:
            logits = logits / self._sigma
        return self._activation(logits) if pooling.activation else logits


class Linear:
    """`x @ weight.T + bias` in float32, of one row at a time: a row's sums do not depend on the other rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, adapters: LayerAdapters | None = None) -> None:
        self._weight = weight.float()
        self._bias = None if bias is None else bias.float()
        self._adapters = adapters

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty(0, len(self._weight))
        out = torch.stack([F.linear(row, self._weight, self._bias) for row in x])
        return out if self._adapters is None else self._adapters.add(x, out)


def sigmoid_or_softmax(logits: Tensor) -> Tensor:
    """Maps the logit of one class to a probability by itself, and those of several to probabilities that sum to 1."""
    return torch.sigmoid(logits) if logits.shape[-1] < 2 else torch.softmax(logits, dim=-1)


def build_heads(
    spec: ModelSpec, pooling: PoolingSpec | None, context: ModelContext, model: object
) -> dict[str, VectorHead]:
    """Builds the heads that requests may name.

    Args:
        pooling: None: the model generates, and has none.
        model: of `spec`; its file may define heads.

    Raises:
        ModelLoadError: the checkpoint lacks a head's weights.
    """
    heads: dict[str, VectorHead] = dict(model.vector_heads) if isinstance(model, ManyHeadedModel) else {}
    if pooling is None:
        return heads
    if pooling.embeds:
        dense = [_dense_layer(spec, layer, context.device) for layer in pooling.dense]
        if pooling.projection is not None:
            dense = [[linear_head(context, pooling.projection, pooling.embedding_size, spec.hidden_size)]]
        heads.setdefault(EMBED, EmbeddingHead([part for parts in dense for part in parts]))
        for task, head in pooling.token_heads.items():
            linear = _stored_linear(Path(spec.path) / head.file, spec.hidden_size, context.device)
            is_normalized = head.activation == "normalize"
            heads[task] = (
                EmbeddingHead([linear]) if is_normalized else ClassificationHead(linear, _activation(head.activation))
            )
    else:
        if isinstance(model, PooledLabels) and "classify" in pooling.tasks:
            _check_pooling(spec, pooling, model.label_poolings)
        classifier = model.classify if isinstance(model, ClassifyingModel) else _classifier(spec, pooling, context)
        activation = _score_activation(pooling.score_activation)
        heads.setdefault(CLASSIFY, ClassificationHead(classifier, activation, pooling.logit_mean, pooling.logit_sigma))
    return heads


def _check_pooling(spec: ModelSpec, pooling: PoolingSpec, own: Sequence[SequencePooling]) -> None:
    """Raises ModelLoadError if the labels of a text are of another vector than the pooling makes."""
    if own and pooling.sequence not in own:
        raise ModelLoadError(
            f"{spec.name}: the labels of {spec.architecture} are those of the pooling {own[0]}, not of "
            f"{pooling.sequence}; serve it with --pooler-config.pooling_type {own[0]}."
        )


# ------------------------------------------------------------------------------------------------------------- weights


def _classifier(spec: ModelSpec, pooling: PoolingSpec, context: ModelContext) -> Projection:
    """Reads the classifier of a decoder."""
    if pooling.token_scores is not None:
        return _of_tokens(spec, pooling.token_scores, context)
    classes, hidden = len(pooling.classes), spec.hidden_size
    for name in ("score", "classifier", "v_head"):
        if _is_stored(context, name):
            return linear_head(context, name, classes, hidden, has_labels=True)
    if _is_stored(context, "score.0") and _is_stored(context, "score.2"):
        first = linear_head(context, "score.0", hidden, hidden, has_labels=True)
        last = linear_head(context, "score.2", classes, hidden, has_labels=True)
        return lambda x: last(torch.relu(first(x)))
    raise ModelLoadError(
        f"{spec.name} has no classifier: neither score, classifier nor v_head is among its weights. Serve it with "
        '--convert embed, or name tokens that are its classes with --hf-overrides \'{"classifier_from_token": '
        '["no", "yes"], "method": "from_2_way_softmax"}\'.'
    )


def _is_stored(context: ModelContext, layer: str) -> bool:
    return context.weights.shapes is None or context.find(f"{layer}.weight") is not None


def linear_head(
    context: ModelContext, name: str, out_features: int, in_features: int, *, has_labels: bool = False
) -> Linear:
    """Reads a linear layer of a head, with its bias if the checkpoint has one; one for labels takes adapters."""
    weight = context.read(f"{name}.weight", (out_features, in_features), dtype=torch.float32)
    has_bias = context.find(f"{name}.bias") is not None
    bias = context.read(f"{name}.bias", (out_features,), dtype=torch.float32) if has_bias else None
    adapters = label_head_adapters(context, name, in_features, out_features, bias=has_bias) if has_labels else None
    return Linear(weight, bias, adapters)


def _of_tokens(spec: ModelSpec, scores: TokenScores, context: ModelContext) -> Linear:
    """Reads rows of the language-model head, which is the embedding where the two share a weight."""
    head = "lm_head"
    if spec.hf_config.get("tie_word_embeddings", False):
        _, head = stored_ends(context, "model.embed_tokens", head)
    shape = (spec.vocab_size, spec.hidden_size)
    rows = [
        context.read(f"{head}.weight", shape, Shard(0, token_id, token_id + 1), torch.float32)
        for token_id in scores.token_ids
    ]
    if scores.as_difference:
        no, yes = rows
        return Linear(yes - no)
    return Linear(torch.cat(rows))


def _dense_layer(spec: ModelSpec, layer: DenseLayer, device: torch.device) -> list[Projection]:
    """Reads a layer of sentence-transformers' from its folder: a linear map and its activation."""
    folder = Path(spec.path) / layer.folder
    path = next(
        (path for name in ("model.safetensors", "pytorch_model.bin") if (path := folder / name).is_file()), None
    )
    if path is None:
        raise ModelLoadError(f"{folder} has no model.safetensors: download the checkpoint's folders too.")
    file = open_file(path)
    try:
        name = next((each for each in ("linear.", "dense.", "") if f"{each}weight" in file.names), None)
        if name is None or file.shape(f"{name}weight") != (layer.out_features, layer.in_features):
            raise ModelLoadError(
                f"{path} has no linear.weight of {layer.out_features} x {layer.in_features}, as its config.json says."
            )
        weight = file.read(f"{name}weight", None, torch.float32).to(device, torch.float32, copy=True)
        bias = None
        if layer.bias:
            bias = file.read(f"{name}bias", None, torch.float32).to(device, torch.float32, copy=True)
    finally:
        file.close()
    return [Linear(weight, bias), _activation(layer.activation)]


def _stored_linear(path: Path, in_features: int, device: torch.device) -> Linear:
    """Reads a linear layer from a file of its own, whose tensors are `weight` and `bias`."""
    file = open_file(path)
    try:
        if "weight" not in file.names or file.shape("weight")[1:] != (in_features,):
            raise ModelLoadError(f"{path} has no weight of {in_features} inputs, the size of the hidden states.")
        weight = file.read("weight", None, torch.float32).to(device, torch.float32, copy=True)
        bias = None
        if "bias" in file.names:
            bias = file.read("bias", None, torch.float32).to(device, torch.float32, copy=True)
    finally:
        file.close()
    return Linear(weight, bias)


def _score_activation(name: str) -> Projection:
    if name in ("auto", "torch.nn.modules.activation.Softmax"):
        return sigmoid_or_softmax
    return _activation(name)


def _activation(name: str) -> Projection:
    """Returns a function of torch.nn.modules, by its class's full name or its short one.

    Raises:
        ModelLoadError: there is none of this name.
    """
    module, _, short = name.rpartition(".")
    made = getattr(torch.nn, short, None)
    if (module and not module.startswith("torch.nn")) or not (
        isinstance(made, type) and issubclass(made, torch.nn.Module)
    ):
        raise ModelLoadError(f"There is no activation {name!r} in torch.nn; the checkpoint's files name it.")
    function: torch.nn.Module = made()
    return function

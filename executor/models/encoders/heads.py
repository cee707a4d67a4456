"""Heads of encoders: labels of a pooled vector or of each token, and scores of the vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.adapted import label_head_adapters
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, whole
from quire.executor.layers.norm import NormStyle
from quire.executor.layers.vocabulary import LanguageModelHead, VocabularyWeight

HeadActivation = Literal["tanh", "gelu", "gelu_tanh", "relu", "silu"]
_ACTIVATIONS: dict[HeadActivation, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}

_OF_SEQUENCES, _OF_TOKENS = "ForSequenceClassification", "ForTokenClassification"
_OVER_VOCABULARY = ("ForMaskedLM", "ForPreTraining")
"""The ends of the names of classes with a head: for labels of a sequence, of each token, and for the vocabulary."""
WORDS = "words"
"""The models' name for the table of tokens' embeddings."""


@dataclass(frozen=True)
class DenseForm:
    """The layers of a head before its last: linear, activation, and norm if there is one.

    Attributes:
        name: of the linear layer in checkpoints.
        norm: the norm's name.
    """

    name: str
    activation: HeadActivation
    norm: str | None = None
    has_bias: bool = True


class HeadForms(NamedTuple):
    """The heads that a family's checkpoints may have.

    Attributes:
        dense: before the labels of a sequence; None: the last layer alone.
        out: the last layer for a sequence's labels.
        token_dense: before the labels of tokens; their last layer is `classifier`.
        vocabulary_dense: before the scores of the vocabulary.
        vocabulary: the last layer of those, which shares the embedding's weight if the checkpoint does not store it.
        vocabulary_bias: its bias.
        vocabulary_size: the inputs of that layer; None: the hidden size.
    """

    dense: DenseForm | None
    out: str = "classifier"
    token_dense: DenseForm | None = None
    vocabulary_dense: DenseForm | None = None
    vocabulary: str = ""
    vocabulary_bias: str | None = None
    vocabulary_size: int | None = None


class Heads(NamedTuple):
    """The heads that a checkpoint has.

    Attributes:
        labels: maps pooled vectors, or the hidden states of tokens, [n, hidden] float32 to logits [n, num_labels].
        vocabulary: maps hidden states to scores of the vocabulary.
    """

    labels: Callable[[Tensor], Tensor] | None = None
    vocabulary: Callable[[Tensor], Tensor] | None = None


class _Linear:
    """A linear layer in float32, which every rank has whole."""

    def __init__(self, context: ModelContext, name: str, in_features: int, out_features: int, *, bias: bool) -> None:
        self._ops = context.ops
        self._packed = context.packing.linear(
            lambda: (
                context.read(f"{name}.weight", (out_features, in_features), dtype=torch.float32),
                context.read(f"{name}.bias", (out_features,), dtype=torch.float32) if bias else None,
            )
        )
        self._adapters = label_head_adapters(context, name, in_features, out_features, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        out = self._ops.linear(x, self._packed)
        return out if self._adapters is None else self._adapters.add(x, out)


class _Norm:
    """A layer norm in float32."""

    def __init__(self, context: ModelContext, name: str, size: int, style: NormStyle) -> None:
        self._weight = context.read(f"{name}.weight", (size,), dtype=torch.float32)
        self._bias = context.read(f"{name}.bias", (size,), dtype=torch.float32) if style.has_bias else None
        self._eps = style.eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


class _Chain:
    """One layer after the other."""

    def __init__(self, *layers: Callable[[Tensor], Tensor] | None) -> None:
        self._layers = [layer for layer in layers if layer is not None]

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self._layers:
            x = layer(x)
        return x


def read_heads(
    spec: ModelSpec, context: ModelContext, words: VocabularyWeight, forms: HeadForms, style: NormStyle
) -> Heads:
    """Reads the heads that the architecture names; `words` is the table of tokens' embeddings."""
    if labels_sequences(spec):
        return Heads(_label_head(spec, context, forms.dense, forms.out, style))
    if spec.architecture.endswith(_OF_TOKENS):
        return Heads(_label_head(spec, context, forms.token_dense, "classifier", style))
    if _scores_vocabulary(spec, forms):
        return Heads(vocabulary=_vocabulary_head(spec, context, words, forms, style))
    return Heads()


def labels_sequences(spec: ModelSpec) -> bool:
    """Returns True if the checkpoint has a head for labels of a whole sequence."""
    return spec.architecture.endswith(_OF_SEQUENCES)


def _label_head(
    spec: ModelSpec, context: ModelContext, form: DenseForm | None, name: str, style: NormStyle
) -> Callable[[Tensor], Tensor]:
    size = spec.hidden_size
    out = _Linear(context, name, size, num_labels(spec), bias=True)
    if form is None:
        return out
    linear = _Linear(context, form.name, size, size, bias=form.has_bias)
    norm = None if form.norm is None else _Norm(context, form.norm, size, style)
    return _Chain(linear, _ACTIVATIONS[form.activation], norm, out)


def read_words(spec: ModelSpec, context: ModelContext, forms: HeadForms, size: int) -> VocabularyWeight:
    """Reads the table of tokens' embeddings [vocab_size, size], which a head over the vocabulary may share."""
    is_shared = _scores_vocabulary(spec, forms) and _is_tied(spec)
    bias = forms.vocabulary_bias if is_shared else None
    return VocabularyWeight(context, f"{WORDS}.weight", spec.vocab_size, size, bias=bias, is_shared=is_shared)


def num_labels(spec: ModelSpec) -> int:
    """Counts the labels of config.json; Transformers leaves out its default, two."""
    labels = spec.hf_config.get("id2label")
    return len(labels) if labels else spec.hf_config.get("num_labels") or 2


def _scores_vocabulary(spec: ModelSpec, forms: HeadForms) -> bool:
    return bool(forms.vocabulary) and spec.architecture.endswith(_OVER_VOCABULARY)


def _is_tied(spec: ModelSpec) -> bool:
    return bool(spec.hf_config.get("tie_word_embeddings", True))


def _vocabulary_head(
    spec: ModelSpec, context: ModelContext, words: VocabularyWeight, forms: HeadForms, style: NormStyle
) -> Callable[[Tensor], Tensor]:
    inner = forms.vocabulary_size or spec.hidden_size
    form = forms.vocabulary_dense
    if not _is_tied(spec):
        words = VocabularyWeight(
            context, f"{forms.vocabulary}.weight", spec.vocab_size, inner, bias=forms.vocabulary_bias
        )
    head = LanguageModelHead(context, words)
    if form is None:
        return head
    linear = ColumnLinear(context, [whole(form.name, inner)], spec.hidden_size, bias=form.has_bias)
    norm = None if form.norm is None else style.layer(context, form.norm, inner)
    return _Chain(linear, _ACTIVATIONS[form.activation], norm, head)

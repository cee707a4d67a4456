"""Multi-token prediction (arXiv:2412.19437, section 2.2): a layer that a checkpoint has behind its model's own.

The module joins a token's hidden state with the embedding of the next token, and runs one more decoder layer. The head
makes the token after the next of its output. For further drafts, the module reads its own output in place of the
model's hidden state.

The decoder layer is the family's own: the family's class builds it as the last stage of a model with one more layer.
Families differ in the names of the module's tensors, which `_FORMS` lists.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.layer_kv import AttentionKV
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, whole
from quire.executor.layers.norm import NormStyle
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.layers.vocabulary import Head, LanguageModelHead, VocabularyWeight
from quire.executor.models.decoder import Decoder, hand_over
from quire.executor.models.drafting.parts import ends_of, plain_scheme
from quire.executor.models.hybrid_decoder import HybridDecoder
from quire.executor.models.registry import build_own
from quire.executor.weights.renamed import RenamedWeights


class Form(NamedTuple):
    """The names of a module's tensors. `{layer}` is the number of the layer after the model's own, `{last}` that of the
    module's last layer, by itself.

    Attributes:
        block: the prefix of a layer; `{number}` is its number in the module.
        token_norm: of the embedding, before the join.
        hidden_norm: of the hidden state, before the join.
        join: the projection of both.
        norm: of the layer's output.
        head: a head that the module may have of its own; empty: it has the model's.
        is_hidden_first: the projection reads the hidden state before the embedding.
        skips_first: the first token of a sequence has zeros in place of an embedding.
        has_offset_norms: see `NormStyle.is_offset`.
    """

    block: str
    token_norm: str
    hidden_norm: str
    join: str
    norm: str
    head: str = ""
    is_hidden_first: bool = False
    skips_first: bool = False
    has_offset_norms: bool = False

    def at(self, layer: int, num_layers: int) -> "Form":
        """Returns the names, but of layers, in a model whose module has `num_layers` from `layer` on."""

        def named(name: str) -> str:
            return name.format(layer=layer, last=num_layers - 1, number="{number}")

        return self._replace(
            block=named(self.block),
            token_norm=named(self.token_norm),
            hidden_norm=named(self.hidden_norm),
            join=named(self.join),
            norm=named(self.norm),
            head=named(self.head),
        )


_LAYER = "model.layers.{layer}"
_FORMS = (
    # DeepSeek V3 and GLM 4.5
    Form(
        _LAYER, f"{_LAYER}.enorm", f"{_LAYER}.hnorm", f"{_LAYER}.eh_proj", f"{_LAYER}.shared_head.norm",
        head=f"{_LAYER}.shared_head.head", skips_first=True,
    ),
    # Ling
    Form(
        _LAYER, f"{_LAYER}.enorm", f"{_LAYER}.hnorm", f"{_LAYER}.eh_proj", f"{_LAYER}.final_layernorm",
        skips_first=True,
    ),
    # Nemotron-H
    Form(
        "mtp.layers.{number}",
        "mtp.layers.0.enorm",
        "mtp.layers.0.hnorm",
        "mtp.layers.0.eh_proj",
        "mtp.layers.{last}.final_layernorm",
    ),
    # Qwen3-Next and Qwen3.5
    Form(
        "mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm",
        has_offset_norms=True,
    ),
    # MiMo
    Form(
        "model.mtp_layers.0", "model.mtp_layers.0.token_layernorm", "model.mtp_layers.0.hidden_layernorm",
        "model.mtp_layers.0.input_proj", "model.mtp_layers.0.final_layernorm", is_hidden_first=True, skips_first=True,
    ),
    # ERNIE 4.5
    Form(
        "model.mtp_block.0", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0",
        "model.norm",
    ),
)  # fmt: skip


class TokenPredictor:
    """The first of a checkpoint's modules; it proposes all drafts. Implements `DraftHeads`."""

    target_layers: Sequence[int] = ()
    state_layers: Sequence[LayerState] = ()
    num_layer_outputs = 0

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        form, size = _form_of(spec, context), spec.hidden_size
        self._ops = context.ops
        self._embed, head = ends_of(spec, context)
        self._head = _own_head(spec, context, form) or head
        config = spec.hf_config
        eps = config.get("rms_norm_eps") or config.get("layer_norm_epsilon") or 1e-6
        style = NormStyle(eps, is_offset=form.has_offset_norms)
        self._token_norm = style.layer(context, form.token_norm, size)
        self._hidden_norm = style.layer(context, form.hidden_norm, size)
        self._join = ColumnLinear(plain_scheme(context, form.join), [whole(form.join, size)], 2 * size)
        self._is_hidden_first = form.is_hidden_first
        self._skips_first = form.skips_first
        self._layer = _layer(spec, context, form)
        self.kv_layers: Sequence[AttentionKV] = self._layer.kv_layers
        self.activation_size = self._layer.activation_size + 2 * size

    def read_target(self, states: Tensor) -> Tensor:
        return states

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        assert step.target_states is not None
        embedded = self._embed(token_ids, step)
        if self._skips_first:
            embedded = torch.where((step.positions == 0).unsqueeze(1), 0, embedded)
        pair = [self._token_norm(embedded), self._hidden_norm(step.target_states)]
        x = self._join(self._ops.join(pair[::-1] if self._is_hidden_first else pair))
        step.received = hand_over(x, torch.zeros_like(x))
        return self._layer.forward(token_ids, step)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


def _form_of(spec: ModelSpec, context: ModelContext) -> Form:
    """Finds the module's tensors.

    Raises:
        ModelLoadError: the checkpoint has none that are known.
    """
    forms = [form.at(spec.num_layers, len(_kinds(spec))) for form in _FORMS]
    if context.weights.shapes is None:  # weights are made up
        return forms[0]
    for form in forms:
        if all(context.find(f"{name}.weight") is not None for name in (form.token_norm, form.norm)):
            return form
    raise ModelLoadError(
        f"{spec.name} has no layer for multi-token prediction whose names are known: take another method than mtp in "
        "--speculative-config, or leave it out."
    )


def _own_head(spec: ModelSpec, context: ModelContext, form: Form) -> Head | None:
    """Reads the module's own head; None if it has none, or a copy of the model's."""
    name = f"{form.head}.weight"
    if not form.head or context.find(name) is None or context.weights.are_same(name, "lm_head.weight"):
        return None
    return LanguageModelHead(context, VocabularyWeight(context, name, spec.vocab_size, spec.hidden_size))


def _layer(spec: ModelSpec, context: ModelContext, form: Form) -> Decoder | HybridDecoder:
    """Builds the module's layers and its norm, as the last stage of a model with more layers.

    Raises:
        ModelLoadError: the class of the family here has no such stages.
    """
    first, kinds = spec.num_layers, _kinds(spec)
    prefixes: dict[str, str] = {}
    for layers, norm in _STORED:
        prefixes[f"{norm}."] = f"{form.norm}."
        for number in range(len(kinds)):
            prefixes[f"{layers}.{first + number}."] = f"{form.block.format(number=number)}."
    layer = build_own(
        _with_layers(spec, kinds),
        dataclasses.replace(
            context,
            weights=RenamedWeights(context.weights, prefixes),
            layers=range(first, first + len(kinds)),
            generates=False,  # no head
            reads_media=False,
        ),
    )
    if not isinstance(layer, Decoder | HybridDecoder) or layer.state_layers:
        raise ModelLoadError(
            f"The layer for multi-token prediction of {spec.name} cannot be built from the file of "
            f"{spec.architecture}: leave out --speculative-config."
        )
    return layer


_STORED = (("model.layers", "model.norm"), ("backbone.layers", "backbone.norm_f"))
"""The names of layers and of the last norm by which classes here ask for a checkpoint's tensors."""

_LETTERS = {"*": "attention", "E": "moe", "-": "mlp"}


def _kinds(spec: ModelSpec) -> list[str]:
    """Returns the kinds of a module's layers, which is one attention with what follows, if config.json has no pattern.

    Raises:
        ModelLoadError: the pattern has other layers.
    """
    pattern = spec.hf_config.get("mtp_hybrid_override_pattern")
    if not pattern:
        return ["full_attention"]
    if not isinstance(pattern, str) or set(pattern) - set(_LETTERS):
        raise ModelLoadError(
            f"{spec.name}: mtp_hybrid_override_pattern may have the layers {' '.join(_LETTERS)}, got {pattern!r}."
        )
    return [_LETTERS[letter] for letter in pattern]


def _with_layers(spec: ModelSpec, kinds: Sequence[str]) -> ModelSpec:
    """Returns the specification of a model that has the module's layers behind its own."""
    number = spec.num_layers + len(kinds)
    config: dict[str, Any] = {**spec.hf_config, "num_hidden_layers": number}
    others = {"layer_types": kinds, "layers_block_type": kinds, "mlp_layer_types": ["sparse"] * len(kinds)}
    for field, own in others.items():
        if config.get(field):
            config[field] = [*config[field][: spec.num_layers], *own]
    if pattern := config.get("mtp_hybrid_override_pattern"):
        config["hybrid_override_pattern"] = f"{config.get('hybrid_override_pattern', '')[: spec.num_layers]}{pattern}"
    return msgspec.structs.replace(spec, num_layers=number, hf_config=config)

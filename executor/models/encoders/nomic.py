"""Nomic BERT (arXiv:2402.01613), and Nomic Embed v2, whose layers have experts by turns (arXiv:2502.07972)."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.mixture import Mixture, RoutedExperts
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.experts.stored import StackedExperts
from quire.executor.models.decoder import FeedForward, SettingError, activation_of, size_of
from quire.executor.models.encoders.heads import DenseForm, HeadForms
from quire.executor.models.encoders.rotary import RotaryBertModel, RotaryForm
from quire.executor.weights.rearranged import Piece, fused
from quire.ops.routing import Routing

_GATED, _PLAIN = "swiglu", "gelu"
"""Values of `activation_function` in the checkpoints' own words; the library's have none."""


class NomicBertModel(RotaryBertModel):
    """SwiGLU without biases, or plain layers with biases. `moe_every_n_layers`: each such layer has experts."""

    FORM = RotaryForm(
        ("nomic_bert", "bert"), "encoder.layers.{}", bias=False, is_gated=True, down_bias=False, eps=1e-12,
        theta=1000.0,
        heads=HeadForms(
            DenseForm("pooler", "tanh"),
            vocabulary_dense=DenseForm(
                "cls.predictions.transform.dense", "silu", "cls.predictions.transform.layer_norm"
            ),
            vocabulary="cls.predictions.decoder", vocabulary_bias="cls.predictions.bias",
        ),
    )  # fmt: skip
    SIZES = ()

    def form(self, spec: ModelSpec) -> RotaryForm:
        config = spec.hf_config
        biases = {bool(config.get(name, False)) for name in ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")}
        is_gated = config.get("activation_function", _GATED) == _GATED
        if len(biases) > 1 or (is_gated and biases == {True}):
            raise SettingError(
                f"{spec.name}: config.json must give all of qkv_proj_bias, mlp_fc1_bias and mlp_fc2_bias the same "
                "value, and false with swiglu; others are not supported."
            )
        return replace(self.FORM, bias=biases == {True}, is_gated=is_gated, down_bias=biases == {True})

    def pieces(self, spec: ModelSpec, inner: int) -> dict[str, Piece]:
        q, k, v = fused("attn.Wqkv", *(spec.hidden_size,) * 3)
        gated = {"mlp.gate_proj": Piece("mlp.fc12"), "mlp.up_proj": Piece("mlp.fc11")}
        first = gated if self.form(spec).is_gated else {"mlp.up_proj": Piece("mlp.fc1")}
        return {
            **first,
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "self_attn.o_proj": Piece("attn.out_proj"),
            "attention_norm": Piece("norm1"),
            "mlp.down_proj": Piece("mlp.fc2"),
            "mlp_norm": Piece("norm2"),
        }  # fmt: skip

    def activation(self, spec: ModelSpec) -> Any:
        stated = spec.hf_config.get("activation_function", _GATED)
        if stated not in (_GATED, _PLAIN):
            raise SettingError(
                f"{spec.name}: config.json's activation_function {stated!r} is not supported, only {_GATED} and "
                f"{_PLAIN}."
            )
        return activation_of(spec, "hidden_act", "silu") if stated == _GATED else "gelu"

    def mlp(self, spec: ModelSpec, context: ModelContext, index: int, inner: int) -> FeedForward:
        every = spec.hf_config.get("moe_every_n_layers") or 0
        if every and index % every == 1:
            return _Experts(spec, context, f"model.layers.{index}.mlp", inner, self.activation(spec))
        return super().mlp(spec, context, index, inner)


class _Experts:
    """Experts without gates, and one bias after their sum."""

    def __init__(self, spec: ModelSpec, context: ModelContext, name: str, inner: int, activation: Any) -> None:
        config = spec.hf_config
        shape = ExpertShape(size_of(spec, "num_experts"), spec.hidden_size, inner)
        routing = Routing(size_of(spec, "moe_top_k"), renormalize=config.get("moe_normalize_expert_weights", False))
        stored = StackedExperts(f"{name}.experts.mlp.w1", f"{name}.experts.mlp.w2")
        self._mixture = Mixture(
            context, [RoutedExperts(context, f"{name}.router.layer", routing, stored, shape, activation)]
        )
        self._bias = context.read(f"{name}.experts.bias", (spec.hidden_size,))
        self.activation_size = self._mixture.activation_size

    def __call__(self, x: Tensor) -> Tensor:
        return self._mixture(x).add_(self._bias)

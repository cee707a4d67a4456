"""NV-Embed (arXiv:2405.17428): Mistral with attention in both directions, then attention to an array of latents."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, whole
from quire.executor.layers.norm import NormStyle
from quire.executor.layers.step_context import StepContext
from quire.executor.models.dense.llama import LlamaForCausalLM
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard
from quire.executor.weights.rearranged import RearrangedWeights

_ENDS = {"model.embed_tokens": "embedding_model.embed_tokens", "model.norm": "embedding_model.norm"}
_LATENTS = "latent_attention_model"
_EPS = 1e-5  # of torch's layer norms


class NVEmbedModel(LlamaForCausalLM):
    """The mean of a text's tokens behind the latents is its vector."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        weights = RearrangedWeights(context.weights, {}, layer="embedding_model.layers.{}", ends=_ENDS)
        super().__init__(spec, replace(context, weights=weights))
        self._latents = _LatentAttention(spec, context)
        self.activation_size = max(self.activation_size, self._latents.activation_size)

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        return self._latents(super().forward(token_ids, step))


class _LatentAttention:
    """Computes `x + attention(norm(x), latents)`, then `x + mlp(norm(x))`: [num_tokens, hidden] to the same."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config: dict[str, Any] = spec.hf_config.get("latent_attention_config") or {}
        size, style = spec.hidden_size, NormStyle(_EPS, is_centred=True, has_bias=True)
        self._num_heads = config.get("num_cross_heads", 8)
        inner = self._num_heads * config.get("cross_dim_head", size)
        attention, mlp = (f"{_LATENTS}.cross_attend_blocks.{index}" for index in (0, 1))
        if config.get("latent_dim", size) != size:
            raise ModelLoadError(
                f"{spec.name}: latent_attention_config has latents of {config['latent_dim']} elements; the model's "
                f"hidden states have {size}, and others are not supported."
            )

        def linear(name: str, num_outputs: int, num_inputs: int, *, bias: bool) -> ColumnLinear:
            return ColumnLinear(context, [whole(name, num_outputs)], num_inputs, bias=bias)

        self._attention_norm = style.layer(context, f"{attention}.norm", size)
        self._query = linear(f"{attention}.fn.to_q", inner, size, bias=False)
        self._output = linear(f"{attention}.fn.to_out", size, inner, bias=False)
        self._keys, self._values = self._read_latents(context, config, attention, inner, size)
        self._mlp_norm = style.layer(context, f"{mlp}.norm", size)
        width = 8 * size  # four times the size, and as many gates
        self._up = linear(f"{mlp}.fn.net.0", width, size, bias=True)
        self._down = linear(f"{mlp}.fn.net.2", size, width // 2, bias=True)
        self.activation_size = 2 * inner + self._num_heads * self._keys.shape[2] + 2 * width

    def _read_latents(
        self, context: ModelContext, config: dict[str, Any], name: str, inner: int, size: int
    ) -> tuple[Tensor, Tensor]:
        """Returns keys [num_heads, head_dim, num_latents], scaled, and values [num_heads, num_latents, head_dim]."""
        latents = context.read(f"{_LATENTS}.latents", (config.get("num_latents_value", 512), size))
        gain = context.read(f"{name}.norm_context.weight", (size,)).float()
        bias = context.read(f"{name}.norm_context.bias", (size,)).float()
        weight = context.read_dequantized(LinearPart(f"{name}.fn.to_kv", 2 * inner, Shard(0, 0, 2 * inner)), size)
        if latents.is_meta:
            shape = self._num_heads, inner // self._num_heads, len(latents)
            return latents.new_empty(shape), latents.new_empty(shape[0], shape[2], shape[1])
        latents = F.layer_norm(latents.float(), (size,), gain, bias, _EPS)
        keys, values = (
            F.linear(latents, weight.float())
            .to(context.dtype)
            .unflatten(1, (2, self._num_heads, -1))
            .permute(1, 2, 0, 3)
        )
        scale = (inner // self._num_heads) ** -0.5
        return keys.transpose(1, 2).mul(scale).contiguous(), values.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        query = self._query(self._attention_norm(x)).unflatten(1, (self._num_heads, -1)).transpose(0, 1)
        weights = torch.bmm(query, self._keys).float().softmax(-1).to(x.dtype)
        x = x + self._output(torch.bmm(weights, self._values).transpose(0, 1).flatten(1))
        up, gates = self._up(self._mlp_norm(x)).chunk(2, dim=1)
        return x + self._down((up * F.gelu(gates)).contiguous())

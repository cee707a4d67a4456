"""MiniMax-Text-01 (arXiv:2501.08313): lightning attention in most layers, softmax attention in the others."""

from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.norm import Norm
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.recurrent.base import RecurrentLayer
from quire.executor.layers.recurrent.lightning_attention import LightningAttention
from quire.executor.layers.step_context import StepContext
from quire.executor.models.decoder import FeedForward, Mixer, attention_shape, norm_style, vocabulary_ends
from quire.executor.models.hybrid_decoder import Block, HybridDecoder, layer_kinds, places_by_kind
from quire.executor.models.mixtures.mixtral import mixture_maker
from quire.ops.backend import AttentionForm, Backend


class MiniMaxForCausalLM(HybridDecoder):
    """A block's output is added to the norm's output, not to its input, and both terms have a factor."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config = spec.hf_config
        types = config.get("layer_types") or [
            "linear_attention" if index % 2 else "full_attention" for index in range(spec.num_layers)
        ]
        kinds, mixture = layer_kinds(types, spec), mixture_maker(spec, context)
        rotary = RotaryEmbedding(context, {"rope_theta": 1e6, **config}, spec.head_dim)
        form = AttentionForm(spec.head_dim**-0.5, window=config.get("sliding_window"))

        def norm(name: str) -> Norm:
            return norm_style(spec).layer(context, name, spec.hidden_size)

        def factors(kind: str) -> tuple[float, float]:
            return config.get(f"{kind}_alpha_factor", 1), config.get(f"{kind}_beta_factor", 1)

        def mixer(place: LayerPlace) -> Attention | LightningAttention:
            if kinds[place.index] == "recurrent":
                return LightningAttention(context, place, attention_shape(spec), spec.num_layers)
            return Attention(context, place, attention_shape(spec), rotary, form=form)

        mixers: list[Attention | RecurrentLayer] = []
        blocks: list[Block] = []
        for place in places_by_kind(context, kinds):
            mixers.append(mixer(place))
            kind = "linear_attn" if kinds[place.index] == "recurrent" else "full_attn"
            before, after = norm(f"{place.name}.input_layernorm"), norm(f"{place.name}.post_attention_layernorm")
            blocks.append(_Block(context.ops, before, mixers[-1], *factors(kind)))
            blocks.append(_Block(context.ops, after, _Tokenwise(mixture(place)), *factors("mlp")))
        embed, head = vocabulary_ends(spec, context, is_tied=config["tie_word_embeddings"])
        super().__init__(embed, blocks, norm("model.norm"), head, mixers, ends=range(1, len(blocks), 2))


class _Tokenwise:
    """Adapts a feed-forward network to `Mixer`; it mixes nothing."""

    def __init__(self, feed_forward: FeedForward) -> None:
        self._feed_forward = feed_forward
        self.activation_size = feed_forward.activation_size

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        return self._feed_forward(x)

    def outputs_of(self, rows: Tensor, step: StepContext) -> Tensor:
        return rows


class _Block:
    """Computes `alpha * norm(x) + beta * mixer(norm(x))`."""

    def __init__(self, ops: Backend, norm: Norm, mixer: Mixer, alpha: float, beta: float) -> None:
        self._ops = ops
        self._norm = norm
        self._mixer = mixer
        self._alpha, self._beta = alpha, beta
        self.activation_size = mixer.activation_size

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepContext) -> tuple[Tensor, Tensor]:
        normal, _ = self._norm.add(x, residual)
        out = self._ops.scale(self._mixer(normal, step), self._beta)
        return out, self._ops.scale(self._mixer.outputs_of(normal, step), self._alpha)

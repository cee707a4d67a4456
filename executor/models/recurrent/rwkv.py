"""RWKV 4 (arXiv:2305.13048): running averages over a sequence instead of attention."""

from dataclasses import replace

from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.norm import Norm, NormStyle
from quire.executor.layers.recurrent.base import RecurrentLayer
from quire.executor.layers.recurrent.rwkv import ChannelMix, RwkvShape, TimeMix
from quire.executor.layers.step_context import StepContext
from quire.executor.layers.vocabulary import Embedding
from quire.executor.models.decoder import vocabulary_ends
from quire.executor.models.hybrid_decoder import Block, HybridDecoder, MixerBlock
from quire.executor.weights.rearranged import RearrangedWeights

_ENDS = {"model.embed_tokens": "rwkv.embeddings", "model.norm": "rwkv.ln_out", "lm_head": "head"}


class RwkvForCausalLM(HybridDecoder):
    """Both blocks of a layer have a state.

    Transformers halves hidden states after every `rescale_every` layers, to stay in float16's range. Norms undo that,
    except for their eps; so here eps grows instead.
    """

    SIZES = ()

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        stored = RearrangedWeights(context.weights, {}, layer="rwkv.blocks.{}", ends=_ENDS)
        context = replace(context, weights=stored)
        eps, rescale_every = config["layer_norm_epsilon"], config["rescale_every"]
        shape = RwkvShape(
            size, config.get("attention_hidden_size") or size, config.get("intermediate_size") or 4 * size
        )

        def norm(name: str, index: int, eps: float) -> Norm:
            factor = 4.0 ** (index // rescale_every) if rescale_every > 0 else 1.0
            return NormStyle(eps * factor, is_centred=True, has_bias=True).layer(context, name, size)

        mixers: list[RecurrentLayer] = []
        blocks: list[Block] = []
        for index in context.layers:
            name = f"model.layers.{index}"
            mixers.append(TimeMix(context, LayerPlace(index, len(mixers), False), f"{name}.attention", shape))
            blocks.append(MixerBlock(norm(f"{name}.ln1", index, eps), mixers[-1]))
            place = LayerPlace(index, len(mixers), index == spec.num_layers - 1)
            mixers.append(ChannelMix(context, place, f"{name}.feed_forward", shape))
            blocks.append(MixerBlock(norm(f"{name}.ln2", index, eps), mixers[-1]))
        embed, head = vocabulary_ends(spec, context, is_tied=config["tie_word_embeddings"])
        first_norm = norm("model.layers.0.pre_ln", 0, eps)
        last_norm = norm("model.norm", spec.num_layers, 1e-5)
        super().__init__(
            _NormedEmbedding(embed, first_norm), blocks, last_norm, head, mixers, ends=range(1, len(blocks), 2)
        )


class _NormedEmbedding:
    def __init__(self, embed: Embedding, norm: Norm) -> None:
        self._embed = embed
        self._norm = norm

    def __call__(self, token_ids: Tensor, step: StepContext) -> Tensor:
        return self._norm(self._embed(token_ids, step))

"""Blenderbot (arXiv:2004.13637), large and small: BART whose positions begin with the first row."""

from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.context import ModelContext
from quire.executor.layers.norm import Norm
from quire.executor.layers.step_context import StepContext
from quire.executor.layers.vocabulary import Embedding
from quire.executor.models.encoder_decoders.bart import BartForConditionalGeneration, SideName
from quire.executor.models.encoder_decoders.encoder_decoder import AddedPositions


class BlenderbotForConditionalGeneration(BartForConditionalGeneration):
    """Norms before blocks and after all layers."""

    first_position = 0
    norms_first = True
    norms_embedding = False


class BlenderbotSmallForConditionalGeneration(BartForConditionalGeneration):
    """Norms after blocks; the decoder normalizes tokens before it adds positions."""

    first_position = 0

    def _positioned(self, spec: ModelSpec, context: ModelContext, embed: Embedding, side: SideName) -> AddedPositions:
        if side == "encoder":
            return super()._positioned(spec, context, embed, side)
        normed = _NormedTokens(embed, self._named_norm(context, "embedding_norm", spec.hidden_size))
        return AddedPositions(context.ops, normed, self.position_rows(spec, context, side))


class _NormedTokens:
    def __init__(self, embed: Embedding, norm: Norm) -> None:
        self._embed = embed
        self._norm = norm

    def __call__(self, token_ids: Tensor, step: StepContext) -> Tensor:
        return self._norm(self._embed(token_ids, step))

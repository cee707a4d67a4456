"""The parts of decoders whose layers differ in kind: attention, recurrent and feed-forward layers in any order."""

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

from quire.executor.layers.attention import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.norm import Norm
from quire.executor.layers.recurrent import RecurrentLayer
from quire.executor.layers.step_context import StepContext
from quire.executor.layers.vocabulary import LanguageModelHead
from quire.executor.models.decoder import Embedding, FeedForward

LayerKind = Literal["attention", "recurrent", "feed_forward"]


class Mixer(Protocol):
    """What mixes the tokens of a sequence: an `Attention`, a `RecurrentLayer`, or several side by side."""

    activation_size: int

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """`x` [num_tokens, hidden] → [num_outputs, hidden], for the tokens that `outputs_of` selects."""
        ...

    def outputs_of(self, rows: Tensor, step: StepContext) -> Tensor:
        """The `rows` [num_tokens, size] of tokens with an output."""
        ...


class Block(Protocol):
    """What adds to the residual stream."""

    activation_size: int

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepContext) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer`."""
        ...


class MixerBlock:
    """`x + mixer(norm(x))`."""

    def __init__(self, norm: Norm, mixer: Mixer) -> None:
        self._norm = norm
        self._mixer = mixer
        self.activation_size = mixer.activation_size

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepContext) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer`."""
        x, residual = self._norm.add(x, residual)
        return self._mixer(x, step), self._mixer.outputs_of(residual, step)


class FeedForwardBlock:
    """`x + feed_forward(norm(x))`."""

    def __init__(self, norm: Norm, feed_forward: FeedForward) -> None:
        self._norm = norm
        self._feed_forward = feed_forward
        self.activation_size = feed_forward.activation_size

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepContext) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer`."""
        x, residual = self._norm.add(x, residual)
        return self._feed_forward(x), residual


class HybridDecoder:
    """Embedding, blocks, final norm and head. Implements `quire.executor.models.base.Model`."""

    def __init__(
        self,
        embed: Embedding,
        blocks: Sequence[Block],
        norm: Norm,
        head: LanguageModelHead,
        mixers: Sequence[Attention | RecurrentLayer],
    ) -> None:
        """`mixers` are those of all blocks, in the order of their places."""
        self._embed = embed
        self._blocks = blocks
        self._norm = norm
        self._head = head
        self.kv_layers = [mixer.kv for mixer in mixers if isinstance(mixer, Attention)]
        self.state_layers = [mixer.state for mixer in mixers if isinstance(mixer, RecurrentLayer)]
        self.activation_size = max(block.activation_size for block in blocks)

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """See `Model.forward`."""
        x, residual = self._embed(token_ids, step), None
        for block in self._blocks:
            x, residual = block(x, residual, step)
        assert residual is not None
        return self._norm.add(x, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `Model.compute_logits`."""
        return self._head(hidden)


def places_by_kind(context: ModelContext, kinds: Sequence[LayerKind], prefix: str = "model.layers") -> list[LayerPlace]:
    """The places of the layers that this rank builds, in order; attention and recurrent layers are numbered apart."""
    last = max((index for index, kind in enumerate(kinds) if kind != "feed_forward"), default=-1)
    own = [kinds[index] for index in context.layers]
    return [
        LayerPlace(index, own[:order].count(kinds[index]), is_last=index == last, prefix=prefix)
        for order, index in enumerate(context.layers)
    ]

"""The parts of decoders with layers of several kinds: attention, recurrent and feed-forward layers in any order."""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.norm import Norm, NormStyle
from quire.executor.layers.recurrent.base import RecurrentLayer
from quire.executor.layers.step_context import StepContext
from quire.executor.layers.vocabulary import Embedding, Head
from quire.executor.models.decoder import (
    FeedForward,
    Mixer,
    MLPMaker,
    SelfAttention,
    enter_stage,
    leave_stage,
    norm_style,
)
from quire.ops.backend import Backend

LayerKind = Literal["attention", "recurrent", "feed_forward"]


class Block(Protocol):
    """A layer that adds to the residual stream."""

    activation_size: int

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepContext) -> tuple[Tensor, Tensor]: ...


class MixerBlock:
    """Computes `x + after(mixer(norm(x)))`."""

    def __init__(self, norm: Norm, mixer: Mixer, after: Norm | None = None) -> None:
        self._norm = norm
        self._mixer = mixer
        self._after = after
        self.activation_size = mixer.activation_size

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepContext) -> tuple[Tensor, Tensor]:
        x, residual = self._norm.add(x, residual)
        out = self._mixer(x, step)
        return out if self._after is None else self._after(out), self._mixer.outputs_of(residual, step)


class FeedForwardBlock:
    """Computes `x + after(feed_forward(norm(x)))`."""

    def __init__(self, norm: Norm, feed_forward: FeedForward, after: Norm | None = None) -> None:
        self._norm = norm
        self._feed_forward = feed_forward
        self._after = after
        self.activation_size = feed_forward.activation_size

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepContext) -> tuple[Tensor, Tensor]:
        x, residual = self._norm.add(x, residual)
        out = self._feed_forward(x)
        return out if self._after is None else self._after(out), residual


class ScaledBlock:
    """Multiplies a block's output."""

    def __init__(self, ops: Backend, block: Block, factor: float) -> None:
        self._ops = ops
        self._block = block
        self._factor = factor
        self.activation_size = block.activation_size

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepContext) -> tuple[Tensor, Tensor]:
        x, residual = self._block(x, residual, step)
        return self._ops.scale(x, self._factor), residual


class HybridDecoder:
    """Embedding, blocks, final norm and head. Implements `quire.executor.models.base.StagedModel`."""

    def __init__(
        self,
        embed: Embedding,
        blocks: Sequence[Block],
        norm: Norm,
        head: Head,
        mixers: Sequence[SelfAttention | RecurrentLayer],
        *,
        ends: Sequence[int] | None = None,
    ) -> None:
        """Takes as `mixers` those of all blocks, in the order of their places, and as `ends` the indices of the blocks
        that end a layer; None: each block is a layer.
        """
        self.embed = embed
        self._blocks = blocks
        self._norm = norm
        self.head = head
        attentions = [mixer for mixer in mixers if not isinstance(mixer, RecurrentLayer)]
        self.kv_layers = [attention.kv for attention in attentions if attention.kv is not None]
        self.state_layers = [mixer.state for mixer in mixers if isinstance(mixer, RecurrentLayer)]
        self.activation_size = max(block.activation_size for block in blocks)
        ends = range(len(blocks)) if ends is None else ends
        self._layers_by_end = {block: layer for layer, block in enumerate(ends)}
        self.num_layer_outputs = len(ends)

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        x, residual = enter_stage(self.embed, token_ids, step)
        for index, block in enumerate(self._blocks):
            x, residual = block(x, residual, step)
            if step.taps is not None and index in self._layers_by_end:
                step.taps.see(self._layers_by_end[index], x, residual)
        return leave_stage(self._norm, x, residual, step)

    def handover_size(self, hidden_size: int) -> int:
        """Counts output and residual."""
        return 2 * hidden_size

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


class PairedDecoder(HybridDecoder):
    """Every layer is a mixer, then a feed-forward network, each after its norm."""

    def __init__(
        self,
        spec: ModelSpec,
        context: ModelContext,
        places: Sequence[LayerPlace],
        make_mixer: Callable[[LayerPlace], SelfAttention | RecurrentLayer],
        make_feed_forward: MLPMaker,
        ends: tuple[Embedding, Head],
        *,
        norm: NormStyle | None = None,
        norm_names: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
        final_norm: str = "norm",
        multiplier: float = 1.0,
    ) -> None:
        """Takes the `norm_names` within a layer, and a `multiplier` of each block's output."""

        def make_norm(name: str) -> Norm:
            return (norm or norm_style(spec)).layer(context, name, spec.hidden_size)

        mixers: list[SelfAttention | RecurrentLayer] = []
        blocks: list[Block] = []
        for place in places:
            before_mixer, before_mlp = (make_norm(f"{place.name}.{name}") for name in norm_names)
            mixers.append(make_mixer(place))
            blocks += [MixerBlock(before_mixer, mixers[-1]), FeedForwardBlock(before_mlp, make_feed_forward(place))]
        if multiplier != 1:
            blocks = [ScaledBlock(context.ops, block, multiplier) for block in blocks]
        super().__init__(
            ends[0], blocks, make_norm(f"model.{final_norm}"), ends[1], mixers, ends=range(1, len(blocks), 2)
        )


_KINDS: dict[str, LayerKind] = {
    "linear_attention": "recurrent", "mamba": "recurrent", "full_attention": "attention", "attention": "attention",
    "mlp": "feed_forward", "moe": "feed_forward",
}  # fmt: skip


def layer_kinds(names: Sequence[str], spec: ModelSpec) -> list[LayerKind]:
    """Returns the kinds of a model's layers, by their names in config.json.

    Raises:
        ModelLoadError: another name, or too few of them.
    """
    unknown = sorted(set(names) - set(_KINDS))
    if unknown or len(names) < spec.num_layers:
        raise ModelLoadError(
            f"config.json: each of {spec.num_layers} layers must be one of {', '.join(_KINDS)}; it names "
            f"{len(names)}{f', with {unknown}' if unknown else ''}."
        )
    return [_KINDS[name] for name in names[: spec.num_layers]]


def places_by_kind(context: ModelContext, kinds: Sequence[LayerKind], prefix: str = "model.layers") -> list[LayerPlace]:
    """Lists the places of this rank's layers, in order; attention and recurrent layers are numbered separately."""
    last = max((index for index, kind in enumerate(kinds) if kind != "feed_forward"), default=-1)
    own = [kinds[index] for index in context.layers]
    return [
        LayerPlace(index, own[:order].count(kinds[index]), is_last=index == last)
        for order, index in enumerate(context.layers)
    ]

"""Attention of a Transformers model over our pages: the function that its modules call."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.layer_kv import AttentionKV, LayerKV, kept_tokens
from quire.executor.layers.context import ModelContext
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.models.transformers import layer_modules
from quire.executor.models.transformers.latents import LatentAttention
from quire.executor.models.transformers.masks import Visible
from quire.executor.models.transformers.probe import AttentionCall, run_backbone
from quire.executor.models.transformers.programs.heads import Attention
from quire.executor.models.transformers.programs.program import Program
from quire.executor.models.transformers.programs.tracing import RunPart
from quire.executor.models.transformers.skeleton import first_tensor
from quire.executor.models.transformers.stages import received_rows
from quire.ops.backend import AttentionForm, Backend

_HARMLESS = frozenset({"dropout", "position_ids", "use_cache", "output_attentions", "cache_position", "return_dict"})


class PagedAttention:
    """Identifies layers by the order of their calls in a forward pass: each call has its own cache.

    Attributes:
        kv: the keys and values, or latents, that each layer caches.
        states: none.
        exchanged_size: values of a token that a layer sends to ranks which divide sequences, and receives from them;
            the maximum over layers.
        run_part: runs a call of attention while a program is traced (see `tracing.py`), else None.
    """

    def __init__(
        self, context: ModelContext, calls: list[AttentionCall], expansions: Mapping[nn.Module, layer_modules.Expansion]
    ) -> None:
        """Takes the `calls` of a dry run on this rank, and the `expansions` that replace the layers expanding latents.

        Raises:
            ModelLoadError: attention of a form that the operations lack, or ranks that divide sequences.
        """
        self._rank = context.group.rank
        self._layers: list[Attention | LatentAttention] = []
        self.kv: list[AttentionKV] = []
        self.exchanged_size = 0
        for number, call in enumerate(calls):
            form = form_of(call)
            if call.expansion is not None:
                expansion = expansions[call.expansion.linear]
                latent = LatentAttention(context.ops, number, form.scale, expansion, context.sequences)
                self._layers.append(latent)
                self.kv.append(latent.kv)
                sizes = latent.kv.size, expansion.latent.rank
            else:
                head_dim = max(call.key_dim, call.value_dim)
                self._layers.append(
                    Attention(context.ops, number, form, head_dim, call.num_kv_heads, context.sequences)
                )
                self.kv.append(LayerKV(call.num_kv_heads, head_dim, kept_tokens(form)))
                sizes = head_dim, head_dim
            context.sequences.check(form)
            exchanged_size = context.sequences.activation_size(call.num_heads, *sizes)
            self.exchanged_size = max(self.exchanged_size, exchanged_size)
        self.states: Sequence[LayerState] = ()
        self._step: StepContext | None = None
        self._next = 0
        self.run_part: RunPart | None = None

    def forward(self, backbone: nn.Module, step: StepContext, token_ids: Tensor, embeds: Tensor | None) -> Tensor:
        """Returns hidden states of all tokens, [num_tokens, hidden]; `embeds` replaces the rows of `token_ids`."""
        self._step, self._next = step, 0
        arguments = {} if embeds is None else {"inputs_embeds": embeds.unsqueeze(0)}
        given_ids = token_ids.unsqueeze(0) if embeds is None else None
        positions = step.positions.unsqueeze(0)
        if step.rotary_positions is not None:
            positions = step.rotary_positions.unsqueeze(1)
        return first_tensor(run_backbone(backbone, given_ids, positions, **arguments))[0]

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """Attends from `query` [1, heads, num_tokens, size], keys and values alike, to [1, num_tokens, heads, size of
        values].
        """
        assert self._step is not None
        layer, self._next = self._layers[self._next], self._next + 1
        sinks = arguments.get("s_aux")
        if sinks is not None and isinstance(layer, Attention) and layer.form.sinks is None:
            layer.form = layer.form._replace(sinks=self._own(sinks, query.shape[1]))
        attend = partial(layer, self._step)
        heads = layer.inputs(query, key, value)
        return attend(*heads) if self.run_part is None else self.run_part(layer, attend, heads), None

    def _own(self, sinks: Tensor, num_heads: int) -> Tensor:
        """Returns the sinks of this rank's `num_heads` heads."""
        sinks = sinks.flatten().to(torch.float32)
        return sinks if len(sinks) == num_heads else sinks[self._rank * num_heads : (self._rank + 1) * num_heads]


class FlatCode:
    """Code of a class that calls `attention`, for `FastPath`."""

    def __init__(self, attention: PagedAttention, backbone: nn.Module) -> None:
        self._attention = attention
        self._backbone = backbone

    def trace(self, token_ids: Tensor, step: StepContext, run_part: RunPart) -> Tensor:
        self._attention.run_part = run_part
        try:
            return self._attention.forward(self._backbone, step, token_ids, received_rows(step))
        finally:
            self._attention.run_part = None

    def replace_attention(self, program: Program, ops: Backend, device: torch.device) -> None:
        """Does nothing: the code calls our attention."""


def is_latent(call: AttentionCall) -> bool:
    """Returns True if our latent attention can compute the call."""
    form = form_of(call)
    return call.expansion is not None and call.arguments.get("s_aux") is None and form == AttentionForm(form.scale)


def form_of(call: AttentionCall, *, is_encoder: bool = False) -> AttentionForm:
    """Returns the form of one call of attention, which is in both directions in an encoder.

    Raises:
        ModelLoadError: the operations lack it.
    """
    arguments = {name: value for name, value in call.arguments.items() if value is not None}
    if arguments.pop("is_causal", True) is False and not is_encoder:
        raise ModelLoadError(f"{type(call.module).__name__} attends to later tokens, which is not supported.")
    arguments.pop("s_aux", None)  # sinks are weights, which do not exist in a dry run
    visible = call.mask or Visible(arguments.get("sliding_window"))
    scale, softcap = arguments.pop("scaling", call.key_dim**-0.5), arguments.pop("softcap", None)
    biases = sorted(name for name, value in arguments.items() if isinstance(value, Tensor) and name not in _HARMLESS)
    if biases:
        raise ModelLoadError(f"{type(call.module).__name__} passes {', '.join(biases)} to attention, which is unknown.")
    return AttentionForm(float(scale), window=visible.window, chunk=visible.chunk, softcap=softcap)

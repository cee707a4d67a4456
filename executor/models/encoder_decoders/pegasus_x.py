"""PEGASUS-X (arXiv:2208.04347): Pegasus whose encoder sees blocks, and rows of its own beside those of each text."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.sequence import SequenceAttention
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import MLP
from quire.executor.layers.norm import Norm
from quire.executor.layers.step_context import StepContext
from quire.executor.layers.vocabulary import Embedding
from quire.executor.models.decoder import activation_of, size_of
from quire.executor.models.encoder_decoders.bart import BartForConditionalGeneration, SideName
from quire.executor.models.encoder_decoders.encoder_decoder import encoder_spec
from quire.executor.models.encoder_decoders.positions import spread_sinusoids
from quire.executor.models.encoders.encoder import Encoder, encoder_shape
from quire.executor.models.encoders.heads import Heads
from quire.ops.backend import Backend


class PegasusXForConditionalGeneration(BartForConditionalGeneration):
    """Norms before blocks and after all layers, sinusoids, attention without biases."""

    norms_first = True
    norms_embedding = False
    attention_biases = False
    SIZES = (*BartForConditionalGeneration.SIZES, "block_size", "num_global_tokens")

    def position_rows(self, spec: ModelSpec, context: ModelContext, side: SideName) -> Tensor:
        return spread_sinusoids(context.max_model_len, spec.hidden_size).to(context.device, context.dtype)

    def _encoder_of(self, spec: ModelSpec, context: ModelContext, embed: Embedding | None, scale: float) -> Encoder:
        size, block = spec.hidden_size, size_of(spec, "block_size")
        own = encoder_spec(spec, size_of(spec, "encoder_layers"), size_of(spec, "encoder_attention_heads"))
        staggers = spec.hf_config.get("stagger_local_blocks", True)
        if staggers and block % 2:
            raise ModelLoadError(f"config.json of {spec.name}: block_size must be even, got {block}.")
        inner, activation = size_of(spec, "encoder_ffn_dim"), activation_of(spec, "activation_function", "gelu")
        shape = replace(encoder_shape(own), head_dim=size // own.num_attention_heads)

        def layer(index: int) -> _Layer:
            name = f"model.layers.{index}"
            parts = ("attention_norm", "global_self_attn_layer_norm", "mlp_norm")
            return _Layer(
                context.ops,
                [self._named_norm(context, f"{name}.{part}", size) for part in parts],
                _BlockAttention(context, f"{name}.self_attn", shape, bias=False, output_bias=False),
                MLP(context, f"{name}.mlp", size, inner, activation),
                first_block=block // 2 if staggers and index % 2 else block,
            )

        return _BlockEncoder(
            context.ops,
            self._encoder_embedding(own, context, embed, scale),
            context.read("model.global_rows.weight", (size_of(spec, "num_global_tokens"), size)),
            [layer(index) for index in range(own.num_layers)],
            self._named_norm(context, "last_norm", size),
            block,
        )

    def ends(self, side: str) -> dict[str, str]:
        return super().ends(side) | {"model.global_rows": f"{side}.embed_global"}


class _Text(NamedTuple):
    """The places of one text's rows: those of its own, [num_global], and those of its tokens, [num_tokens]."""

    own: Tensor
    tokens: Tensor


class _Blocks(NamedTuple):
    """The blocks of all texts as sequences, each with its text's own rows before its tokens.

    Attributes:
        rows: [num_rows of the sequences] int64: places.
        kept: [num_tokens] int64: the tokens among these rows.
        batch: of the sequences.
    """

    rows: Tensor
    kept: Tensor
    batch: Any


class _Layout:
    """The rows of a step: first those of the texts' own, then those of tokens.

    Args:
        lengths: tokens of each text.
    """

    def __init__(self, ops: Backend, lengths: Sequence[int], num_global: int, block: int, device: torch.device) -> None:
        self._ops = ops
        self._lengths = lengths
        self._num_global = num_global
        self._block = block
        self._device = device
        self.num_own = num_global * len(lengths)
        ends = self.num_own + np.cumsum(lengths)
        self._starts = ends - np.array(lengths)
        places = torch.arange(self.num_own + sum(lengths), device=device)
        self.texts = [
            _Text(places[index * num_global : (index + 1) * num_global], places[start:end])
            for index, (start, end) in enumerate(zip(self._starts.tolist(), ends.tolist(), strict=True))
        ]
        self._blocks: dict[int, _Blocks] = {}

    def blocks(self, first: int) -> _Blocks:
        """Returns the blocks, of which each text's first has at most `first` tokens."""
        if first not in self._blocks:
            self._blocks[first] = self._divide(first)
        return self._blocks[first]

    def _divide(self, first: int) -> _Blocks:
        rows, kept, sizes, place = [], [], [], 0
        for index, (start, length) in enumerate(zip(self._starts.tolist(), self._lengths, strict=True)):
            own = np.arange(index * self._num_global, (index + 1) * self._num_global)
            cuts = [0, *range(first, length, self._block), length]
            for begin, end in itertools.pairwise(cuts):
                rows += [own, np.arange(start + begin, start + end)]
                kept.append(np.arange(end - begin) + place + self._num_global)
                sizes.append(self._num_global + end - begin)
                place += sizes[-1]
        return _Blocks(
            torch.from_numpy(np.concatenate(rows)).to(self._device),
            torch.from_numpy(np.concatenate(kept)).to(self._device),
            self._ops.sequence_batch(np.array(sizes), self._device),
        )


class _BlockAttention(SequenceAttention):
    """Tokens see their block and their text's own rows; these see each other and all tokens of the text."""

    def in_blocks(self, x: Tensor, layout: _Layout, first_block: int) -> Tensor:
        """[num_rows, hidden] → [num_rows, hidden]."""
        heads, blocks = self._project(x).unflatten(1, (-1, self._head_dim)), layout.blocks(first_block)
        seen = self._ops.sequence_attention(heads[blocks.rows], self._num_kv_heads, blocks.batch, self._form)
        of_own = [self._of_own(heads, text) for text in layout.texts]
        return self._output(torch.cat([*of_own, seen[blocks.kept]]).flatten(1))

    def _of_own(self, heads: Tensor, text: _Text) -> Tensor:
        """Returns the outputs [num_global, num_heads, head_dim] of a text's own rows."""
        rows = heads[torch.cat([text.own, text.tokens])].transpose(0, 1)
        q, k, v = rows.split([self.num_heads, self._num_kv_heads, self._num_kv_heads])
        q = q[:, : len(text.own)]
        shares = torch.softmax((q.float() @ k.float().transpose(1, 2)) * self._form.scale, -1)
        return (shares @ v.float()).to(heads.dtype).transpose(0, 1)


class _Layer:
    """Computes `x + attention(norm(x))`, then `x + mlp(norm(x))`; rows of texts' own have a first norm of their own."""

    def __init__(
        self, ops: Backend, norms: Sequence[Norm], attention: _BlockAttention, mlp: MLP, *, first_block: int
    ) -> None:
        """Takes the norms of tokens, of texts' own rows, and of all before the feed-forward block."""
        self.activation_size = attention.activation_size + mlp.activation_size
        self._ops = ops
        self._norm, self._own_norm, self._mlp_norm = norms
        self._attention = attention
        self._mlp = mlp
        self._first_block = first_block

    def __call__(self, x: Tensor, layout: _Layout) -> Tensor:
        own, tokens = x[: layout.num_own], x[layout.num_own :]
        normed = torch.cat([self._own_norm(own), self._norm(tokens)])
        x = self._ops.add(self._attention.in_blocks(normed, layout, self._first_block), x)
        return self._ops.add(self._mlp(self._mlp_norm(x)), x)


class _BlockEncoder(Encoder):
    """Puts rows of its own beside those of each text."""

    def __init__(
        self, ops: Backend, embed: Embedding, own_rows: Tensor, layers: Sequence[_Layer], norm: Norm, block: int
    ) -> None:
        super().__init__(embed, (), Heads(), norm, activation_size=max(layer.activation_size for layer in layers))
        self._ops = ops
        self._own_rows = own_rows
        self._block_layers = layers
        self._block = block

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        tokens = self._embed(token_ids, step)
        starts = np.flatnonzero(step.positions.cpu().numpy() == 0)
        lengths = np.diff(starts, append=len(tokens)).tolist()
        layout = _Layout(self._ops, lengths, len(self._own_rows), self._block, tokens.device)
        x = torch.cat([self._own_rows.repeat(len(lengths), 1), tokens])
        for layer in self._block_layers:
            x = layer(x, layout)
        assert self._norm is not None, "PEGASUS-X has a norm after all layers"
        return self._norm(x[layout.num_own :].contiguous())

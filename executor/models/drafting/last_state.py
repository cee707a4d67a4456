"""Heads that draft from a sequence's last hidden state alone: Medusa, and speculators of IBM's accelerators."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.layer_kv import AttentionKV
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, whole
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.layers.vocabulary import LanguageModelHead, VocabEmbedding, VocabularyWeight


class _WithoutCache:
    """What models that compute no tokens of a step have in common."""

    kv_layers: Sequence[AttentionKV] = ()
    state_layers: Sequence[LayerState] = ()
    num_layer_outputs = 0

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        raise AssertionError("these heads draft by `guess`")

    def compute_logits(self, hidden: Tensor) -> Tensor:
        raise AssertionError("these heads draft by `guess`")


class MedusaHeads(_WithoutCache):
    """Medusa (arXiv:2401.10774): each head makes one of the tokens after the next one, all of the same hidden state.

    The authors number a head's blocks and its projection (`0.1.linear`, `0.2`); other checkpoints name them
    (`blocks.0.layers.1`, `lm_heads.0`).
    """

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        self.most_drafts = config.get("medusa_num_heads") or config.get("num_heads") or 5
        num_blocks = config.get("medusa_num_layers") or config.get("num_hidden_layers") or 1
        has_names = context.find("lm_heads.0.weight") is not None
        self._heads = []
        for head in range(self.most_drafts):
            name = f"blocks.{head}.layers.{{}}" if has_names else f"{head}.{{}}.linear"
            last = f"lm_heads.{head}" if has_names else f"{head}.{num_blocks}"
            blocks = [_Block(context, name.format(block), size) for block in range(num_blocks)]
            weight = VocabularyWeight(context, f"{last}.weight", spec.vocab_size, size)
            self._heads.append((blocks, LanguageModelHead(context, weight)))
        self.activation_size = 2 * size

    def guess(self, token_ids: Tensor, states: Tensor, num_drafts: int) -> Tensor:
        guesses = []
        for blocks, head in self._heads[:num_drafts]:
            x = states
            for block in blocks:
                x = block(x)
            guesses.append(head(x).argmax(-1))
        return torch.stack(guesses, 1)


class _Block:
    """Computes `x + silu(linear(x))`."""

    def __init__(self, context: ModelContext, name: str, size: int) -> None:
        has_bias = context.find(f"{name}.bias") is not None
        self._ops = context.ops
        self._linear = ColumnLinear(context, [whole(name, size)], size, bias=has_bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.add(x, self._linear(x, "silu"))  # in place of the latter


class MLPSpeculator(_WithoutCache):
    """A recurrent network of one small layer a draft (arXiv:2404.19124): it reads the draft before.

    Layers may be tied: all but the projection of the first, whose input is the target's hidden state.
    """

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        inner, self.most_drafts = config.get("inner_dim") or size, config.get("n_predict") or 3
        prefix = "speculator." if context.find("speculator.emb.0.weight") is not None else ""
        is_tied = bool(config.get("tie_weights"))
        ends = [
            _Ends(context, prefix, index, spec.vocab_size, inner) for index in range(1 if is_tied else self.most_drafts)
        ]
        projections = [
            ColumnLinear(context, [whole(f"{prefix}proj.{index}", inner)], inner if index else size)
            for index in range(min(2, self.most_drafts) if is_tied else self.most_drafts)
        ]
        self._layers = [
            (projections[min(index, len(projections) - 1)], ends[min(index, len(ends) - 1)])
            for index in range(self.most_drafts)
        ]
        self._ops = context.ops
        # Of the state and of the token, so that the variance stays 1 over all layers.
        state_weight = 0.5 ** (0.5 / self.most_drafts)
        self._token_weight = math.sqrt((1 - state_weight**2) * (inner / 2)) / state_weight
        self._ones = torch.ones(size, dtype=context.dtype, device=context.device) if config.get("scale_input") else None
        self.activation_size = 4 * inner

    def guess(self, token_ids: Tensor, states: Tensor, num_drafts: int) -> Tensor:
        x = states if self._ones is None else self._ops.rms_norm(states, self._ones, 1e-6) / math.sqrt(2)
        guesses = []
        for project, ends in self._layers[:num_drafts]:
            x = project(x) + self._token_weight * ends.embed.rows_of(token_ids)
            x = self._ops.activate(self._ops.rms_norm(x, ends.scale, 1e-6) + ends.shift, "gelu")
            token_ids = ends.head(x).argmax(-1)
            guesses.append(token_ids)
        return torch.stack(guesses, 1)


class _Ends:
    """A layer's embedding, norm and head."""

    def __init__(self, context: ModelContext, prefix: str, index: int, vocab_size: int, size: int) -> None:
        self.embed = VocabEmbedding(context, VocabularyWeight(context, f"{prefix}emb.{index}.weight", vocab_size, size))
        self.scale = context.read(f"{prefix}ln.{index}.weight", (size,))
        self.shift = context.read(f"{prefix}ln.{index}.bias", (size,))
        self.head = LanguageModelHead(
            context, VocabularyWeight(context, f"{prefix}head.{index}.weight", vocab_size, size)
        )

"""Counts the cost of a model's step on one rank, from a dry build: bytes to read, and weights to multiply by.

The layers' calls of `Packing` show which weights multiply tokens, in any family.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch

from quire.core.config.resolved import EngineConfig, ModelSpec
from quire.core.errors import ModelLoadError
from quire.core.wire.model_cost import AttentionCost, ModelCost, ShardCost, WeightCost
from quire.executor.backends import bind
from quire.executor.inspection.load_plan import stored_tensors
from quire.executor.layers.attention.layer_kv import LayerKV
from quire.executor.layers.context import ModelContext
from quire.executor.memory.dry_build import ShapeReader, dry_build, held_bytes
from quire.executor.memory.kv_dtypes import layer_dtypes
from quire.executor.memory.rank_memory import RankMemory
from quire.executor.models.base import Model
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.weights.packed_state import is_packed
from quire.executor.weights.packing import PackAtLoad, ReadExperts, ReadLinear, ReadProducts
from quire.executor.weights.quantization.schemes import own_config
from quire.ops.backend import Backend
from quire.ops.linear import LinearWeight

EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_k", "top_k_experts")
"""config.json's names of the number of experts for each token."""


def count_cost(config: EngineConfig, tensor_sizes: Iterable[int]) -> ModelCost:
    """Counts the cost on the first rank, for each number of ranks in `tensor_sizes` that can divide the model's layers.

    Raises:
        ModelLoadError: the model cannot be built at all, or was packed for one layout.
    """
    spec = config.spec
    if is_packed(Path(spec.path)):
        raise ModelLoadError(f"{spec.name} holds weights that are packed for one layout; name the checkpoint instead.")
    # A part of each expert is counted; a rank with whole experts has equally many bytes.
    config = msgspec.structs.replace(config, expert_placement=None)
    cost = ModelCost(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        activation_bytes=getattr(torch, spec.dtype).itemsize,
        num_experts=0,
        experts_per_token=0,
        num_expert_layers=0,
        shards=[],
        refusals=[],
    )
    for size in tensor_sizes:
        try:
            cost.shards.append(_count_shard(config, cost, size))
        except ModelLoadError as error:
            if size == 1:
                raise
            cost.refusals.append((size, str(error)))
    return cost


def _count_shard(config: EngineConfig, cost: ModelCost, size: int) -> ShardCost:
    spec, ops, device = config.spec, bind(config.device), torch.device(config.device)
    method, _ = own_config(spec)
    with stored_tensors(config, is_quantized=method is not None) as stored, torch.inference_mode():
        counter = CountedPacking(ops)
        reader = ShapeReader(getattr(torch, spec.dtype), stored)
        context = ModelContext.of(config, ops, ParallelGroup(0, size), device, reader, counter)
        model = dry_build(spec, context, reader)
    weights_bytes = held_bytes(model) + counter.left_out_bytes
    memory = RankMemory.of(config, [model], 0, weights_bytes, ops, device)
    if counter.mixtures:
        cost.num_experts, cost.num_expert_layers = counter.num_experts, len(counter.mixtures)
        cost.experts_per_token = _experts_per_token(spec)
    vocab_rows = -(-spec.vocab_size // size)
    linears = list(counter.linears)
    # No layer inside the blocks has as many outputs as the vocabulary has tokens.
    head = max((number for number, (rows, _) in enumerate(linears) if rows == vocab_rows), default=None)
    head_cost = WeightCost() if head is None else linears.pop(head)[1]
    layers, experts = _total(part for _, part in linears), _total(counter.mixtures)
    rest = max(0, weights_bytes - layers.num_bytes - experts.num_bytes - head_cost.num_bytes)
    return ShardCost(
        tensor=size,
        layers=layers,
        head=head_cost,
        experts=experts,
        rest_bytes=rest - counter.rows_bytes,
        embedding_bytes=counter.rows_bytes,
        workspace_bytes=memory.needs.workspace_bytes,
        state_bytes=memory.needs.state_bytes,
        page_bytes=memory.needs.page_bytes,
        kv_groups=memory.groups,
        attention=list(_attention(config, model, ops, max(1, spec.num_attention_heads // size))),
    )


class CountedPacking(PackAtLoad):
    """Packs as at load, and counts what it packs.

    Attributes:
        linears: each linear layer's outputs and its cost, in the order of the model's construction.
        mixtures: the routed experts' cost, layer by layer.
        num_experts: of one layer.
        left_out_bytes: of experts that were not packed.
        rows_bytes: of embeddings, including those without a shared head.
    """

    def __init__(self, ops: Backend[Any, Any, Any]) -> None:
        super().__init__(ops)
        self.linears: list[tuple[int, WeightCost]] = []
        self.mixtures: list[WeightCost] = []
        self.num_experts = 0
        self.left_out_bytes = 0
        self.rows_bytes = 0

    def linear(self, read: ReadLinear) -> Any:
        weight, bias = read()
        return self._note(super().linear(lambda: (weight, bias)), *weight.shape)

    def products(self, read: ReadProducts) -> list[Any]:
        products = read()
        packed = super().products(lambda: products)
        return [self._note(each, *weight.shape) for each, (weight, _) in zip(packed, products, strict=True)]

    def gated(self, read: ReadProducts) -> list[Any]:
        products = read()
        if len(products) > 1:
            return self.products(lambda: products)
        [packed] = super().gated(lambda: products)
        return [self._note(packed, *products[0][0].shape)]

    def experts(self, read: ReadExperts, num_experts: int) -> Any:
        """Packs one expert: all have the same shapes, and a layer of a large model has hundreds."""
        [expert] = islice(read(), 1)
        packed = super().experts(lambda: [expert], 1)
        num_weights = math.prod(expert.gate_up.shape) + math.prod(expert.down.shape)
        one = held_bytes(packed)
        self.left_out_bytes += one * (num_experts - 1)
        self.num_experts = max(self.num_experts, num_experts)
        self.mixtures.append(WeightCost(one * num_experts, num_weights * num_experts))
        return packed

    def rows(self, read: Callable[[], LinearWeight]) -> Any:
        rows = super().rows(read)
        self.rows_bytes += held_bytes(rows)
        return rows

    def shared(self, read: ReadLinear) -> tuple[Any, Any]:
        weight, bias = read()
        packed, rows = super().shared(lambda: (weight, bias))
        if rows is not packed:
            self.rows_bytes += held_bytes(rows)
        return self._note(packed, *weight.shape), rows

    def _note(self, packed: Any, rows: int, inputs: int) -> Any:
        self.linears.append((rows, WeightCost(held_bytes(packed), rows * inputs)))
        return packed


def _total(parts: Iterable[WeightCost]) -> WeightCost:
    parts = list(parts)
    return WeightCost(sum(part.num_bytes for part in parts), sum(part.num_weights for part in parts))


def _attention(config: EngineConfig, model: Model, ops: Backend, num_heads: int) -> Iterator[AttentionCost]:
    """Yields the cost of layers with a KV cache, by window. A token's latents are read for scores and for sums."""
    dtypes = layer_dtypes(config, model.kv_layers)
    found: dict[int | None, tuple[int, int]] = {}
    for layer, dtype in zip(model.kv_layers, dtypes, strict=True):
        head_size, rate = (layer.head_dim, 1) if isinstance(layer, LayerKV) else (layer.size, layer.rate)
        row_bytes = math.prod(layer.cache_shape(ops, 1, rate, dtype)) * dtype.itemsize
        num_bytes, operations = found.get(layer.window, (0, 0))
        found[layer.window] = (
            num_bytes + row_bytes // rate,
            operations + 4 * num_heads * head_size // rate,
        )
    for window, (num_bytes, operations) in found.items():
        yield AttentionCost(window, num_bytes, operations)


def _experts_per_token(spec: ModelSpec) -> int:
    """Returns the number of a layer's experts for each token.

    Raises:
        ModelLoadError: config.json does not say.
    """
    for name in EXPERTS_PER_TOKEN:
        if count := spec.hf_config.get(name):
            return int(count)
    raise ModelLoadError(f"config.json of {spec.name} has none of {', '.join(EXPERTS_PER_TOKEN)}: set one there.")

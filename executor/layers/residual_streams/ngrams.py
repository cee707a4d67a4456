"""Qwen4-Exp's per-layer embeddings of n-grams, which are added to a token's streams.

An n-gram is a token and the `n - 1` before it, and is hashed to a row in each of several tables (arXiv:1902.10260).
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, whole
from quire.executor.layers.norm import NormStyle
from quire.executor.layers.recurrent.base import CausalConv1d, parts_of
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.layers.vocabulary import VocabEmbedding, VocabularyWeight
from quire.executor.weights.joined import JoinedWeights
from quire.executor.weights.readers import Shard
from quire.ops.recurrent import StateRows, store_states

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_LAYER_SEED = 10007


@dataclass(frozen=True)
class NGramShape:
    """Sizes of a model's n-gram embeddings.

    Attributes:
        size: elements of a token's embedding, from all tables.
        longest: tokens of the longest n-grams; the shortest are pairs.
        num_tables: for each length.
        table_size: a lower bound. The tables' sizes are consecutive primes from there on.
        multiple: all rows together are padded to a multiple of it.
        vocab_size: and `seed`: of the hashes.
        end: the token that ends a text; n-grams do not reach beyond it.
        conv_width: tokens that a token's convolution sees, every `longest`-th one.
    """

    size: int
    longest: int
    num_tables: int
    table_size: int
    multiple: int
    vocab_size: int
    seed: int
    end: int
    conv_width: int


class NGramHash:
    """Hashes a token's n-grams to rows of the tables.

    Attributes:
        num_rows: of all tables, one after another.
        context: the required tokens before the first of a step.
    """

    def __init__(self, context: ModelContext, shape: NGramShape, order: int) -> None:
        """Takes as `order` the number of earlier layers with n-grams. Each layer has separate tables and factors."""
        count = (shape.longest - 1) * shape.num_tables
        sizes = _primes_from(shape.table_size, (order + 1) * count)[order * count :]
        total = sum(sizes)
        self.context = shape.longest - 1
        self.num_rows = -(-total // shape.multiple) * shape.multiple
        self._end = shape.end
        self._factors = _factors(shape, order)
        self._sizes = torch.tensor(sizes).view(self.context, -1).to(context.device)
        starts = [sum(sizes[:place]) for place in range(count)]
        self._starts = torch.tensor(starts).view(self.context, -1).to(context.device)

    def __call__(self, token_ids: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        """Maps `token_ids` [num_tokens] to [num_tokens, lengths * tables] int64.

        `state` [num_slots, context] int64 has the tokens before the step, and is overwritten.
        """
        windows = self._windows(token_ids, state[rows.slots].masked_fill_(rows.is_new.unsqueeze(1), self._end), rows)
        mixed, names = token_ids * self._factors[0], []
        is_cut = torch.zeros_like(token_ids, dtype=torch.bool)
        for shift in range(1, self.context + 1):
            other = windows[:, self.context - shift]
            is_cut |= other == self._end
            mixed = mixed ^ other.masked_fill(is_cut, self._end) * self._factors[shift]
            names.append(mixed.unsqueeze(1) % self._sizes[shift - 1] + self._starts[shift - 1])
        is_decode = len(token_ids) == len(rows.starts) - 1
        if is_decode:
            store_states(state, rows, windows[:, 1:])
        else:
            state[rows.slots] = windows[(rows.starts[1:] - 1).to(windows.device), 1:]
        return torch.cat(names, dim=1)

    def _windows(self, token_ids: Tensor, before: Tensor, rows: StateRows) -> Tensor:
        """Returns each token with those before it, [num_tokens, context + 1]; `before` are the rows' earlier tokens."""
        if len(token_ids) == len(rows.starts) - 1:  # a decode step: nothing goes to the device
            return torch.cat((before, token_ids.unsqueeze(1)), dim=1)
        lengths = rows.starts.diff()
        row = torch.arange(len(lengths)).repeat_interleave(lengths)
        places = torch.arange(len(token_ids)) - rows.starts[row]
        back = torch.arange(self.context, -1, -1)
        inside = before.numel() + torch.arange(len(token_ids)).unsqueeze(1) - back
        outside = ((row + 1) * self.context + places).unsqueeze(1) - back
        history = torch.cat((before.flatten(), token_ids))
        return history[torch.where(places.unsqueeze(1) >= back, inside, outside).to(history.device)]


class NGramLayer:
    """Adds n-grams to a token's streams: values with a gate for each stream, and a convolution of them.

    Every rank has all of it except the tables, whose rows are divided.

    Attributes:
        state: the tokens and the convolution's inputs that are kept of a sequence.
        activation_size: values that the layer computes for each token.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        number: int,
        hidden_size: int,
        shape: NGramShape,
        style: NormStyle,
        *,
        order: int,
        num_streams: int,
    ) -> None:
        """Takes its place among the states as `number`; `order` as for `NGramHash`."""
        size = num_streams * hidden_size
        self._ops = context.ops
        self._number = number
        self._streams = (num_streams, hidden_size)
        self._hash = NGramHash(context, shape, order)
        joined = replace(context, weights=JoinedWeights(context.weights))
        row_size = shape.size // ((shape.longest - 1) * shape.num_tables)
        weight = VocabularyWeight(
            joined, f"{name}.ple_embedding.ngram_embedding.weight", self._hash.num_rows, row_size
        )  # fmt: skip
        self._embed = VocabEmbedding(context, weight)
        self._keys_values = ColumnLinear(
            context, [whole(f"{name}.key_proj", size), whole(f"{name}.value_proj", hidden_size)], shape.size
        )
        self._norms = [style.read(context, f"{name}.norm_{kind}", size).view(self._streams) for kind in _NORMS]
        self._eps = style.eps
        channels = parts_of(f"{name}.conv1d", [Shard(0, 0, size)], size)
        self._conv = CausalConv1d(context, channels, shape.conv_width, dilation=shape.longest)
        self.state = LayerState(((self._hash.context,), self._conv.state_shape), (torch.int64, context.dtype))
        self.activation_size = shape.size + 6 * size

    def __call__(self, streams: Tensor, token_ids: Tensor, step: StepContext) -> Tensor:
        """Returns `streams` [num_tokens, num_streams, hidden] with the addition."""
        latest, conv_state = step.states[self._number]
        names = self._hash(token_ids, latest, step.rows)
        embedded = self._embed.rows_of(names.flatten()).view(len(token_ids), -1)
        keys, values = self._keys_values(embedded).split([math.prod(self._streams), self._streams[1]], dim=-1)
        key_norm, query_norm, conv_norm = self._norms
        keys = self._ops.rms_norm(keys.unflatten(1, self._streams), key_norm, self._eps)
        queries = self._ops.rms_norm(streams, query_norm, self._eps)
        gates = (keys * queries).sum(dim=-1, keepdim=True) / math.sqrt(self._streams[1])
        gates = (gates.abs().clamp_min(1e-6).sqrt() * gates.sign()).sigmoid()
        values = gates * values.unsqueeze(1)
        normed = self._ops.rms_norm(values, conv_norm, self._eps)
        mixed = self._conv(normed.flatten(1), conv_state, step.rows)
        return streams + (values + mixed.view_as(values))


_NORMS = ("key", "query", "conv")


def _factors(shape: NGramShape, order: int) -> list[int]:
    """Draws an odd factor for each token of an n-gram, whose product with a token's id is positive in 64 bits."""
    half = max(1, ((1 << 63) - 1) // max(shape.vocab_size, 1) // 2)
    seed = shape.seed + _LAYER_SEED * order
    return [2 * (_splitmix(seed + _GOLDEN * (place + 1)) % half) + 1 for place in range(shape.longest)]


def _splitmix(value: int) -> int:
    """Computes the output of SplitMix64 (doi:10.1145/2660193.2660195) in the state `value`."""
    value = (value + _GOLDEN) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 31)


@functools.cache
def _primes_from(start: int, count: int) -> tuple[int, ...]:
    """Lists the first primes from `start` on."""

    def primes() -> Iterator[int]:
        number = max(start, 2)
        while True:
            if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
                yield number
            number += 1

    return tuple(islice(primes(), count))

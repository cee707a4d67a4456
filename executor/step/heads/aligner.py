"""The alignment of a decoder's tokens with what its encoder has read: when each word of a transcript was said."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from quire.core.wire.pooling import AlignmentHead, Pooling
from quire.core.wire.protocol import NewSlot
from quire.executor.layers.attention.cross import CrossAttention
from quire.executor.layers.step_context import LayerCache
from quire.executor.sampling.token_table import TokenTable
from quire.executor.step.encoded_inputs import EncodedInputs
from quire.executor.step.heads.head import HeadRow, PendingOutput
from quire.executor.step.heads.pooler import PendingVectors
from quire.executor.transfers import Transfers, to_device


class CrossLayerCache(NamedTuple):
    """A layer's attention to the encoder, and the place of its keys and values."""

    attention: CrossAttention
    cache: LayerCache


class Aligner:
    """Computes a matrix of requests with the method "aligned": how much each token attends to each row of the input.

    As in OpenAI's Whisper and in Transformers: the weights of each head are normalized over the tokens, smoothed by a
    median over rows, and averaged over heads.

    Args:
        layers: of the model's decoder.
        encoded: the inputs of requests.
        median_width: rows of the median, an odd number.
    """

    def __init__(
        self,
        layers: Sequence[CrossLayerCache],
        encoded: EncodedInputs,
        median_width: int,
        transfers: Transfers,
    ) -> None:
        self._layers = layers
        self._encoded = encoded
        self._groups = sorted({layer.cache.group for layer in layers})
        self._median_width = median_width
        self._transfers = transfers
        self._poolings: dict[int, Pooling] = {}  # by slot
        self._parts: dict[int, list[Tensor]] = {}  # by slot, [num_own_heads, num_tokens, num_rows] of chunks

    def admit(self, request: NewSlot) -> None:
        """Notes what the request wants, and has the layers keep their queries."""
        self.release([request.slot])
        if request.pooling is not None and request.pooling.method == "aligned":
            self._poolings[request.slot] = request.pooling
            self._parts[request.slot] = []
            for head in request.pooling.alignment_heads:
                self._layers[head.layer].attention.keeps_queries = True

    def release(self, slots: list[int]) -> None:
        """Forgets the requests in these slots. After the last of all, no layer keeps its queries."""
        if not self._poolings:
            return
        for slot in slots:
            self._poolings.pop(slot, None)
            self._parts.pop(slot, None)
        if not self._poolings:
            for attention, _ in self._layers:
                attention.keeps_queries, attention.queries = False, None

    def launch(self, rows: Sequence[HeadRow], table: TokenTable) -> list[PendingOutput]:
        results: list[PendingOutput] = []
        for row in rows:
            pooling, parts = self._poolings[row.slot], self._parts[row.slot]
            parts.append(self._weights(row, pooling.alignment_heads))
            if row.end == table.num_prompt_tokens[row.slot]:
                matrix = self._matrix(torch.cat(parts, dim=1), pooling)
                transfer = self._transfers.to_host([matrix.reshape(1, -1)])
                results.append(PendingVectors(row.row, None, 1, slice(None), transfer))
        return results

    def _weights(self, row: HeadRow, heads: Sequence[AlignmentHead]) -> Tensor:
        """Returns the weights [num_own_heads, num_tokens, num_rows] of a row's tokens."""
        tokens = slice(row.first, row.first + len(row.hidden))
        found = []
        for layer in dict.fromkeys(head.layer for head in heads):
            attention, cache = self._layers[layer]
            slots = to_device(self._encoded.cache_slots(row.slot, self._groups.index(cache.group)), row.hidden.device)
            own = [head.head for head in heads if head.layer == layer]
            found.append(attention.weights(own, tokens, cache.pages, slots))
        return torch.cat(found)

    def _matrix(self, weights: Tensor, pooling: Pooling) -> Tensor:
        """Returns [num_tokens, num_rows] float32 of all heads' weights [num_own_heads, num_tokens, num_rows]."""
        weights = weights[:, pooling.num_lead_tokens :, : pooling.num_rows]
        total = weights.new_zeros(weights.shape[1:])
        for head in weights:  # one at a time, as a median sorts copies of all its values
            spread = head.std(dim=0, unbiased=False)
            total += _median(((head - head.mean(dim=0)) / spread).nan_to_num(0.0, 0.0, 0.0), self._median_width)
        return self._layers[0].attention.group.all_reduce(total) / len(pooling.alignment_heads)


def _median(x: Tensor, width: int) -> Tensor:
    """Replaces each value of `x` [n, m] by the median of the `width` around it in its row, mirrored at the ends."""
    half = width // 2
    if x.shape[1] <= half:
        return x
    return functional.pad(x, (half, half), mode="reflect").unfold(1, width, 1).sort()[0][..., half]

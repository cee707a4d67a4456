"""The operations of a step, as the interface of a backend: an object that computes them on one kind of device.

A backend is bound once, when a model is built, and passed to the layers. No other code asks for the device. Tensors are
on the backend's device. `num_tokens` is the number of new tokens in a step; the tokens of its requests follow one
another.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.ops.latent import LatentOperations, Selection
from quire.ops.quantized import QuantizedWeight
from quire.ops.recurrent import RecurrentOperations
from quire.ops.routing import Router
from quire.ops.sampling import SamplingOperations
from quire.ops.stored import StoredWeight, put_together
from quire.ops.streams import StreamOperations

PlainActivation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "quick_gelu"]
"""An elementwise activation function: silu (arXiv:1702.03118), gelu (1606.08415), its approximations by tanh and by `x
* sigmoid(1.702 * x)`, relu and its square (2109.08668).
"""

Activation = PlainActivation | Literal["clamped_swiglu", "clamped_silu"]
"""The output of a gated layer for a gate g and its up u.

f(g) * u with a plain activation f; or g * sigmoid(SWIGLU_ALPHA * g) * (u + 1) with g and u at most SWIGLU_LIMIT, and u
at least its negative (arXiv:2508.10925); or silu(g) * u with the same limits by SILU_LIMIT.
"""

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
SILU_LIMIT = 10.0


class DeviceRows(NamedTuple):
    """The rows of a step on the device: what `Backend.attention_batch` takes as arrays on the host.

    In a recorded step the values change, and the shapes and bounds stay.

    Attributes:
        query_starts: [num_rows + 1] int32; row r has the step's tokens from `query_starts[r]` to `query_starts[r + 1]`.
        seq_lens: [num_rows] int32.
        block_tables: [num_rows, max_blocks] int32, dense.
        max_query_len: a bound on the new tokens of a row.
        max_seq_len: a bound on `seq_lens`.
    """

    query_starts: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_seq_len: int


class AttentionBatch(Protocol):
    """The places in the KV cache that one step reads and writes; built once a step and shared by all layers.

    The arrays on the host are not for layers of recorded steps, because a recording does not read them again.
    """

    slot_mapping: Tensor
    """[num_tokens] int64: the cache slot (page * block_size + offset) for each new token's key and value."""

    query_lens: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray
    prefix_spans: np.ndarray | None
    """The `prefix_spans` of `Backend.attention_batch`."""

    block_size: int


class RecordingRules(NamedTuple):
    """The decode steps that a backend records.

    Attributes:
        row_counts: ascending; a step with fewer rows is padded to one of these. A step with more is not padded. Empty:
            none is padded.
        max_seq_lens: ascending bounds on the lengths of sequences; a recording serves one of them. Empty: a recording
            serves all lengths.
        interval: the least number of steps from one recording to the next, because a recording delays its step.
        max_rows: steps with more rows are not recorded; None: all are.
        shared_bytes: memory that recordings share, beside a step's activations and logits.
        each_bytes: memory of each recording.
    """

    row_counts: Sequence[int] = ()
    max_seq_lens: Sequence[int] = ()
    interval: int = 1
    max_rows: int | None = None
    shared_bytes: int = 0
    each_bytes: int = 0


class Recording(Protocol):
    """Recorded operations, which can run again on the memory that they were recorded with."""

    def run(self) -> None:
        """Runs all operations, in order."""
        ...

    def run_timed(self) -> list[float]:
        """Runs all operations; returns the CLOCK_MONOTONIC time in seconds at which each was done.

        One time is returned for all where they are launched as one.
        """
        ...


class PairBias(NamedTuple):
    """Biases of pairs of a query and a key, by the distance between them (disentangled attention, arXiv:2006.03654).

    A score gets `of_queries[query, head, query_buckets[d]] + of_keys[key, head, key_buckets[d]]`, where d is the key's
    position less the query's, plus `reach`.

    Attributes:
        of_queries: and `of_keys`: [num_tokens, num_heads, num_buckets], of the tokens of a step.
        query_buckets: and `key_buckets`: [2 * reach + 1] int64; no distance is greater than `reach`.
    """

    of_queries: Tensor
    of_keys: Tensor
    query_buckets: Tensor
    key_buckets: Tensor


class AttentionForm(NamedTuple):
    """The keys that a layer's queries see, and the formula from their scores to weights.

    A score is `scale * q·k`, then capped, then biased. The weights are the softmax of the scores that a query sees.

    Attributes:
        scale: multiplies the products of queries and keys.
        window: a token sees itself and the `window - 1` tokens before it; None: all tokens before it.
        span_window: of its prefix span, a token sees the tokens fewer than `span_window` positions away, on both sides;
            None: all of them, whatever the window.
        chunk: sequences fall into chunks, the positions from one multiple of `chunk` to the next; None: no chunks.
        chunks: the chunks whose tokens a token sees: its own; or the previous one; or all earlier than that one.
        softcap: the score becomes `softcap * tanh(score / softcap)` (arXiv:2408.00118).
        sinks: [num_heads] float32; a head's sink is one more score, without a value, in its softmax (arXiv:2309.17453).
        slopes: [num_heads] float32; `slope * (key position - query position)` is added to a score (ALiBi,
            arXiv:2108.12409).
        distance_bias: [num_heads, 2 * reach + 1] float32; the number of the key position less the query position, from
            -reach to reach, is added to a score. Greater distances count as those (arXiv:1910.10683).
        pair_bias: for `sequence_attention` alone.
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    chunks: Literal["own", "previous", "earlier"] = "own"
    softcap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    distance_bias: Tensor | None = None
    pair_bias: PairBias | None = None
    span_window: int | None = None


LinearWeight = Tensor | QuantizedWeight
"""The weight of a linear layer, [out, in], in a form that every backend packs."""


class ExpertWeights(NamedTuple):
    """The two linear layers of one expert (arXiv:1701.06538, 2002.05202). All experts of a layer have one form.

    Attributes:
        gate_up: [2 * size, hidden]: gates, then ups; or [size, hidden], without gates, or with only the gates.
        down: [hidden, size].
        gate_up_bias: one value an output, gates first; or None.
        down_bias: [hidden], or None.
        up: [size, hidden]: the ups, if they have another form than the gates; else None.
    """

    gate_up: LinearWeight
    down: LinearWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    up: LinearWeight | None = None

    @property
    def is_gated(self) -> bool:
        """True if the activation has gates and ups."""
        return self.up is not None or self.gate_up.shape[0] != self.down.shape[1]

    @property
    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """The biases of `gate_up` and `up`."""
        if self.up is None or self.gate_up_bias is None:
            return self.gate_up_bias, None
        gate, up = self.gate_up_bias.chunk(2)
        return gate, up


class LowRankWeights(NamedTuple):
    """Low-rank weights that adapters add to those of linear layers with the same input (LoRA, arXiv:2106.09685).

    Adapter n adds `b[n] @ a[n]` to a layer's weight, by the layer's part of the rows of `a` and of the columns of `b`.
    Both are dense, and in the dtype of the layers' inputs.

    Attributes:
        a: [num_adapters, num_layers * rank, in]: the rows of each layer after those of the previous one.
        b: [num_adapters, rank, sum of `sizes`]: each layer's outputs after those of the previous one.
        sizes: the number of each layer's outputs.
    """

    a: Tensor
    b: Tensor
    sizes: tuple[int, ...]


class UnlikeExpertsError(ValueError):
    """Experts of one layer differ in form, so there is no packed form for them."""


Batch = TypeVar("Batch", bound=AttentionBatch)
"""A backend's own `AttentionBatch`, from its `attention_batch` for its `attention`."""

PackedLinear = TypeVar("PackedLinear")
"""A weight in the backend's layout: from `pack_linear` for `linear`, or from `pack_gated_linear` for `gated_linear`."""

PackedExperts = TypeVar("PackedExperts")
"""A layer's experts in the backend's layout: from `pack_experts`, for `experts`."""


class Backend(ABC, Generic[Batch, PackedLinear, PackedExperts]):
    """The operations, the same for every device. A new operation is declared here and implemented in each backend.

    Attributes:
        latent: the operations of multi-head latent attention.
        recurrent: the operations of recurrent layers.
        sampling: the operations that choose tokens.
        streams: the operations of models with several residual streams.
        recording_rules: the decode steps for which `record` is called.
        packed_types: the classes that packed weights are made of.
    """

    latent: LatentOperations[Batch]
    recurrent: RecurrentOperations
    sampling: SamplingOperations
    streams: StreamOperations
    recording_rules: RecordingRules = RecordingRules()
    packed_types: tuple[type, ...]

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension (arXiv:1910.07467).

        `x` is [..., size]; `weight` is [size], or [heads, size] for an `x` of [..., heads, size]. The product with the
        weight is computed in the weight's dtype, which is `x`'s or float32; the result has `x`'s.
        """

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`(rms_norm(x + residual), x + residual)`; `residual` may be overwritten."""

    @abstractmethod
    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """Layer norm over the last dimension (arXiv:1607.06450), computed in float32 and rounded once.

        `x` is [..., size]; `weight` is like `rms_norm`'s, or None for ones; `bias` is [size], or None for zeros, of the
        weight's dtype.
        """

    @abstractmethod
    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Computes `x + residual`, perhaps in place of `residual`; both are [num_tokens, size]."""

    @abstractmethod
    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Joins the columns of all `parts`, each [num_tokens, its size]: [num_tokens, sum of the sizes]."""

    @abstractmethod
    def scale(self, x: Tensor, factor: float, softcap: float | None = None) -> Tensor:
        """Computes `factor * x`, capped as in `AttentionForm.softcap`, perhaps in place of `x` [num_tokens, size]."""

    @abstractmethod
    def activate(self, x: Tensor, activation: PlainActivation) -> Tensor:
        """Applies the activation to each element of `x` [num_tokens, size], perhaps in place."""

    @abstractmethod
    def rotation(
        self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines for `rotary`, both [num_tokens, 1, rotary_dim] of `dtype`.

        `positions` is [num_tokens] int64; `frequencies` [rotary_dim / 2] float32, radians a position; `scale`
        multiplies both.
        """

    @abstractmethod
    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates pairs (i, i + rotary_dim / 2) of the first `rotary_dim` of each head (arXiv:2104.09864, NeoX order).

        `x` is [num_tokens, heads, head_dim]; `cos` and `sin` are [num_tokens, 1, rotary_dim] with `sin`'s first half
        negated, of `x`'s dtype.
        """

    @abstractmethod
    def activate_and_mul(self, x: Tensor, activation: Activation = "silu") -> Tensor:
        """Maps [num_tokens, 2 * size], gates, then ups, to their activation [num_tokens, size] (arXiv:2002.05202)."""

    @abstractmethod
    def take_rows(self, x: Tensor, index: Tensor, scale: float = 1.0) -> Tensor:
        """Looks up rows of `x` [rows, size] at `index` [n] int64, times `scale`: [n, size]."""

    @abstractmethod
    def pack_linear(self, weight: LinearWeight, bias: Tensor | None = None) -> PackedLinear:
        """Packs `weight` [out, in] (and `bias` [out]) in the backend's layout; the caller then drops the original.

        Tensors on torch's meta device are packed into such tensors, as large as those of real weights would be.
        """

    @abstractmethod
    def has_rows(self, packed: PackedLinear) -> bool:
        """Returns True if `take_packed_rows` takes a weight from `pack_linear`. It takes all of a `QuantizedWeight`."""

    @abstractmethod
    def take_packed_rows(self, packed: PackedLinear, index: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Looks up rows of a weight [rows, size] that `pack_linear` packed, dequantized to `dtype`: [n, size].

        They equal those of `dequantize(weight, dtype)`, except that the sum of product and offset may be rounded once.
        """

    @property
    @abstractmethod
    def layout(self) -> str:
        """Names the conditions of packed layouts apart from the code, such as the processor's instructions."""

    def restore(self, stored: StoredWeight) -> Any:
        """Restores a packed weight, linear or experts', that was stored where this backend had the same `layout`.

        The tensors are used without a copy. Raises ValueError for a form that the backend does not know.
        """
        return put_together(stored, self.packed_types)

    @abstractmethod
    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """Maps `x` [num_tokens, in] to [num_tokens, out]."""

    @abstractmethod
    def pack_gated_linear(self, weight: LinearWeight, bias: Tensor | None = None) -> PackedLinear:
        """Packs a `weight` [gate | up, in], as `pack_linear` does; only `gated_linear` takes the result."""

    @abstractmethod
    def gated_linear(self, x: Tensor, packed: PackedLinear, activation: Activation = "silu") -> Tensor:
        """Runs `activate_and_mul` on a linear layer's outputs: `x` [num_tokens, in] → [num_tokens, size]."""

    @abstractmethod
    def add_low_rank(self, x: Tensor, out: Tensor, weights: LowRankWeights, adapters: Tensor) -> Tensor:
        """Adds the products of `x` [num_tokens, in] with each token's adapter to `out` [num_tokens, out], perhaps in
        place.

        `adapters` [num_tokens] int64 has each token's adapter, or -1 for none. The sum is rounded once.
        """

    @abstractmethod
    def route(self, x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        """Selects the experts of each token of `x` [num_tokens, hidden], and their weights; computed in float32.

        Returns ids [num_tokens, top_k] int64, the best first, and weights [num_tokens, top_k] float32.
        """

    @abstractmethod
    def pack_experts(self, experts: Iterable[ExpertWeights], num_experts: int) -> PackedExperts:
        """Packs all experts of a layer in the backend's layout. They are read one by one, and all have the same shapes.

        Tensors on torch's meta device are packed as in `pack_linear`.

        Raises:
            UnlikeExpertsError: they differ in form: in the dtypes and shapes of their tensors.
        """

    @abstractmethod
    def expert_tensors(self, packed: PackedExperts, index: int) -> list[Tensor]:
        """Returns the memory of one expert. Writing another expert's bytes there replaces the expert.

        All experts of a layer have tensors of the same shapes, in the same order.
        """

    @abstractmethod
    def experts(
        self,
        x: Tensor,
        packed: PackedExperts,
        ids: Tensor,
        weights: Tensor,
        activation: Activation = "silu",
        *,
        weighs_inputs: bool = False,
    ) -> Tensor:
        """Sums each token's experts, weighted (arXiv:1701.06538): `x` [num_tokens, hidden] → the same shape.

        An expert is a gated layer, or a linear layer with a plain activation, and the linear layer after it. `ids`
        [num_tokens, top_k] int64 are below the number of experts, or -1 for an expert of another rank, which adds
        nothing; `weights` [num_tokens, top_k] are float32. The terms of a token are summed in the order of its ids.
        With `weighs_inputs`, the weights multiply an expert's input instead of its output.
        """

    @abstractmethod
    def kv_cache_shape(
        self, num_pages: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[int, ...]:
        """Returns the shape of one layer's KV cache; only the backend knows the meaning of its dimensions.

        Pages, the first dimension, may lie apart in memory; each page is dense.
        """

    @abstractmethod
    def write_kv(
        self, k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, scales: Tensor | None = None
    ) -> None:
        """Stores `k` and `v` [num_tokens, num_kv_heads, head_dim] in the slots of `slot_mapping` [num_tokens] int64.

        In a quantized cache, `scales` [2, num_kv_heads] float32 are the scales of each head's keys and values; values
        beyond their range are clamped. None: each token and head gets its own scale.

        Infinities and NaN are replaced by finite values: the page may later belong to another request, and a NaN at a
        masked position would make that request's attention NaN.
        """

    @abstractmethod
    def read_kv(self, kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Reads the keys and values in `slots` [n] int64 that `write_kv` stored: both [n, num_kv_heads, head_dim]."""

    @abstractmethod
    def rotate_and_store(
        self,
        heads: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        *,
        norm: tuple[Tensor, float] | None = None,
        is_interleaved: bool = False,
        scales: Tensor | None = None,
    ) -> Tensor:
        """`rms_norm`, `rotary` and `write_kv` in one: the operations between a layer's projection and its attention.

        `heads` [num_tokens, num_heads + 2 * num_kv_heads, head_dim] holds queries, keys and values. Queries and keys
        are normalized by `norm` (weight [num_heads + num_kv_heads, head_dim], eps) if given, and rotated. If
        `is_interleaved`, pairs are (2i, 2i + 1) and come out as (i, i + rotary_dim / 2), which leaves products of
        queries and keys as they are. Keys and values are stored, with `scales` as in `write_kv`.
        Returns the queries [num_tokens, num_heads, head_dim].
        """

    @abstractmethod
    def prepare(
        self,
        cache_dtypes: Collection[torch.dtype],
        *,
        has_latents: bool,
        has_states: bool,
        has_adapters: bool = False,
    ) -> None:
        """Makes ready what only some models need, so that none of their steps waits for it.

        `cache_dtypes` are those of the model's caches of keys and values; `has_latents` says whether it has caches of
        latents, `has_states` whether it has recurrent layers, `has_adapters` whether its linear layers take adapters.
        """

    @abstractmethod
    def scratch_bytes(self, device: torch.device, row_bytes: int, *, is_quantized: bool) -> int:
        """Bytes that attention has in memory at most, beside queries, pages and results.

        `row_bytes` are the keys and values of the longest row in one layer, as attention reads them;
        `is_quantized`: pages hold quantized values.
        """

    @abstractmethod
    def attention_batch(
        self,
        query_lens: np.ndarray,
        seq_lens: np.ndarray,
        block_tables: np.ndarray,
        slot_mapping: Tensor,
        *,
        block_size: int,
        prefix_spans: np.ndarray | None = None,
        there: DeviceRows | None = None,
    ) -> Batch:
        """Prepares the attention of one step. Row r is one request; its tokens follow those of row r - 1.

        `query_lens` [num_rows] int64, on the host: new tokens of each row, at least 1.
        `seq_lens` [num_rows] int64, on the host: tokens known after this step, the new ones included.
        `block_tables` [num_rows, max_blocks], on the host: page ids; entries past a row's last page are never used.
        `slot_mapping` [num_tokens] int64, on the device: as `AttentionBatch.slot_mapping`.
        `prefix_spans` [num_rows, 2] int64, on the host: the tokens of each sequence from the first position up to the
            second see each other (`AttentionForm.span_window`), in forms without chunks. Their keys are there as soon
            as one of them attends. Two equal positions: no tokens do. None: none of any row.
        `there`: the rows on the device, without the spans. None: a backend that needs them copies them.
        """

    @abstractmethod
    def attention(self, q: Tensor, kv_cache: Tensor, batch: Batch, form: AttentionForm) -> Tensor:
        """Attention of `q` [num_tokens, num_heads, head_dim] over the pages; the result has `q`'s shape. It is causal
        but for the batch's prefix spans.

        The keys and values of the step's new tokens must have been written. Query head h reads KV head
        h // (num_heads / num_kv_heads). `form.chunks` is "own", so that each token sees itself.
        """

    def rotate_and_attend(
        self,
        heads: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_cache: Tensor,
        batch: Batch,
        form: AttentionForm,
        *,
        norm: tuple[Tensor, float] | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """`rotate_and_store`, and `attention` of all tokens of the step: [num_tokens, num_heads, head_dim].

        A backend may have one kernel for both.
        """
        q = self.rotate_and_store(heads, cos, sin, kv_cache, batch.slot_mapping, norm=norm, scales=scales)
        return self.attention(q, kv_cache, batch, form)

    @abstractmethod
    def sequence_batch(self, lengths: np.ndarray, device: torch.device) -> Batch:
        """Prepares `sequence_attention` for the sequences of a step, which follow one another on the `device`.

        `lengths` [num_sequences] int64, on the host: the tokens of each, at least 1.
        """

    @abstractmethod
    def sequence_attention(
        self,
        heads: Tensor,
        num_kv_heads: int,
        batch: Batch,
        form: AttentionForm,
        *,
        rotation: tuple[Tensor, Tensor] | None = None,
        norm: tuple[Tensor, float] | None = None,
    ) -> Tensor:
        """Attention in both directions within each sequence of `batch`, from `sequence_batch`, without a cache.

        `heads` [num_tokens, num_heads + 2 * num_kv_heads, head_dim] has queries, keys and values, each head dense.
        Queries and keys are normalized by `norm`, as in `rotate_and_store`, and rotated by a `rotation`, the cosines
        and sines of `rotary`. Nothing is padded, and a token's result does not depend on other sequences. `form` has no
        chunks. Returns [num_tokens, num_heads, head_dim].
        """

    @abstractmethod
    def selected_attention(self, q: Tensor, kv_cache: Tensor, selection: Selection, *, scale: float) -> Tensor:
        """Attends from each token only to the tokens that are selected for it, including itself, as `attention` does.

        Slots past a token's count are those of tokens that have been written.
        """

    @abstractmethod
    def partial_attention(
        self, q: Tensor, kv_cache: Tensor, batch: Batch, form: AttentionForm
    ) -> tuple[Tensor, Tensor]:
        """Attends to some of a sequence's keys, as `attention` does; `form` has no sinks.

        Returns the outputs and, in float32, the logarithm of each softmax's denominator [num_tokens, num_heads]. From
        these, `merge_attention` computes the outputs over all keys. For a token that sees no key, the logarithm is
        -inf, and the output is undefined.
        """

    @abstractmethod
    def merge_attention(self, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Merges parts to the outputs over all keys, weighted by each part's share of the whole softmax
        (arXiv:2205.14135).

        `parts` are results of `partial_attention`. Every token sees a key of some part.
        """

    @abstractmethod
    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Recording | None]:
        """Calls `run`, and returns its result and a recording of its operations.

        The recording computes the result again, from the current values in the inputs' memory. All recordings share
        memory: a result is valid until this backend's next `record`, or until any recording runs. Instead of a
        recording, None is returned if the backend cannot record, or if `run` did anything but operations of this
        backend and views of tensors.
        """

"""The operations of a step, as the interface of a backend: an object that computes them on one kind of device.

A backend is bound once, when a model is built, and passed to the layers. No other code asks for the device. Tensors are
on the backend's device. `num_tokens` is the number of new tokens in a step; the tokens of its requests follow one
another. Families of operations are declared in files of their own; attention over pages is declared here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.ops.elementwise import ElementwiseOperations
from quire.ops.experts import ExpertOperations, PackedExperts
from quire.ops.latent import LatentOperations, Selection
from quire.ops.linear import LinearOperations, PackedLinear
from quire.ops.recording import Recording, RecordingRules
from quire.ops.recurrent import RecurrentOperations
from quire.ops.residual_streams import ResidualStreamOperations
from quire.ops.sampling import SamplingOperations
from quire.ops.stored import StoredWeight, put_together


class DeviceRows(NamedTuple):
    """The rows of a step on the device: what `Backend.attention_batch` takes as arrays on the host.

    In a recorded step the values change, and the shapes and bounds stay.

    Attributes:
        query_starts: [num_rows + 1] int32; row r has the step's tokens from `query_starts[r]` to `query_starts[r + 1]`.
        seq_lens: [num_rows] int32.
        block_tables: [num_rows, max_blocks] int32, dense.
        max_query_len: a bound on the new tokens of a row.
        max_seq_len: a bound on `seq_lens`.
        are_apart: no row's tokens are seen by another. False: all of a step's keys and values are stored before any of
            its rows reads.
    """

    query_starts: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_seq_len: int
    are_apart: bool = True


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

    @property
    def positions(self) -> np.ndarray | None:
        """The positions of the new tokens, [num_tokens] int64 on the host. None: only the device knows them; each row
        then has one token, and layers compute for all tokens what is wanted of some.
        """
        ...

    @property
    def max_seq_len(self) -> int:
        """A bound on `seq_lens`, which is the same in all steps of a recording."""
        ...

    @property
    def tables_there(self) -> Tensor:
        """[num_rows, max_blocks] int64 or int32, on the device: `block_tables`."""
        ...


class PairBias(NamedTuple):
    """Biases of pairs of a query and a key, by the distance between them (disentangled attention, arXiv:2006.03654).

    A score gets `of_queries[query, head, query_buckets[d]] + of_keys[key, head, key_buckets[d]]`, where d is the key's
    position less the query's, plus `reach`. Greater distances count as `reach`.

    Attributes:
        of_queries: and `of_keys`: [num_tokens, num_heads, num_buckets], of the tokens of a step. Over pages, there are
            none of keys.
        query_buckets: and `key_buckets`: [2 * reach + 1] int64.
    """

    of_queries: Tensor
    of_keys: Tensor | None
    query_buckets: Tensor
    key_buckets: Tensor | None


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
        pair_bias: biases that tokens compute.
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


Batch = TypeVar("Batch", bound=AttentionBatch)
"""A backend's own `AttentionBatch`, from its `attention_batch` for its `attention`."""


class NewHeads(NamedTuple):
    """A step's queries, keys and values, and the places of the keys and values: the arguments of `rotate_and_store`.

    Attributes:
        heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values.
        cos: and `sin`: as for `rotary`, which rotates queries and keys.
        kv_cache: of the shape `kv_cache_shape`.
        slot_mapping: [num_tokens] int64, as `AttentionBatch.slot_mapping`.
        norm: the weight [num_heads + num_kv_heads, head_dim] and the eps that normalize queries and keys; or None.
        is_interleaved: pairs are (2i, 2i + 1) and come out as (i, i + rotary_dim / 2), which leaves products of queries
            and keys as they are.
        scales: as for `write_kv`.
    """

    heads: Tensor
    cos: Tensor
    sin: Tensor
    kv_cache: Tensor
    slot_mapping: Tensor
    norm: tuple[Tensor, float] | None = None
    is_interleaved: bool = False
    scales: Tensor | None = None


class ModelNeeds(NamedTuple):
    """The parts of a backend that only some models use.

    Attributes:
        cache_dtypes: those of the caches of keys and values.
        has_latents: there are caches of latents.
        has_states: there are recurrent layers.
        has_adapters: linear layers take adapters.
    """

    cache_dtypes: Collection[torch.dtype] = ()
    has_latents: bool = False
    has_states: bool = False
    has_adapters: bool = False


class Backend(
    ElementwiseOperations,
    LinearOperations[PackedLinear],
    ExpertOperations[PackedExperts],
    ABC,
    Generic[Batch, PackedLinear, PackedExperts],
):
    """The operations, the same for every device. A new operation is declared in its family and implemented in each
    backend.

    Attributes:
        latent: the operations of multi-head latent attention.
        recurrent: the operations of recurrent layers.
        sampling: the operations that choose tokens.
        residual_streams: the operations of models with several residual streams.
        recording_rules: the decode steps for which `record` is called.
        packed_types: the classes that packed weights are made of.
    """

    latent: LatentOperations[Batch]
    recurrent: RecurrentOperations
    sampling: SamplingOperations
    residual_streams: ResidualStreamOperations
    recording_rules: RecordingRules = RecordingRules()
    packed_types: tuple[type, ...]

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
    def rotate_and_store(self, new: NewHeads) -> Tensor:
        """`rms_norm`, `rotary` and `write_kv` in one: the operations between a layer's projection and its attention.

        Queries and keys are normalized if `new` has a norm, then rotated; keys and values are stored. Returns the
        queries [num_tokens, num_heads, head_dim].
        """

    @abstractmethod
    def prepare(self, needs: ModelNeeds) -> None:
        """Makes ready what a model needs, so that none of its steps waits for it."""

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

    def rotate_and_attend(self, new: NewHeads, batch: Batch, form: AttentionForm) -> Tensor:
        """`rotate_and_store`, and `attention` of all tokens of the step: [num_tokens, num_heads, head_dim].

        A backend may have one kernel for both.
        """
        return self.attention(self.rotate_and_store(new), new.kv_cache, batch, form)

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

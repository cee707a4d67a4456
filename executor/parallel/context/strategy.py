"""How ranks divide the positions of sequences, as layers, memory and steps see it, whichever division it is."""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from quire.executor.parallel.context.keys import ShardView, StepKeys
from quire.executor.parallel.context.rows import StepRows
from quire.ops.backend import AttentionBatch, AttentionForm, Backend

CHUNKS: tuple[Literal["own", "previous", "earlier"], ...] = ("own", "previous", "earlier")
"""The chunks of dual chunk attention; see `AttentionForm.chunks`."""


class KeptRows(Protocol):
    """The rows that an attention layer caches; see `AttentionKV`."""

    @property
    def indivisible(self) -> str | None:
        """Names the kind of attention if ranks cannot divide its positions."""
        ...


class ContextParallel:
    """The division into one part: each rank has all positions.

    Attributes:
        flag: the option that asks for a division.
        is_divided: ranks have parts of the positions.
        divides_tokens: a rank computes only some of a step's tokens, too.
    """

    flag = ""
    is_divided = False
    divides_tokens = False

    def refuse(self, attention: str, model: str = "") -> None:
        """Raises ModelLoadError if positions are divided, which they cannot be for this kind of `attention`.

        Args:
            model: its name, to begin the message.
        """

    def check_model(self, name: str, kv_layers: Sequence[KeptRows], *, has_states: bool) -> None:
        """Raises ModelLoadError if positions cannot be divided for these layers of the model `name`."""

    def check(self, form: AttentionForm) -> None:
        """Raises ModelLoadError for a form that cannot be computed over one rank's keys."""

    def check_heads(self, num_ranks: int, num_kv_heads: int) -> None:
        """Raises ModelLoadError if ranks that compute the same tokens hold different KV heads.

        Args:
            num_ranks: the ranks over which the model's heads are divided.
        """

    def activation_size(self, num_heads: int, size: int, value_size: int) -> int:
        """Counts the values of each token that a layer's attention computes for other ranks, and receives from them.

        Args:
            num_heads: queries of a rank.
            size: of a query.
            value_size: of a value.
        """
        return 0

    def slots(self, pages: np.ndarray, offsets: np.ndarray, block_size: int, spare_page: int) -> np.ndarray:
        """Returns this rank's slots for tokens, all [num_tokens] int64. Tokens of other ranks go to an unused page.

        Args:
            pages: of the tokens.
            offsets: of the tokens in their pages, below `block_size`.
        """
        return pages * block_size + offsets

    def attention(
        self, ops: Backend, batch: StepRows, query_lens: np.ndarray, block_size: int
    ) -> tuple[list[AttentionBatch], ShardView]:
        """Builds, by KV group, the attention of the last `query_lens` tokens of each row, to this rank's keys; stores
        all tokens.
        """
        raise NotImplementedError("steps of undivided positions need no view of a part")

    def longest(self, own: StepKeys, group: int) -> int | None:
        """Counts the tokens of the longest sequence up to one of the tokens; None: only the device knows."""
        positions = own.attention[group].positions
        return None if positions is None else int(positions.max(initial=-1)) + 1

    def attend(
        self,
        ops: Backend,
        q: Tensor,
        pages: Tensor,
        own: StepKeys,
        group: int,
        form: AttentionForm,
        num_kv_heads: int = 1,
    ) -> Tensor:
        """Runs `Backend.attention` for `q` [num_tokens, num_heads, head_dim], over the keys of all ranks.

        Args:
            own: the step of these tokens, or the part of it for them.
            group: the KV group.
            num_kv_heads: of the rank, if others compute the same tokens.
        """
        return ops.attention(q, pages, own.attention[group], form)

    def attend_to_latents(
        self, ops: Backend, q: Tensor, q_rotated: Tensor, cache: Tensor, own: StepKeys, group: int, *, scale: float
    ) -> Tensor:
        """Runs `LatentOperations.latent_attention`, over the latents of all ranks; `own`, `group` as for `attend`."""
        return ops.latent.latent_attention(q, q_rotated, cache, own.attention[group], scale=scale)

    def attend_in_chunks(
        self, ops: Backend, queries: Sequence[Tensor], pages: Tensor, own: StepKeys, group: int, form: AttentionForm
    ) -> Tensor:
        """Attends from each token to its own, the previous and all earlier chunks, with a query for each of the three.

        Args:
            queries: each as `q` for `attend`; other arguments as there.
            form: the chunks' size, and nothing else except a scale.
        """
        parts = [
            ops.partial_attention(each, pages, own.attention[group], form._replace(chunks=which))
            for which, each in zip(CHUNKS, queries, strict=True)
        ]
        return ops.merge_attention(parts)


WHOLE = ContextParallel()
"""Each rank has all positions."""

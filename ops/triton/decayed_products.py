"""Launches for states of decayed outer products: rows of few tokens one after another, others in chunks.

The last bits of what chunks compute depend on how a prompt is cut into steps. Those of rows of few tokens never do.
"""

from typing import Literal, NamedTuple

import torch
import triton
from torch import Tensor

from quire.ops.recurrent import StateRows
from quire.ops.triton.chunks import CHUNK, CHUNK_COLUMNS, LEAST_TOKENS, PASS_STAGES, PASS_WARPS, pass_chunks
from quire.ops.triton.delta_chunks import PASS, SOLVE, pass_delta_chunks, solve_chunks
from quire.ops.triton.outer_products import VALUE_COLUMNS, update_outer_products
from quire.ops.triton.prompt_attention import num_blocks
from quire.ops.triton.state_rows import as_bytes, starts_there, with_dense_tokens
from quire.ops.triton.tiles import are_whole

CHUNKED_TYPES = (torch.bfloat16,)
"""Those of `q`, `k` and `v` in chunks. States might exceed the numbers of float16."""
_LEAST_KEYS = 16
"""Of a product on matrix units."""
_NO_LIMIT = 2**31 - 1


class DecayedProducts(NamedTuple):
    """The inputs by the names of `DeltaRuleCall`; `q` and `k` are `c` and `b` of `SsdCall`, `v` is its `x`.

    Attributes:
        a: of lightning attention, the logarithms of the decays.
        d: of `SsdCall`.
        limits: of its time steps.
        least: of the logarithms of a delta rule's decays.
    """

    form: Literal["delta", "ssd", "lightning"]
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    dt: Tensor | None = None
    dt_bias: Tensor | None = None
    beta: Tensor | None = None
    d: Tensor | None = None
    limits: tuple[float, float] = (0.0, 0.0)
    least: float | None = None
    beta_scale: float = 1.0

    @property
    def has_channel_decay(self) -> bool:
        """True if each channel of the keys has a decay of its own."""
        return self.dt is not None and self.dt.dim() == 3

    @property
    def strides(self) -> list[int]:
        """From token to token and from head to head, of `q`, `k`, `v`, `dt`, and from token to token of `beta`."""
        found = [stride for each in (self.q, self.k, self.v) for stride in each.stride()[:2]]
        found += (0, 0) if self.dt is None else self.dt.stride()[:2]
        return [*found, 0 if self.beta is None else self.beta.stride(0)]

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest value, of time steps or decays."""
        return self.limits if self.least is None else (self.least, 0.0)


def update(call: DecayedProducts, state: Tensor, rows: StateRows, *, in_chunks: bool) -> Tensor:
    """Adds the tokens of rows to `state` [num_slots, heads, key_dim, value_dim]; returns their outputs, like `v`.

    With `in_chunks`, prompts are computed in chunks, where kernels can.
    """
    dt, beta = (None if each is None else with_dense_tokens(each) for each in (call.dt, call.beta))
    q, k, v = map(with_dense_tokens, (call.q, call.k, call.v))
    call = call._replace(q=q, k=k, v=v, dt=dt, beta=beta)
    starts, is_new = starts_there(q, rows), as_bytes(rows.is_new)
    out, most = torch.empty(v.shape, dtype=v.dtype, device=v.device), _NO_LIMIT
    if starts is not None and in_chunks and _takes_chunks(call, rows):
        most = LEAST_TOKENS - 1
        _pass_chunks(call, state, rows.slots, is_new, starts, out)
    num_heads, key_dim, value_dim = state.shape[1:]
    keys = triton.next_power_of_2(key_dim)
    update_outer_products(
        (len(rows.slots), num_heads, triton.cdiv(value_dim, VALUE_COLUMNS)), q, k, v, dt, call.dt_bias, call.a, beta,
        call.d, state, rows.slots, is_new, starts, out, num_heads, num_heads // q.shape[1], key_dim, value_dim, most,
        *call.strides, *call.bounds, call.beta_scale, FORM=call.form, HAS_CHANNEL_DECAY=call.has_channel_decay,
        HAS_LEAST_DECAY=call.least is not None, IS_EVEN=key_dim == keys and value_dim % VALUE_COLUMNS == 0, KEYS=keys,
        VALUES=VALUE_COLUMNS, num_stages=1,
    )  # fmt: skip
    return out


def _takes_chunks(call: DecayedProducts, rows: StateRows) -> bool:
    """Returns True if rows of many tokens are computed in chunks."""
    is_covered = call.q.dtype in CHUNKED_TYPES and not call.has_channel_decay
    return is_covered and int(rows.starts.diff().max()) >= LEAST_TOKENS


def _pass_chunks(
    call: DecayedProducts, state: Tensor, slots: Tensor, is_new: Tensor, starts: Tensor, out: Tensor
) -> None:
    """Adds the tokens of rows that have at least `LEAST_TOKENS`."""
    num_heads, key_dim, value_dim = state.shape[1:]
    share, keys = num_heads // call.q.shape[1], max(_LEAST_KEYS, triton.next_power_of_2(key_dim))
    strides = call.strides
    is_even = key_dim == keys and are_whole(*strides[:6])
    if call.form == "delta":
        return _pass_delta_chunks(call, state, slots, is_new, starts, out, keys, is_even=is_even)
    pass_chunks(
        (len(slots), num_heads, triton.cdiv(value_dim, CHUNK_COLUMNS)), call.q, call.k, call.v, call.dt, call.dt_bias,
        call.a, call.d, state, slots, is_new, starts, out, num_heads, share, key_dim, value_dim, LEAST_TOKENS,
        *strides[:8], *call.limits, FORM=call.form, IS_EVEN=is_even and value_dim % CHUNK_COLUMNS == 0, KEYS=keys,
        VALUES=CHUNK_COLUMNS, CHUNK=CHUNK, num_warps=PASS_WARPS, num_stages=PASS_STAGES,
    )  # fmt: skip
    return None


def _pass_delta_chunks(
    call: DecayedProducts,
    state: Tensor,
    slots: Tensor,
    is_new: Tensor,
    starts: Tensor,
    out: Tensor,
    keys: int,
    *,
    is_even: bool,
) -> None:
    num_heads, key_dim, value_dim = state.shape[1:]
    share, strides, sizes = num_heads // call.q.shape[1], call.strides, (key_dim, value_dim, LEAST_TOKENS)
    grid = num_blocks(len(call.k), len(slots), CHUNK), num_heads
    units, scores = call.k.new_empty(2, *call.k.shape), call.k.new_empty(*grid, CHUNK, CHUNK)
    solved = call.k.new_empty(len(call.k), num_heads, key_dim)
    form = {"HAS_LEAST_DECAY": call.least is not None, "KEYS": keys, "CHUNK": CHUNK}
    solve_chunks(
        grid, call.q, call.k, call.v, call.dt, call.dt_bias, call.a, call.beta, slots, starts, units, scores, solved,
        out, len(call.k), len(slots), num_heads, share, *sizes, *strides, call.bounds[0], call.beta_scale,
        IS_EVEN=is_even and value_dim % SOLVE["VALUES"] == 0, LEVELS=CHUNK.bit_length() - 1, **SOLVE, **form,
    )  # fmt: skip
    pass_delta_chunks(
        (len(slots), num_heads, triton.cdiv(value_dim, PASS["VALUES"])), units, scores, solved, call.dt, call.dt_bias,
        call.a, state, slots, is_new, starts, out, len(call.k), num_heads, share, *sizes, *strides[6:8],
        call.bounds[0], IS_EVEN=is_even and value_dim % PASS["VALUES"] == 0, **PASS, **form,
    )  # fmt: skip

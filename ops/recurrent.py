"""The operations of recurrent layers, whose state of a sequence has a fixed size for any length.

All tokens of a step lie one after another, row by row. An operation reads the states of the step's rows, computes the
outputs of all tokens, and overwrites the states. An output depends only on the tokens of its own row.
"""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

GateActivation = Literal["silu", "sigmoid", "identity", "softplus"]
"""The function that turns a gate into a factor. The gate of a short convolution is the factor itself."""


class StateRows(NamedTuple):
    """The rows of a step, as recurrent operations see them. No two rows have the same slot.

    Attributes:
        slots: [num_rows] int64, on the device; each row's place in the first dimension of a state. Negative: padding,
            which has no state, behind at least one row. Only backends that pad steps (`RecordingRules`) get such rows.
        starts: [num_rows + 1] int64, on the host; row r has the tokens from starts[r] up to starts[r + 1], at least 1.
        is_new: [num_rows] bool, on the device; the row begins its sequence, so its state counts as zeros.
        tables: [num_rows, 1] int32, on the host: the slots, as block tables of states that are a page each. Only for
            models whose states have first rows (`LayerState`), as are the next.
        beginning: [n] int64, on the host: the rows that begin their sequence. Decode steps have none.
        starts_there: `starts` on the device; None: each row has one token, or `starts` has to be copied.
    """

    slots: Tensor
    starts: Tensor
    is_new: Tensor
    tables: np.ndarray | None = None
    beginning: np.ndarray | None = None
    starts_there: Tensor | None = None


def store_states(states: Tensor, rows: StateRows, values: Tensor) -> None:
    """Writes the `values` [num_rows, ...] of rows with one token into `states` [num_slots, ...].

    Padding writes what the first row does. So nothing has to be known on the host.
    """
    places = torch.arange(len(rows.slots), device=rows.slots.device)
    written = places.masked_fill(rows.slots < 0, 0)
    states[rows.slots[written]] = values[written]


class ScanCall(NamedTuple):
    """The inputs of the scan of Mamba 1: `x`, `dt`, `gate`, `b` and `c` are of one dtype, the others float32.

    Attributes:
        x: [num_tokens, channels].
        dt: [num_tokens, channels].
        dt_bias: [channels].
        a: [size, channels], negative.
        b: and `c`: [num_tokens, size].
        d: [channels].
        gate: [num_tokens, channels].
    """

    x: Tensor
    dt: Tensor
    dt_bias: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor
    gate: Tensor


class SsdCall(NamedTuple):
    """The inputs of the scan of Mamba 2: `x`, `dt`, `b` and `c` are of one dtype, the others float32.

    Attributes:
        x: [num_tokens, heads, value_dim].
        dt: [num_tokens, heads].
        dt_bias: [heads].
        dt_limit: the least and the greatest time step.
        a: [heads], negative.
        b: and `c`: [num_tokens, groups, key_dim]; head h reads group h // (heads / groups).
        d: [heads].
    """

    x: Tensor
    dt: Tensor
    dt_bias: Tensor
    dt_limit: tuple[float, float]
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor


class DeltaRuleCall(NamedTuple):
    """The inputs of the gated delta rule: `q`, `k`, `v`, `dt` and `beta` are of one dtype, the others float32.

    Attributes:
        q: and `k`: [num_tokens, key_heads, key_dim]; head h reads key head h // (heads / key_heads).
        v: [num_tokens, heads, value_dim].
        dt: [num_tokens, heads]; or [num_tokens, heads, key_dim], if each channel of the keys has a decay of its own
            (arXiv:2510.26692).
        dt_bias: [heads], or [heads, key_dim] like `dt`.
        a: [heads], negative.
        beta: [num_tokens, heads].
        least_log_decay: negative; bounds the decay from below.
        beta_scale: multiplies the sigmoid of `beta`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dt: Tensor
    dt_bias: Tensor
    a: Tensor
    beta: Tensor
    least_log_decay: float | None = None
    beta_scale: float = 1.0


class RgLruCall(NamedTuple):
    """The inputs of the real-gated linear recurrent unit: `x` and the gates are of one dtype, the others float32.

    Attributes:
        x: [num_tokens, channels].
        input_gate: and `decay_gate`: [num_tokens, channels].
        input_bias: and `decay_bias`: [channels].
        log_decay: [channels], negative.
    """

    x: Tensor
    input_gate: Tensor
    input_bias: Tensor
    decay_gate: Tensor
    decay_bias: Tensor
    log_decay: Tensor


class RecurrentOperations(ABC):
    """The operations of recurrent layers on one kind of device."""

    @abstractmethod
    def causal_conv1d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        rows: StateRows,
        *,
        activation: Literal["silu"] | None = None,
    ) -> Tensor:
        """Convolution of each channel over its last `width` tokens; the last weight multiplies the newest.

        `x` is [num_tokens, channels], `weight` [width, channels], `bias` [channels], all of one dtype. `state`
        [num_slots, width - 1, channels] of that dtype holds the inputs of a sequence's last tokens, oldest first. The
        result is dense, like `x` otherwise.
        """

    @abstractmethod
    def selective_scan(self, call: ScanCall, state: Tensor, rows: StateRows) -> Tensor:
        """The scan of Mamba 1 (arXiv:2312.00752), times `silu(gate)`: [num_tokens, channels], like `x`.

        With t = softplus(dt + dt_bias): state = exp(t * a) * state + t * x * b; out = sum of state * c + d * x.

        `state` is [num_slots, size, channels] float32.
        """

    @abstractmethod
    def ssd(self, call: SsdCall, state: Tensor, rows: StateRows) -> Tensor:
        """The scan of Mamba 2 (arXiv:2405.21060): [num_tokens, heads, value_dim], like `x`.

        With t = softplus(dt + dt_bias) within `dt_limit`: state = exp(t * a) * state + t * (b ⊗ x); out = state · c + d
        * x.

        `state` is [num_slots, heads, key_dim, value_dim] float32.
        """

    @abstractmethod
    def lightning_attention(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, rows: StateRows
    ) -> Tensor:
        """Linear attention with a constant decay per head (arXiv:2501.08313): [num_tokens, heads, value_dim].

        state = exp(log_decay) * state + k ⊗ v; out = state · q. `q` and `k` are [num_tokens, heads, key_dim], `v` is
        [num_tokens, heads, value_dim], of one dtype. `log_decay` [heads] (negative) and `state` [num_slots, heads,
        key_dim, value_dim] are float32.
        """

    @abstractmethod
    def gated_delta_rule(self, call: DeltaRuleCall, state: Tensor, rows: StateRows) -> Tensor:
        """The gated delta rule (arXiv:2412.06464): [num_tokens, heads, value_dim], like `v`.

        `q` and `k` are scaled to length 1, q then by key_dim**-0.5. With g = exp(softplus(dt + dt_bias) * a):
        state = g * state + k ⊗ (beta_scale * sigmoid(beta) * (v - (g * state) · k)); out = state · q. With
        `least_log_decay` (negative), g = exp(least_log_decay * sigmoid(-a * (dt + dt_bias))) instead.

        `state` is [num_slots, heads, key_dim, value_dim] float32.
        """

    @abstractmethod
    def wkv(self, k: Tensor, v: Tensor, first: Tensor, log_decay: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        """The averages of RWKV 4 (arXiv:2305.13048, section 3.2): [num_tokens, channels], like `v`.

        out = (sum + exp(first + k) * v) / (weight + exp(first + k)), then sum = exp(log_decay) * sum + exp(k) * v and
        weight = exp(log_decay) * weight + exp(k). `k` and `v` are [num_tokens, channels], of one dtype; `first` and
        `log_decay` (negative) are [channels], `state` is [num_slots, 3, channels], all float32: sum and weight, both
        divided by exp of the third value, the greatest exponent so far.
        """

    @abstractmethod
    def mlstm(
        self, q: Tensor, k: Tensor, v: Tensor, add: Tensor, keep: Tensor, state: Tensor, rows: StateRows, *, eps: float
    ) -> Tensor:
        """The matrix memory of xLSTM (arXiv:2405.04517, section 2.3): [num_tokens, heads, value_dim], like `v`.

        With most = max(log(sigmoid(keep)) + most, add): memory = exp(log(sigmoid(keep)) + most before - most) * memory
        + exp(add - most) * (k ⊗ v'), where v' is v with a 1 appended; out = memory · q * key_dim**-0.5, whose last
        element, or exp(-most) if that is greater, divides the others after `eps` is added.

        `q` and `k` are [num_tokens, heads, key_dim], `v` is [num_tokens, heads, value_dim], `add` and `keep` are
        [num_tokens, heads], all of one dtype. `state` [num_slots, heads, key_dim + 1, value_dim + 1] is float32: the
        memory, and in the last place `most`, which begins as 0.
        """

    @abstractmethod
    def rg_lru(self, call: RgLruCall, state: Tensor, rows: StateRows) -> Tensor:
        """The real-gated linear recurrent unit (arXiv:2402.19427, section 2.4): [num_tokens, channels], like `x`.

        With a = exp(log_decay * sigmoid(decay_gate + decay_bias)): state = a * state + sqrt(1 - a²) * x *
        sigmoid(input_gate + input_bias); out = state. The factor sqrt(1 - a²) is 1 at the first token of a sequence.

        `state` is [num_slots, channels] float32.
        """

    @abstractmethod
    def gated_rms_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        *,
        gate_first: bool,
        activation: GateActivation = "silu",
    ) -> Tensor:
        """RMS norm with a factor, `activation(gate)`: `rms_norm(x * factor)` if `gate_first`, else
        `rms_norm(x) * factor`.

        `x` and `gate` are [num_tokens, groups, size], `weight` is [groups, size] or [size], all of one dtype; each
        group is normalized by itself, in float32.
        """

    @abstractmethod
    def multiply_gate(self, x: Tensor, gate: Tensor, activation: GateActivation) -> Tensor:
        """`x * activation(gate)`: dense, like `x` [num_tokens, size] otherwise.

        `gate` is [num_tokens, num_gates], of the same dtype; each gate multiplies `size / num_gates` neighbours.
        """

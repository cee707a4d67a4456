"""The kinds of output that a row of a step can have besides sampled tokens.

A plan names the kinds that its rows want (`StepPlan.outputs`), a head on the worker computes each kind
(`executor/step/heads/`), and a result holds one value of the union `RowOutput` for each. The parameters of a kind come
with the request.
"""

from enum import IntEnum

from msgspec import Struct


class OutputKind(IntEnum):
    """The outputs that a plan may ask for. Each has a head."""

    PROMPT_LOGPROBS = 0  # of the row's part of a prompt: `SamplingParams.prompt_logprobs` and the fields beside it
    HIDDEN_STATES = 1  # of the row's tokens
    POOLED = 2  # of the whole prompt; comes with the row that ends it
    ALIGNMENT = 3  # of the whole prompt with the encoder's input; comes as one vector with the row that ends it


class TokenLogprobs(Struct, array_like=True):
    """Log-probabilities at one position, or logits: see `LogprobsMode`.

    `token_ids[0]` is the token at that position, sampled or of the prompt. `nth_likeliest` is its rank by likelihood in
    the vocabulary, from 1. The likeliest tokens follow, best first; the token at the position may be among them again.
    Without `by_likelihood`, the tokens that the request named follow instead.
    """

    token_ids: list[int]
    logprobs: list[float]
    nth_likeliest: int
    by_likelihood: bool = True


class PromptLogprobs(Struct, array_like=True, tag="prompt_logprobs"):
    """Log-probabilities of the prompt's tokens from position `start` on, each given the tokens before it.

    The first token of a prompt has no log-probability, so `start` is at least 1. They are sent in parts as the prompt
    is computed, and again when a prompt is computed again.
    """

    start: int
    positions: list[TokenLogprobs]


class HiddenStates(Struct, array_like=True, tag="hidden_states"):
    """The vectors of the prompt's tokens from position `start` on: the model's last hidden states, after the final norm
    and the request's head. A request may want the vectors of some tokens only.

    They are sent in parts as the prompt is computed, and again when a prompt is computed again.
    """

    start: int
    num_tokens: int
    width: int  # elements of a vector
    values: bytes  # [number of vectors, width] float32, little-endian


class PooledVector(Struct, array_like=True, tag="pooled"):
    """One vector for the whole prompt."""

    values: bytes  # [width] float32, little-endian


class RequestFailure(Struct, array_like=True, tag="failure"):
    """Why one request failed. `kind` is "invalid" (400), "overloaded" (429), "unavailable" (503) or
    "internal" (500).

    A "dead_end" is no failure of the request: its output ends there, because the grammar cannot go on. After one that
    `may_pass`, another attempt may succeed, because the device may be at fault.
    """

    kind: str
    message: str
    retry_after_seconds: float = 0.0
    limit: str = ""  # of `SchedulerLimits`, that an overloaded engine has reached
    may_pass: bool = False


PromptOutput = PromptLogprobs | HiddenStates | PooledVector
"""A value of one of the kinds of `OutputKind`."""

RowOutput = PromptOutput | RequestFailure
"""A row's output, or the reason why it has none."""

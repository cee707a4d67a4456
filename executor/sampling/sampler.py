"""Logits to tokens: an ordered list of features, then the likeliest token or a draw."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from quire.core.config.model import LogprobsMode
from quire.core.wire.protocol import NewSlot
from quire.executor.sampling.allowed_tokens import AllowedTokens
from quire.executor.sampling.bad_words import BadWords
from quire.executor.sampling.custom import CustomFeature
from quire.executor.sampling.edge_tokens import EdgeTokens
from quire.executor.sampling.grammar.masks import DeadEnd, GrammarMasks
from quire.executor.sampling.logit_bias import LogitBias
from quire.executor.sampling.logprobs import Logprobs, StepLogprobs
from quire.executor.sampling.min_p import MinP
from quire.executor.sampling.min_tokens import MinTokens
from quire.executor.sampling.parted_sampling import ChosenRows, PartedLogprobs, sample_in_parts
from quire.executor.sampling.penalties import Penalties
from quire.executor.sampling.sampling_feature import FollowingMask, LogitsFeature, Mask, SampleBatch
from quire.executor.sampling.temperature import Temperature
from quire.executor.sampling.thinking_budget import ThinkingBudget
from quire.executor.sampling.timestamps import Timestamps
from quire.executor.sampling.top_k_top_p import TopK, TopP
from quire.executor.transfers import HostTransfers, Transfers, to_device
from quire.ops.backend import Backend
from quire.ops.random import start_of
from quire.ops.sampling import new_tokens

_NO_ROWS = np.empty(0, np.int64)


class DeviceAsks(NamedTuple):
    """What rows want of a device that samples.

    Attributes:
        parameters: more than the likeliest token; `Sampler.columns` say what it is.
        scores: log-probabilities, or logits.
    """

    parameters: bool
    scores: bool


class Sampled:
    """The tokens of one step, on the device and on their way to the host; one for each row of logits.

    Attributes:
        token_ids: [num_rows] int64, on the device; always valid ids, meaningless where not `usable`.
        usable: [num_rows] bool, on the device; false where the row's logits were NaN or infinite.
        logprobs: for the rows that asked, or None if no row did.
        slots: [num_rows] int64, on the host; -1 where the request has left its slot since.
        reasons: by row that has left its slot, the result of `Sampler.why_nothing_fits` before.
        forbidden: rows whose token a mask had forbidden; known once the tokens are known.
        without_memory: rows for which the device had none.
    """

    def __init__(
        self,
        slots: np.ndarray,
        chosen: tuple[torch.Tensor, torch.Tensor],
        logprobs: StepLogprobs | PartedLogprobs | None,
        transfers: Transfers,
    ) -> None:
        """Takes the tokens as `chosen`, and further rows of them behind, which are padding."""
        self.slots = slots
        self.token_ids, self.usable = chosen
        self._num_rows = len(slots)
        if len(self.token_ids) > len(slots):
            self.token_ids, self.usable = self.token_ids[: len(slots)], self.usable[: len(slots)]
        self.logprobs = logprobs
        self.reasons: dict[int, str | DeadEnd | None] = {}
        self.forbidden: list[int] = []
        self.without_memory: list[int] = []
        self._transfer = transfers.to_host(chosen)

    @cached_property
    def on_host(self) -> tuple[list[int], list[bool]]:
        """Returns `token_ids` and `usable`, read once. Waits for this step, and for no later one."""
        token_ids, usable = self._transfer.values()
        if len(token_ids) > self._num_rows:
            token_ids, usable = token_ids[: self._num_rows], usable[: self._num_rows]
        return token_ids.tolist(), usable.tolist()

    def release(self, slots: list[int], why_nothing_fits: Callable[[int], str | DeadEnd | None]) -> None:
        """Drops the requests in `slots`; the slots' next requests have no row in this step."""
        rows = np.flatnonzero(np.isin(self.slots, slots))
        self.reasons |= {int(row): why_nothing_fits(int(self.slots[row])) for row in rows}
        self.slots = self.slots.copy()
        self.slots[rows] = -1


class Sampler:
    """Samples one token for each row of logits. To add a sampling parameter, write its feature and put it in the list.

    A step is sampled before the host knows the tokens of the last step. Only masks that follow an output on the host
    need those tokens first. For them alone, `_settle` waits for the last step and reads it, while the device works on
    the forward pass of this one.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        ops: Backend,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        custom: Sequence[CustomFeature] = (),
        transfers: Transfers | None = None,
    ) -> None:
        """Takes `transfers`, which copy tokens to the host; None: the device is the host."""
        self._ops = ops.sampling
        self._transfers = transfers or HostTransfers()
        self._custom = custom
        self.grammar = GrammarMasks(max_num_seqs, vocab_size, eos_token_ids, ops)
        self._penalties, self._temperature = Penalties(max_num_seqs), Temperature(max_num_seqs)
        self._min_p, self._top_p = MinP(max_num_seqs, self._ops), TopP(max_num_seqs, self._ops)
        self._top_k = TopK(max_num_seqs, vocab_size, self._ops)
        self._min_tokens = MinTokens(max_num_seqs, vocab_size, eos_token_ids)
        self._features: list[LogitsFeature | Mask] = [
            LogitBias(max_num_seqs),
            AllowedTokens(max_num_seqs),
            BadWords(max_num_seqs),
            *custom,
            self._penalties,
            self._min_tokens,
            EdgeTokens(max_num_seqs, vocab_size),
            Timestamps(max_num_seqs),
            self.grammar,
            ThinkingBudget(max_num_seqs),
            self._temperature,  # this and later features: only rows that draw
            self._min_p,
            self._top_k,
            self._top_p,
        ]
        self._masking = self._bits(AllowedTokens, BadWords, MinTokens, EdgeTokens, Timestamps)
        self._following = self._bits(FollowingMask)
        self._one_way = sum(1 << place for place, feature in enumerate(self._features) if not feature.can_go_back)
        self._customs = self._bits(CustomFeature)
        self._followers = [feature for feature in self._features if isinstance(feature, FollowingMask)]
        self._unsettled: Sampled | None = (
            None  # the last step with rows that want a follower, until they have its tokens
        )
        self._launched: deque[Sampled] = deque()  # sampled and not collected
        # Per slot, bit i: may want feature i; the bits above: wants logprobs, the likeliest token, a draw.
        self._wanted = np.zeros(max_num_seqs, np.int64)
        self._asks, self._greedy, self._draws = (1 << len(self._features) + place for place in range(3))
        self._features_by_bits: dict[int, list[LogitsFeature | Mask]] = {0: []}  # bits to features
        self._logprobs = Logprobs(max_num_seqs, vocab_size, logprobs_mode, self._transfers)
        self._starts = np.zeros(max_num_seqs, np.uint64)  # starts of random streams, from seeds
        self._is_greedy = np.ones(max_num_seqs, np.int8)
        self._of_device = self._bits(Penalties, Temperature, MinP, TopK, TopP)
        self._delays = self._bits(MinTokens)
        self._of_host = (1 << len(self._features)) - 1 & ~(self._of_device | self._delays)

    def admit(self, request: NewSlot) -> None:
        """Adds the parameters of a request that enters a slot."""
        wanted = [feature.admit(request) for feature in self._features]
        bits = sum(1 << place for place, will_want in enumerate(wanted) if will_want)
        bits |= self._asks if self._logprobs.admit(request) else 0
        self._wanted[request.slot] = bits | (self._greedy if request.sampling.greedy else self._draws)
        self._is_greedy[request.slot] = request.sampling.greedy
        seed = (request.sampling.seed or 0) % 2**64  # negative seeds wrap
        self._starts[request.slot] = start_of(np.array([seed], np.uint64))[0]

    def release(self, slots: list[int]) -> None:
        """Drops the requests in these slots."""
        for sampled in self._launched:
            sampled.release(slots, self.why_nothing_fits)
        for feature in self._features:
            feature.release(slots)

    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        """Samples tokens for `logits` [num_rows, vocab_size] of any float type, which may be changed in place."""
        chosen, logprobs = self._sample_rows(logits, batch)
        return self._launch(Sampled(batch.slots, chosen, logprobs, self._transfers))

    def sample_in_parts(self, logits: torch.Tensor, batch: SampleBatch, release: Callable[[], None]) -> Sampled:
        """Samples tokens where memory does not suffice for all rows; see `parted_sampling.sample_in_parts`."""
        chosen, logprobs, failed = sample_in_parts(self._sample_rows, logits, batch, release)
        sampled = Sampled(batch.slots, chosen, logprobs, self._transfers)
        sampled.without_memory = failed
        return self._launch(sampled)

    def _launch(self, sampled: Sampled) -> Sampled:
        """Keeps what was sampled until it is collected, and for masks that follow it."""
        self._launched.append(sampled)
        if int(np.bitwise_or.reduce(self._wanted[sampled.slots])) & self._following:
            self._unsettled = sampled
        return sampled

    def _sample_rows(self, logits: torch.Tensor, batch: SampleBatch) -> ChosenRows:
        wanted = int(np.bitwise_or.reduce(self._wanted[batch.slots]))
        asked = np.flatnonzero(self._logprobs.used(batch)) if wanted & self._asks else _NO_ROWS
        if wanted & self._following:
            self._settle()
        values = None
        if len(asked) and self._logprobs.of_raw_logits:
            values = self._logprobs.values(_rows(logits, asked).float())
        for feature in self._wanted_features(wanted):
            rows = feature.used(batch).nonzero()[0]
            if len(rows):
                logits = self._apply(feature, logits, rows, batch)
        if len(asked) and values is None:
            values = self._logprobs.values(_rows(logits, asked).float())
        chosen = self._choose(logits, batch, wanted)
        logprobs = None
        if values is not None:
            logprobs = self._logprobs.of(values, batch.take(asked), asked, _rows(chosen[0], asked))
        return ChosenRows(chosen, logprobs)

    @property
    def columns(self) -> dict[str, tuple[np.ndarray, float]]:
        """The parameters that a device samples by, as `RowParameters` names them: of each slot, and of one that asks
        nothing.
        """
        penalties = self._penalties
        return {
            "starts": (self._starts.view(np.int64), 0),
            "is_greedy": (self._is_greedy, 1),
            "temperature": (self._temperature.temperature, 1),
            "log_min_p": (self._min_p.log_min_p, -np.inf),
            "top_k": (self._top_k.top_k, self._top_k.vocab_size),
            "top_p": (self._top_p.top_p, 1),
            "repetition": (penalties.repetition, 1),
            "frequency": (penalties.frequency, 0),
            "presence": (penalties.presence, 0),
        }

    @property
    def scores_are_logprobs(self) -> bool:
        """True if scores are log-probabilities, not logits."""
        return self._logprobs.are_logprobs

    def asks_of_device(self, batch: SampleBatch) -> DeviceAsks | None:
        """Returns what rows of the step want of a device; None if they want what only `sample` does."""
        wanted = int(np.bitwise_or.reduce(self._wanted[batch.slots]))
        if wanted & self._of_host or (wanted & self._delays and self._min_tokens.used(batch).any()):
            return None
        if wanted & self._asks and not self._logprobs.can_be_recorded(batch):
            return None
        return DeviceAsks(bool(wanted & (self._of_device | self._draws)), bool(wanted & self._asks))

    def take(
        self, chosen: tuple[torch.Tensor, torch.Tensor], slots: np.ndarray, scores: torch.Tensor | None = None
    ) -> Sampled:
        """Takes the tokens of a step whose rows were sampled on the device, with rows of padding behind.

        `scores` are those of `ChosenTokens`. Nothing writes the tensors until they are collected.
        """
        logprobs = None if scores is None else self._logprobs.taken(scores, slots)
        sampled = Sampled(slots, chosen, logprobs, self._transfers)
        self._launched.append(sampled)
        return sampled

    def collect(self, sampled: Sampled) -> None:
        """Waits for the oldest step that was not collected; afterwards all values in `sampled` are known."""
        assert self._launched[0] is sampled, "steps are collected in order"
        self._launched.popleft()
        if sampled is self._unsettled:
            self._settle()

    def draft(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        """Chooses drafts from another model's `logits` [num_rows, vocab_size], as `sample` would choose tokens.

        Draws have the random numbers of their positions, so that two models which nearly agree draw the same. What
        follows outputs on the host is left out. Returns ids [num_rows] int64 on the device.
        """
        wanted = int(np.bitwise_or.reduce(self._wanted[batch.slots]))
        for feature in self._wanted_features(wanted & ~self._one_way & ~self._following):
            rows = feature.used(batch).nonzero()[0]
            if len(rows):
                logits = self._apply(feature, logits, rows, batch)
        return self._choose(logits, batch, wanted)[0]

    def has_grammar(self, slot: int) -> bool:
        """Returns True if a grammar holds for the next token of the request in `slot`."""
        return self.grammar.is_active(slot)

    def forced_tokens(self, slot: int, most: int) -> list[int]:
        """Returns the tokens that a request's grammar forces after its newest, `most` at most; waits for the step."""
        self._settle()
        return self.grammar.forced(slot, most)

    def can_go_back(self, slots: np.ndarray) -> np.ndarray:
        """Returns True for requests in `slots` whose positions may be sampled again after other tokens: [num_slots]
        bool.

        A processor may bring back a token that a mask which follows the output forbids, and the host alone notices.
        """
        wanted = self._wanted[slots]
        is_unsure = (wanted & self._customs != 0) & (wanted & self._following != 0)
        return (wanted & self._one_way == 0) & ~is_unsure

    def why_unusable(self, sampled: Sampled, row: int) -> str | DeadEnd | None:
        """Explains an unusable row, by `why_nothing_fits` of its request."""
        if row in sampled.reasons:
            return sampled.reasons[row]
        return self.why_nothing_fits(int(sampled.slots[row]))

    def _settle(self) -> None:
        """Passes the last sampled tokens to masks that follow outputs, once: before the next masks or the result."""
        sampled, self._unsettled = self._unsettled, None
        if sampled is not None:
            token_ids, usable = sampled.on_host
            for follower in self._followers:
                sampled.forbidden += follower.advance(sampled.slots, token_ids, usable)

    def _bits(self, *kinds: type) -> int:
        return sum(1 << place for place, feature in enumerate(self._features) if isinstance(feature, kinds))

    def why_nothing_fits(self, slot: int) -> str | DeadEnd | None:
        """Explains why a request left itself no token: a message, or the grammar's dead end; None if the model is the
        cause.
        """
        for feature in self._custom:
            if (message := feature.why_nothing_fits(slot)) is not None:
                return message
        limits = self._wanted[slot] & (self._masking | self._bits(CustomFeature))
        if (dead_end := self.grammar.why_nothing_fits(slot, has_other_limits=bool(limits))) is not None:
            return dead_end
        if self._wanted[slot] & self._masking:
            return "No token is left to sample: allowed_token_ids, bad_words and min_tokens rule out each other."
        return None

    @staticmethod
    def _apply(
        feature: LogitsFeature | Mask, logits: torch.Tensor, rows: np.ndarray, batch: SampleBatch
    ) -> torch.Tensor:
        """Returns the logits of the step after `feature` has changed `rows`."""
        if isinstance(feature, Mask):
            feature.apply(logits, rows, batch.take(rows))
            return logits
        logits = logits.float()  # all rows, which share a type; no copy if an earlier feature did it
        if len(rows) == len(batch.slots):
            return feature.apply(logits, batch)
        logits[_index(rows, logits)] = feature.apply(_rows(logits, rows), batch.take(rows))
        return logits

    def _wanted_features(self, wanted: int) -> list[LogitsFeature | Mask]:
        """Features that some row of the step wants now or later; none in a step of plain requests."""
        bits = wanted & self._asks - 1
        if (known := self._features_by_bits.get(bits)) is None:
            known = [feature for place, feature in enumerate(self._features) if bits >> place & 1]
            self._features_by_bits[bits] = known
        return known

    def _choose(self, logits: torch.Tensor, batch: SampleBatch, wanted: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not wanted & self._draws:
            return self._ops.likeliest(logits)
        if not wanted & self._greedy:
            return self._ops.draw(logits, self._starts[batch.slots], batch.positions)
        greedy = self._wanted[batch.slots] & self._greedy != 0
        token_ids, usable = new_tokens(len(greedy), logits.device)
        rows = np.flatnonzero(greedy)
        index = _index(rows, logits)
        token_ids[index], usable[index] = self._ops.likeliest(logits[index])
        rows = np.flatnonzero(~greedy)
        index = _index(rows, logits)
        starts = self._starts[batch.slots[rows]]
        token_ids[index], usable[index] = self._ops.draw(logits[index], starts, batch.positions[rows])
        return token_ids, usable


def _index(rows: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return to_device(rows, like.device)


def _rows(tensor: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """Some rows of a tensor, by index; the tensor itself if they are all."""
    return tensor if len(rows) == tensor.shape[0] else tensor[_index(rows, tensor)]

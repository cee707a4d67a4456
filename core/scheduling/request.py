"""One request as the engine sees it: integers, no text."""

from copy import copy
from enum import Enum

from quire.core.kv.block_table import BlockTable
from quire.core.kv.paged_request import PlannedSnapshot
from quire.core.scheduling.acceptance import Acceptance
from quire.core.wire.adapters import Adapter
from quire.core.wire.encoder_input import EncodedInput
from quire.core.wire.media import media_end
from quire.core.wire.prefix_spans import PrefixSpan
from quire.core.wire.protocol import EngineRequest, FinishReason, NewSlot, RequestDelta, SequenceStart
from quire.core.wire.row_outputs import OutputKind, PromptOutput, RequestFailure

PriorityKey = tuple[int, ...]
"""A request's place under the scheduling policy: the smallest runs first, the largest is preempted first."""


class RequestStatus(Enum):
    WAITING = "waiting"  # has neither slot nor pages: new, or preempted
    LOADING = "loading"  # waits for pages that moves bring, or for its adapter, and has no pages itself
    RUNNING = "running"
    FINISHED = "finished"  # ended, failed or aborted; results still in flight for it are dropped


class Prompt:
    """A prompt, stored once for all sequences of its request.

    Attributes:
        token_ids: never changed.
        adapter: what is added to the model; None: nothing is.
        adapter_start: the first token to which it is added.
        block_hashes: chained hashes of the leading full blocks, as many as were needed so far.
        root_hash: the parent of the first block's hash; empty until it is needed.
        prefix_spans: its tokens that see each other.
        encoder: what the model's encoder reads; None: the model has none.
        media: its images and sounds.
    """

    __slots__ = (
        *(
            "adapter",
            "adapter_start",
            "block_hashes",
            "cache_salt",
            "embeds",
            "encoder",
            "media",
            "prefix_spans",
            "root_hash",
            "token_ids",
            "token_type_ids",
        ),
    )

    def __init__(self, wire: EngineRequest, prefix_spans: list[PrefixSpan]) -> None:
        self.token_ids = wire.prompt_token_ids
        self.cache_salt = wire.cache_salt
        self.adapter = wire.adapter
        self.adapter_start = wire.adapter_start
        self.embeds = wire.prompt_embeds
        self.token_type_ids = wire.token_type_ids
        self.encoder = wire.encoder
        self.media = wire.media
        self.root_hash = b""
        self.block_hashes: list[bytes] = []
        self.prefix_spans = prefix_spans


class Request:
    """Engine-side state of one sequence.

    A step gives a request some of the difference between `num_tokens` and `num_planned_tokens`. Both run ahead of
    what is known.

    - `num_planned_tokens` counts the tokens that plans have been made for. Workers execute plans in order, so these
      tokens are computed before anything that depends on them.
    - `num_tokens` counts the known tokens, the placeholders (tokens that steps in flight are sampling; the workers
      feed these to themselves), and `num_drafts` drafts that the workers hold for the positions after these.

    While a row with drafts is in flight, all tokens of its request are planned, so no plan is made for it. The row's
    result sets both counts back to the accepted tokens.
    """

    __slots__ = (
        "adapter_slot",
        "block_hashes",
        "block_tables",
        "draft_ids",
        "draft_limit",
        "draft_rest",
        "drafts",
        "encoded",
        "grammar",
        "has_loaded",
        "max_num_output_tokens",
        "max_num_tokens",
        "media_end",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_drafts",
        "num_new_tokens",
        "num_planned_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_prompt_tokens_counted",
        "num_tokens",
        "output_token_ids",
        "pages_settled_until",
        "planned_snapshots",
        "pooling",
        "prediction",
        "priority_key",
        "prompt",
        "queued_at",
        "request_id",
        "rules",
        "sampling",
        "scheduled_at",
        "slot",
        "status",
        "stop_ids",
        "tenant",
        "turn",
        "weight",
    )

    def __init__(
        self,
        wire: EngineRequest,
        start: SequenceStart,
        prompt: Prompt,
        *,
        priority_key: PriorityKey,
        max_num_tokens: int,
        stop_ids: frozenset[int],
        queued_at: float,
        turn: int = 0,
    ) -> None:
        self.request_id = start.request_id
        self.sampling = copy(wire.sampling)  # shallow: long fields are shared
        self.sampling.seed = start.seed
        if not start.scores_prompt:
            self.sampling.prompt_logprobs = self.sampling.prompt_logprob_token_ids = None
        self.grammar = wire.grammar
        self.rules = wire.rules
        self.pooling = wire.pooling  # None: tokens are sampled
        self.prediction = wire.prediction
        self.prompt = prompt
        self.priority_key = priority_key
        self.max_num_tokens = max_num_tokens  # prompt and output together
        self.stop_ids = stop_ids  # EOS ids (unless ignored) and stop_token_ids
        self.queued_at = queued_at  # seconds of the scheduler's clock
        self.turn = turn  # see `Turns`
        self.tenant = wire.tenant.name
        self.weight = wire.tenant.weight
        self.scheduled_at = 0.0  # first admission; 0 before
        self.status = RequestStatus.WAITING
        self.slot = -1  # row of the workers' tables while running
        self.adapter_slot = -1  # of its adapter in the workers, while running with one

        self.output_token_ids = start.output_token_ids.copy()  # known ones, those of an earlier engine included
        self.num_prompt_tokens = len(prompt.token_ids)
        self.media_end = media_end(prompt.media)
        self.max_num_output_tokens = max_num_tokens - self.num_prompt_tokens
        self.num_tokens = self.num_known_tokens
        self.num_planned_tokens = 0
        self.num_drafts = 0  # of `num_tokens`
        self.draft_ids: list[int] = []  # their values, and perhaps further ones, where plans contain them
        self.draft_limit = 0  # most drafts that the workers may propose after its next token
        self.drafts: Acceptance | None = None  # how often they were right; None: it gets none
        self.draft_rest = 0  # decodes to go without drafts
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache at first admission
        self.num_new_tokens = wire.num_new_tokens if start is wire.sequences[0] else 0  # the others find them
        self.num_preemptions = 0
        self.num_prompt_tokens_counted = 0  # leading ones that `count_prompt` has seen

        self.block_tables: list[BlockTable] = []  # one per KV group that has them; none while waiting
        self.encoded: EncodedInput | None = None  # its encoder input's pages; none while waiting
        self.pages_settled_until = 0  # tokens that can be planned before its block tables change
        self.block_hashes: list[bytes] = []  # chained hashes of the full blocks of known tokens, as far as needed yet
        self.num_cached_blocks = 0  # leading blocks whose content has been named in the pool
        self.planned_snapshots: list[PlannedSnapshot] = []  # of its recurrent state, not findable yet
        self.has_loaded = False  # a load from lower tiers was started for it, since it came or was preempted

    @property
    def num_known_tokens(self) -> int:
        """Tokens of prompt and output whose ids are known."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def adapter(self) -> Adapter | None:
        """What is added to the model for this request; None: nothing is."""
        return self.prompt.adapter

    def count_prompt(self, start: int, end: int) -> int:
        """The number of prompt tokens that a plan for positions `start` to `end` computes for the first time."""
        first, last = max(start, self.num_prompt_tokens_counted), min(end, self.num_prompt_tokens)
        if last <= first:
            return 0
        self.num_prompt_tokens_counted = last
        return last - first

    def known_tokens(self, start: int, end: int) -> list[int]:
        """A copy of the known token ids from position `start` up to `end`."""
        num_prompt = self.num_prompt_tokens
        tokens = self.prompt.token_ids[start:end]
        if end > num_prompt:
            tokens += self.output_token_ids[max(0, start - num_prompt) : end - num_prompt]
        return tokens

    @property
    def scores_prompt(self) -> bool:
        """True while log-probabilities of the prompt are still to be computed, which is before the first output token.

        The workers derive the same from the tokens in the plan.
        """
        return self.sampling.scores_prompt and not self.output_token_ids

    def output_of(self, start: int, end: int) -> OutputKind | None:
        """The output besides tokens of a row that computes the prompt's positions `start` to `end`, if it has any."""
        if self.pooling is None:
            has_scores = self.scores_prompt and start < self.num_prompt_tokens - 1  # the last token has no successor
            return OutputKind.PROMPT_LOGPROBS if has_scores else None
        match self.pooling.method:
            case "all":
                return OutputKind.HIDDEN_STATES
            case "mean" | "splade_max" | "splade_sum":  # is gathered over all rows
                return OutputKind.POOLED
            case "aligned":  # is gathered over all rows, and sent with the last
                return OutputKind.ALIGNMENT
            case "cls":  # is taken from the first row, and sent with the last
                return OutputKind.POOLED if not start or end == self.num_prompt_tokens else None
            case "last":
                return OutputKind.POOLED if end == self.num_prompt_tokens else None

    @property
    def skips_prefix_cache(self) -> bool:
        """True if the request computes all its tokens, even those in the prefix cache."""
        if self.sampling.skip_reading_prefix_cache:
            return True
        return self.scores_prompt if self.pooling is None else self.pooling.method != "last"

    @property
    def watches_repetition(self) -> bool:
        """True if the output ends where it repeats itself."""
        return self.sampling.repetition_detection is not None

    @property
    def num_placeholders(self) -> int:
        """Tokens that are counted but not known: those being sampled by steps in flight, and drafts."""
        return self.num_tokens - self.num_known_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Planned tokens that no result takes back; drafts in flight do not count.

        No plan will compute any position before this one again while the request runs.
        """
        return min(self.num_planned_tokens, self.num_tokens - self.num_drafts)

    def expect_drafts(self, num_drafts: int) -> None:
        """Notes that the workers now hold `num_drafts` drafts for this request instead of earlier ones.

        Drafts beyond the length limit are not counted. The last token is sampled, never computed.
        """
        num_tokens = self.num_tokens - self.num_drafts
        self.num_drafts = max(0, min(num_drafts, self.max_num_tokens - 1 - num_tokens))
        self.num_tokens = num_tokens + self.num_drafts

    def take_drafts(self, budget: int) -> int:
        """The number of tokens to compute for a request with drafts in a step with `budget` tokens left.

        They are the newest known token and its drafts; drafts that do not fit are forgotten. 0 while a step in flight
        still samples the newest token.
        """
        if self.num_planned_tokens >= self.num_known_tokens:
            return 0
        num_new = min(1 + self.num_drafts, budget)
        self.expect_drafts(num_new - 1)
        return num_new

    def settle_drafts(self) -> None:
        """Takes back the positions planned past the known tokens, once the result of a row with drafts is in."""
        self.num_tokens = self.num_known_tokens
        self.num_drafts = 0
        self.num_planned_tokens = min(self.num_planned_tokens, self.num_tokens - 1)

    def forget_drafts(self) -> None:
        """Forgets the drafts of a request that leaves its slot, as the workers do. Drafts in flight count until they
        are settled, because their row's tokens are still wanted."""
        if self.num_planned_tokens < self.num_tokens:
            self.expect_drafts(0)

    def new_slot(self) -> NewSlot:
        """The message to the workers for a request that enters its slot.

        It holds copies, because the request's own lists grow, and a worker in this process may read the plan.
        """
        return NewSlot(
            self.slot,
            self.prompt.token_ids + self.output_token_ids,
            self.num_prompt_tokens,
            [table.on_wire() for table in self.block_tables],
            self.sampling,
            self.grammar,
            self.prompt.embeds,
            pooling=self.pooling,
            adapter=self.adapter_slot,
            token_type_ids=self.prompt.token_type_ids,
            prefix_spans=self.prompt.prefix_spans,
            encoded=self.encoded,
            rules=self.rules,
            media=[item.without_arrays() for item in self.prompt.media],
            adapter_files=self.adapter,
            prediction=self.prediction,
            adapter_start=self.prompt.adapter_start,
        )

    def last_delta(
        self, reason: FinishReason, failure: RequestFailure | None = None, output: PromptOutput | None = None
    ) -> RequestDelta:
        """The delta that ends the request without a token."""
        return RequestDelta(
            self.request_id,
            [],
            reason,
            failure=failure,
            num_cached_tokens=self.num_cached_tokens,
            queued_at=self.queued_at,
            scheduled_at=self.scheduled_at,
            num_preemptions=self.num_preemptions,
            output=output,
        )

"""A worker without a model: applies plans as the real one does and checks what they would do to the KV cache.

For each position, a page holds the KV group that wrote it and the identity of the token sequence up to there, because
keys and values depend on these. Reading anything else reveals a paging bug: a page given back too early, a wrong hit
in the prefix cache, a hole in a block table. A slot holds the identity of the last computed token as the recurrent
state, which outlives its request as the memory of a real one does; a snapshot puts it in pages. Pages of the kind
"cross" hold the identity of what was encoded, from which that of the sequence starts.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from msgspec.structs import replace

from quire.core.config.resolved import SchedulerLimits
from quire.core.config.speculative import Speculation
from quire.core.kv.page_loads import LowerTiers
from quire.core.scheduling.request import Prompt, Request
from quire.core.scheduling.scheduler import Scheduler
from quire.core.wire.adapters import Adapter
from quire.core.wire.encoder_input import EncodedInput, EncoderInput
from quire.core.wire.kv_groups import KVGroupSpec
from quire.core.wire.media import MediaItem
from quire.core.wire.page_moves import PageMove
from quire.core.wire.prefix_spans import PrefixSpan, span_around
from quire.core.wire.protocol import (
    EngineRequest,
    FinishReason,
    RequestDelta,
    SequenceStart,
    StepPlan,
    StepResult,
)
from quire.core.wire.row_outputs import OutputKind, PooledVector, RequestFailure, RowOutput
from quire.core.wire.sampling_params import SamplingParams

EOS = 0
VOCAB_SIZE = 40
FULL = KVGroupSpec("full", [0], page_bytes=0)
FREE = (-1, 0)
"""The content of a position in a page before the first write."""
NAN_MESSAGE = "logits are not finite"


def window(num_tokens: int) -> KVGroupSpec:
    return KVGroupSpec("window", [0], page_bytes=0, window=num_tokens)


def recurrent(num_pages: int, interval: int) -> KVGroupSpec:
    """A group whose snapshots take `num_pages` pages each, after every `interval` tokens."""
    return KVGroupSpec("recurrent", [0], page_bytes=1, state_bytes=num_pages, interval=interval)


def cross(encoder_rows: int) -> KVGroupSpec:
    return KVGroupSpec("cross", [0], page_bytes=0, encoder_rows=encoder_rows)


def origin(encoder: EncoderInput | None) -> int:
    """Identity of an empty sequence."""
    return 1 if encoder is None else hash(tuple(encoder.token_ids))


def adapted(identity: int, digest: bytes | None) -> int:
    """Identity of an empty sequence whose tokens have an adapter."""
    return identity if digest is None else hash((identity, digest))


def extend(identity: int, token: int) -> int:
    """Identity of a sequence from that of its prefix."""
    return hash((identity, token))


def content_of(token: int, position: int, media: Sequence[MediaItem]) -> int:
    """What the model sees of a token: the row of an image, where there is one."""
    item = next((each for each in media if each.first_row(position, position + 1) is not None), None)
    return token if item is None else hash((token, item.digest))


def sample(seed: int, identity: int) -> int:
    """The next token: a function of the request's seed and sequence, so independent of the schedule."""
    return hash((seed, identity, 1)) % VOCAB_SIZE


def is_nan(seed: int, identity: int) -> bool:
    """Some sequences have broken logits; they too depend on the request alone."""
    return seed % 10 == 7 and hash((seed, identity, 2)) % 8 == 0


class FakeDrafter:
    """Proposes tokens at random, right ones and wrong ones, or none."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def propose(self, seed: int, identity: int) -> list[int]:
        """Drafts for the tokens that follow a sequence."""
        drafts = []
        for _ in range(self._rng.choice([0, 0, 1, 2, 3, 7])):
            right = sample(seed, identity)
            drafts.append(right if self._rng.random() < 0.7 else self._rng.randrange(VOCAB_SIZE))
            identity = extend(identity, drafts[-1])
        return drafts


@dataclass
class Row:
    """One slot of the table. Drafts follow the known tokens until the next sample is taken."""

    seed: int
    max_num_computed: int  # the last token that the request may have is sampled, and never computed
    token_ids: list[int]
    page_ids: list[list[int]]  # per KV group
    prefix_spans: list[PrefixSpan] = field(default_factory=list)
    is_pooled: bool = False  # it samples nothing
    encoded: EncodedInput | None = None
    media: list[MediaItem] = field(default_factory=list)
    origin: int = 1
    adapter: tuple[int, bytes | None] = (-1, None)  # its slot, and what was there at admission
    num_computed: int = -1  # unknown until its first row
    drafts: list[int] = field(default_factory=list)
    identities: list[int] = field(default_factory=list)  # per token, drafts included

    def identify(self) -> None:
        """Adds identities for new tokens; those of earlier tokens stay. Call after the tokens change."""
        for token in (self.token_ids + self.drafts)[len(self.identities) :]:
            seen = content_of(token, len(self.identities), self.media)
            self.identities.append(extend(self.identities[-1] if self.identities else self.origin, seen))

    def sample(self, num_drafts: int) -> list[int]:
        """Samples at the last known position and at the first `num_drafts` drafts, up to the first token that differs
        from the draft after it, or that cannot be chosen. The sampled tokens replace the drafts."""
        last = len(self.token_ids) - 1
        tokens: list[int] = []
        for draft, identity in zip([*self.drafts[:num_drafts], None], self.identities[last:], strict=False):
            if tokens and is_nan(self.seed, identity):
                break
            tokens.append(sample(self.seed, identity))
            if tokens[-1] != draft:
                break
        del self.identities[last + 1 :]
        self.token_ids += tokens
        self.drafts = []
        self.identify()
        return tokens


class FakeWorker:
    def __init__(
        self,
        limits: SchedulerLimits,
        num_pages: int,
        max_model_len: int,
        kv_groups: Sequence[KVGroupSpec],
        drafter: FakeDrafter | None,
    ) -> None:
        self.limits = limits
        self.max_model_len = max_model_len
        self.kv_groups = [group for group in kv_groups if group.has_block_table]
        self.recurrent = next((group for group in kv_groups if group.is_recurrent), None)
        self.states: dict[int, int] = {}  # by slot; never cleared
        self.num_restored = self.num_snapshots = 0
        self.host: dict[int, list[tuple[int, ...]]] = {}  # by page of a lower tier
        self.moved: list[int] = []  # moves that no result has reported
        self.drafter = drafter
        self.block_size = limits.block_size
        self.pages: list[list[tuple[int, ...]]] = [[FREE] * limits.block_size for _ in range(num_pages)]
        self.table: dict[int, Row] = {}
        self.adapters: dict[int, bytes] = {}  # digests, by slot
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_encoded_rows = 0
        self.rows: dict[bytes, int] = {}  # that towers made and still hold, by digest
        self.num_rows_made = 0
        self.num_tokens_of_rows: Counter[tuple[int, int]] = Counter()  # rows by (drafts, tokens that they brought)

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step_id == self.num_steps, "plans must come in order"
        self.num_steps += 1
        self.apply(plan)
        self.compare_sampled(plan)
        if plan.slots:
            self.write(plan)
            self.read(plan)
        if self.recurrent is not None:
            self.advance(plan)
        targets = [page for move in plan.moves_after for page in move.target_pages]
        assert len(set(targets)) == len(targets), "two snapshots share a page"
        for move in plan.moves_after:
            self.move(move)
        return self.sample(plan)

    def apply(self, plan: StepPlan) -> None:
        for move in plan.moves_before:
            self.move(move)
        for digest in plan.forgotten:
            del self.rows[digest]
        for item in plan.to_encode:
            assert item.digest not in self.rows, "rows are made that are held"
            assert item.arrays, "a tower has nothing to read"
            self.rows[item.digest] = item.num_rows
            self.num_rows_made += item.num_rows
        for slot in plan.released:
            del self.table[slot]
        for new in plan.admitted:
            assert new.slot not in self.table, "slot handed out before it was released"
            assert 0 <= new.slot < self.limits.max_num_seqs
            max_num_tokens = min(self.max_model_len, new.num_prompt_tokens + (new.sampling.max_tokens or 10**9))
            if new.pooling is not None:
                max_num_tokens = new.num_prompt_tokens + 1
            tables = [list(table) for table in new.page_ids]
            assert len(tables) == len(self.kv_groups)
            if new.encoded is not None and new.encoded.content is not None:
                self.encode(new.encoded.page_ids, new.encoded.content)
            row = Row(
                new.sampling.seed or 0,
                max_num_tokens - 1,
                list(new.token_ids),
                tables,
                new.prefix_spans,
                new.pooling is not None,
                encoded=new.encoded,
                media=new.media,
                origin=1 if new.encoded is None else self.pages[new.encoded.page_ids[0][0]][0][2],
                adapter=(new.adapter, self.adapters[new.adapter] if new.adapter >= 0 else None),
            )
            row.origin = adapted(row.origin, row.adapter[1])
            row.identify()
            self.table[new.slot] = row
        for slot, groups in plan.appended_pages:
            for table, pages in zip(self.table[slot].page_ids, groups, strict=True):
                table.extend(pages)

    def compare_sampled(self, plan: StepPlan) -> None:
        """Checks the tokens that a plan tells to other stages."""
        for row, tokens in plan.sampled:
            known, start = self.table[plan.slots[row]], plan.num_computed[row]
            assert tokens == (known.token_ids + known.drafts)[start : start + len(tokens)], "other tokens are told"
            assert len(tokens) == max(1, plan.num_wanted[row]), "a draft is not told, or one that is not checked"

    def encode(self, tables: list[list[int]], content: EncoderInput) -> None:
        """Writes an encoder input into its pages."""
        for group, table in enumerate(tables):
            assert len(table) == -(-content.num_rows // self.block_size)
            for number, page in enumerate(table):
                self.pages[page] = self.encoded_page(group, number, origin(content))
        self.num_encoded_rows += content.num_rows

    def encoded_page(self, group: int, number: int, identity: int) -> list[tuple[int, ...]]:
        return [(-3, group, identity, number)] * self.block_size

    def move(self, move: PageMove) -> None:
        """Makes one move; see `PageMove`."""
        match move.source, move.target:
            case "device", "state":
                self.restore(move.source_pages, *move.target_pages)
            case "state", "device":
                self.take_snapshot(*move.source_pages, move.target_pages)
            case "device", "host":
                for page, place in zip(move.source_pages, move.target_pages, strict=True):
                    self.host[place] = list(self.pages[page])
            case "host", "device":
                for place, page in zip(move.source_pages, move.target_pages, strict=True):
                    self.pages[page] = list(self.host[place])
            case _:
                raise AssertionError("these plans have no such moves")
        if move.move_id is not None:
            self.moved.append(move.move_id)

    def restore(self, pages: list[int], slot: int) -> None:
        """Puts the state that is in pages into the slot; all pages must hold parts of the same one."""
        assert self.recurrent is not None
        assert len(pages) == self.recurrent.snapshot_pages
        _, _, identity = self.pages[pages[0]][0]
        for index, page in enumerate(pages):
            assert self.pages[page] == self.part(index, identity), "a page of a snapshot holds something else"
        self.states[slot] = identity
        self.num_restored += 1

    def take_snapshot(self, slot: int, pages: list[int]) -> None:
        group = self.recurrent
        assert group is not None
        assert group.interval is not None
        assert self.table[slot].num_computed % group.interval == 0
        assert len(set(pages)) == group.snapshot_pages
        for index, page in enumerate(pages):
            self.pages[page] = self.part(index, self.states[slot])
        self.num_snapshots += 1

    def part(self, index: int, identity: int) -> list[tuple[int, ...]]:
        """What a snapshot's page with the number `index` holds."""
        return [(-2, index, identity)] * self.block_size

    def advance(self, plan: StepPlan) -> None:
        """Each row's state takes in the row's tokens."""
        for slot, start, count in zip(plan.slots, plan.num_computed, plan.num_scheduled, strict=True):
            identities = self.table[slot].identities
            assert not start or self.states[slot] == identities[start - 1], "the state is of other tokens"
            self.states[slot] = identities[start + count - 1]

    def write(self, plan: StepPlan) -> None:
        """All rows write before any reads, as every layer of the model does."""
        assert len(set(plan.slots)) == len(plan.slots), "a request is scheduled twice in a step"
        encoded = [new.encoded.content for new in plan.admitted if new.encoded is not None]
        num_encoded = sum(content.num_rows for content in encoded if content is not None)
        assert 0 < sum(plan.num_scheduled) <= self.limits.max_num_batched_tokens - num_encoded
        written = set()
        size = self.block_size
        for slot, start, count in zip(plan.slots, plan.num_computed, plan.num_scheduled, strict=True):
            row = self.table[slot]
            assert count > 0
            assert self.adapters.get(row.adapter[0]) == row.adapter[1], "a slot was given away in use"
            assert row.num_computed in (-1, start), "a position was computed twice or skipped"
            assert start + count <= len(row.identities), "a token was computed before it was known or drafted"
            assert start + count <= row.max_num_computed, "computed past the length limit"
            for item in row.media:
                is_held = item.digest in self.rows
                assert is_held or item.first_row(start, start + count) is None, "a tower's rows are missing"
            for cut in (start, start + count):
                assert span_around(row.prefix_spans, cut) is None, "a span was divided"
            for group, table in enumerate(row.page_ids):
                ahead = start + count + self.limits.num_lookahead_tokens
                assert len(table) * size >= ahead, "drafts have no place"
                for position in range(start, start + count):
                    place = table[position // size], position % size
                    assert place not in written, "two requests, or two KV groups of one, write to one place"
                    written.add(place)
                    self.pages[place[0]][place[1]] = self.content(group, row, position)
            row.num_computed = start + count
            self.num_computed_tokens += count

    def content(self, group: int, row: Row, position: int) -> tuple[int, ...]:
        """What a group keeps of a token: it depends on all tokens before it, and on spans that have begun."""
        spans = [span for span in row.prefix_spans if span[0] <= position]
        if not spans:
            return group, row.identities[position]
        return group, hash((row.identities[position], row.identities[spans[-1][1] - 1], tuple(spans)))

    def read(self, plan: StepPlan) -> None:
        """Reads every position that a computed token sees, in each group."""
        size = self.block_size
        for slot, start in zip(plan.slots, plan.num_computed, strict=True):
            row = self.table[slot]
            for group, table in enumerate([] if row.encoded is None else row.encoded.page_ids):
                for number, page in enumerate(table):
                    assert self.pages[page] == self.encoded_page(group, number, row.origin), (
                        "a page of an input is gone"
                    )
            for group, (spec, table) in enumerate(zip(self.kv_groups, row.page_ids, strict=True)):
                first = 0 if spec.window is None else max(0, start - spec.window + 1)
                first = min([first, *(begin for begin, end in row.prefix_spans if begin <= start < end)])
                expected = [self.content(group, row, position) for position in range(first, row.num_computed)]
                pages = table[first // size : -(-row.num_computed // size)]
                found = [content for page in pages for content in self.pages[page]][first % size :]
                assert found[: len(expected)] == expected, f"a page of group {group} holds something else"

    def sample(self, plan: StepPlan) -> StepResult:
        token_ids: list[list[int]] = []
        outputs: list[tuple[int, RowOutput]] = []
        drafts: list[list[int]] = []
        columns = zip(plan.slots, plan.num_scheduled, plan.num_wanted, strict=True)
        for index, (slot, num_scheduled, num_wanted) in enumerate(columns):
            row = self.table[slot]
            num_missing = len(row.token_ids) - row.num_computed
            if row.is_pooled:
                assert num_wanted == 0
                if (index, OutputKind.POOLED) in plan.outputs and not num_missing:
                    outputs.append((index, PooledVector(str(row.identities[-1]).encode())))
                continue
            assert num_wanted == max(0, 1 - num_missing), "tokens are wanted at the last known position and at drafts"
            assert num_wanted <= num_scheduled
            if not num_wanted:
                continue
            if is_nan(row.seed, row.identities[len(row.token_ids) - 1]):
                outputs.append((index, RequestFailure("internal", NAN_MESSAGE)))
            tokens = row.sample(num_wanted - 1)
            row.num_computed = len(row.token_ids) - 1
            self.num_tokens_of_rows[num_wanted - 1, len(tokens)] += 1
            if self.drafter is not None:
                row.drafts = self.drafter.propose(row.seed, row.identities[-1])
                row.identify()
            token_ids.append(tokens)
            drafts.append(list(row.drafts))
        moved, self.moved = self.moved, []
        num_drafts = list(map(len, drafts)) if any(drafts) else []
        return StepResult(plan.step_id, token_ids, [], num_drafts, outputs, moved=moved, drafts=drafts)


def alone(request: EngineRequest, max_model_len: int) -> tuple[list[int], FinishReason]:
    """The output of `request` when it runs alone, computed from the definition."""
    sampling = request.sampling
    start = start_of(request)
    identity = adapted(origin(request.encoder), None if request.adapter is None else request.adapter.digest)
    for position, token in enumerate(request.prompt_token_ids + start.output_token_ids):
        identity = extend(identity, content_of(token, position, request.media))
    tokens: list[int] = []
    num_prompt, num_before = len(request.prompt_token_ids), len(start.output_token_ids)
    stop_ids = set(sampling.stop_token_ids or []) | (set() if sampling.ignore_eos else {EOS})
    while True:
        if is_nan(start.seed, identity):
            return tokens, FinishReason.ERROR
        token = sample(start.seed, identity)
        tokens.append(token)
        identity = extend(identity, token)
        num_output = num_before + len(tokens)
        if token in stop_ids and num_output >= sampling.min_tokens:
            return tokens, FinishReason.STOP
        if num_output == sampling.max_tokens or num_prompt + num_output == max_model_len:
            return tokens, FinishReason.LENGTH
        newest = (start.output_token_ids + tokens)[-2:]
        twice = len(newest) == 2 and newest[0] == newest[1] and num_output >= sampling.min_tokens
        if sampling.repetition_detection is not None and twice:  # tests detect nothing else
            return tokens, FinishReason.REPETITION


@dataclass
class Stream:
    """The deltas that a client has received."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    last: RequestDelta | None = None

    def take(self, delta: RequestDelta) -> None:
        assert self.finish_reason is None, "a delta came after the end"
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason
        self.last = delta


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Harness:
    """Scheduler and fake worker with `depth` steps in flight, as the engine loop runs them."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        max_model_len: int = 128,
        depth: int = 1,
        check: bool = True,
        kv_groups: Sequence[KVGroupSpec] = (FULL,),
        eos_token_ids: tuple[int, ...] = (EOS,),
        drafter: FakeDrafter | None = None,
        num_stages: int = 1,
        num_token_types: int = 1,
        lower_tiers: LowerTiers | None = None,
        whole_prompts: bool = False,
        media_spans: bool = False,
        media_rows: int = 0,
        speculation: Speculation | None = None,
        **limits: Any,
    ) -> None:
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4} | limits
        self.limits = SchedulerLimits(**limits)
        self.clock = Clock()
        self.max_model_len = max_model_len
        self.scheduler = Scheduler(
            self.limits,
            num_pages=num_pages,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            kv_groups=kv_groups,
            num_stages=num_stages,
            num_token_types=num_token_types,
            clock=self.clock,
            lower_tiers=lower_tiers,
            whole_prompts=whole_prompts,
            media_spans=media_spans,
            media_rows=media_rows,
            speculation=speculation,
        )
        self.worker = FakeWorker(self.limits, num_pages, max_model_len, kv_groups, drafter)
        self.depth = depth
        self.check = check
        self.plans: list[StepPlan] = []
        self.in_flight: deque[StepResult] = deque()
        self.streams: dict[str, Stream] = {}
        self.on_result: Callable[[StepResult], StepResult] = lambda result: result

    def add(self, request_id: str, prompt: list[int] | int, **options: Any) -> None:
        """Adds a request that must be accepted; see `make_request`."""
        failure = self.offer(make_request(request_id, prompt, **options))
        assert failure is None, failure

    def offer(self, request: EngineRequest) -> RequestFailure | None:
        """Adds a request; returns why one of its sequences was refused."""
        refused = {delta.request_id: delta.failure for delta in self.scheduler.add(request)}
        accepted = [start.request_id for start in request.sequences if start.request_id not in refused]
        self.streams |= {request_id: Stream() for request_id in accepted}
        return next(iter(refused.values()), None)

    def plan(self) -> StepPlan | None:
        """Plans a step and has it executed; its result stays in flight."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append(self.on_result(self.worker.execute(plan)))
        if self.check:
            self.scheduler.check_invariants()
        return plan

    def result(self) -> list[RequestDelta]:
        """Hands the oldest result in flight to the scheduler."""
        deltas = self.scheduler.update(self.in_flight.popleft())
        for delta in deltas:
            self.streams[delta.request_id].take(delta)
        if self.check:
            self.scheduler.check_invariants()
        return deltas

    def step(self) -> list[RequestDelta]:
        """One turn of the engine loop: fill the pipeline, take one result."""
        while len(self.in_flight) < self.depth and self.plan() is not None:
            pass
        if not self.in_flight:
            assert not self.scheduler.has_unfinished(), "stuck: nothing in flight and nothing to plan"
            return []
        return self.result()

    def run(self, max_steps: int = 100_000) -> None:
        """Steps until every request has finished and every result is in."""
        while self.scheduler.has_unfinished() or self.in_flight:
            self.step()
            max_steps -= 1
            assert max_steps > 0, "it does not end"
        self.scheduler.check_invariants()
        assert self.scheduler.stats().kv_cache_usage == 0

    def abort(self, *request_ids: str) -> None:
        for delta in self.scheduler.abort(request_ids):
            self.streams[delta.request_id].take(delta)


def make_request(
    request_id: str,
    prompt: list[int] | int,
    *,
    priority: int = 0,
    cache_salt: str | None = None,
    output: list[int] | None = None,
    seed: int = 1,
    prefix_spans: list[PrefixSpan] | None = None,
    encoder: list[int] | None = None,
    media: list[MediaItem] | None = None,
    adapter: Adapter | None = None,
    **sampling: Any,
) -> EngineRequest:
    """A request of `prompt` tokens (or of that many, which no other request has)."""
    if isinstance(prompt, int):
        prompt = [hash((crc32(request_id.encode()), position)) % 10**6 + VOCAB_SIZE for position in range(prompt)]
    sampling = {"max_tokens": 4, "ignore_eos": True} | sampling
    start = SequenceStart(request_id, seed, output or [])
    num_tokens = len(prompt) + len(start.output_token_ids)
    return EngineRequest(
        [start], prompt, SamplingParams(**sampling), priority, cache_salt,
        num_new_tokens=num_tokens, prefix_spans=prefix_spans or [],
        encoder=None if encoder is None else EncoderInput(encoder), media=media or [], adapter=adapter,
    )  # fmt: skip


def start_of(request: EngineRequest) -> SequenceStart:
    """The only sequence of a request."""
    [start] = request.sequences
    return start


def resumed_after(output: list[int], request: EngineRequest) -> EngineRequest:
    """A request of one sequence, as it comes to the next engine after one that delivered `output`."""
    return replace(request, sequences=[replace(start_of(request), output_token_ids=output)])


def scheduled(
    wire: EngineRequest, *, priority: int = 0, max_num_tokens: int = 1000, stop_ids: frozenset[int] = frozenset()
) -> Request:
    """The scheduler's state of a request of one sequence, as it arrives."""
    limits: Any = {"priority_key": (priority,), "max_num_tokens": max_num_tokens, "stop_ids": stop_ids}
    return Request(wire, start_of(wire), Prompt(wire, wire.prefix_spans), queued_at=2.5, **limits)


def expect_outputs(harness: Harness, requests: list[EngineRequest]) -> None:
    """Every stream holds exactly what its request yields alone."""
    for request in requests:
        start = start_of(request)
        stream = harness.streams[start.request_id]
        tokens, reason = alone(request, harness.max_model_len)
        if stream.finish_reason is FinishReason.ABORT:
            assert stream.token_ids == tokens[: len(stream.token_ids)]
            continue
        assert (stream.token_ids, stream.finish_reason) == (tokens, reason), start.request_id

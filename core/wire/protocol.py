"""Every message that crosses a process boundary, as msgspec Structs encoded to MessagePack.

    frontend --EngineInput--> engine --StepPlan--> workers
    frontend <-EngineOutput-- engine <-StepResult- workers

Structs are `array_like`: a message is a MessagePack array, so field order is part of the wire format.
"""

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from quire.core.wire.adapters import Adapter
from quire.core.wire.encoder_input import EncodedInput, EncoderInput
from quire.core.wire.kv_groups import KVGroupSpec
from quire.core.wire.media import MediaItem, Modality
from quire.core.wire.output_rules import OutputRules
from quire.core.wire.page_moves import PageMove
from quire.core.wire.pooling import Pooling
from quire.core.wire.prefix_spans import PrefixSpan
from quire.core.wire.rank import Rank
from quire.core.wire.row_outputs import OutputKind, PromptOutput, RequestFailure, RowOutput, TokenLogprobs
from quire.core.wire.sampling_params import SamplingParams

# --------------------------------------------------------------------------------------------- frontend -> engine


class Vocabulary(Struct, array_like=True, frozen=True):
    """The bytes that each token spells, for the matchers of grammars."""

    tokens: list[bytes]  # by token id, as long as the model's logits; empty for tokens that no text contains
    end_token_ids: list[int]  # allowed where a grammar is complete, and nowhere else


class Grammar(Struct, array_like=True, frozen=True):
    """A constraint on a request's output, compiled for one backend. Equal keys mean equal grammars.

    A receiver keeps a grammar under its key while it is in use; meanwhile the grammar is sent with empty `data`.
    """

    backend: str
    key: bytes
    data: bytes  # in the backend's own form, compressed
    vocabulary_path: str  # a file of the frontend's host that holds a `Vocabulary`, for as long as the frontend lives


KVGroups = list[KVGroupSpec]
"""A model's KV groups; an encoder has none. A message that lists pages per KV group has those with block tables, in
this order."""

ROW_DIGEST_BYTES = 32


EmbedsType = Literal["bfloat16", "float16", "float32"]


class PromptEmbeds(Struct, array_like=True, frozen=True):
    """Rows that replace the embeddings of a prompt's first tokens, or of all; the ids of these mean nothing."""

    dtype: EmbedsType
    rows: bytes  # [num_tokens, hidden], little-endian
    row_digests: bytes  # [num_tokens, ROW_DIGEST_BYTES]; represent the rows in the hashes of blocks

    @property
    def num_rows(self) -> int:
        """The tokens whose embeddings they replace."""
        return len(self.row_digests) // ROW_DIGEST_BYTES


class SequenceStart(Struct, array_like=True, frozen=True):
    """The fields of one sequence of a request that its other sequences do not share."""

    request_id: str  # of this sequence alone
    seed: int
    output_token_ids: list[int] = []  # delivered by an earlier engine: the sequence resumes after them
    scores_prompt: bool = True  # whether this sequence returns `sampling.prompt_logprobs`, which are the same for all


class Tenant(Struct, array_like=True, frozen=True):
    """The share of an engine that a request belongs to: that of an API key, or the only one."""

    name: str = ""
    weight: float = 1.0  # above 0; the engine is divided between tenants by their weights


class EngineRequest(Struct, array_like=True, tag="add", frozen=True):
    """Sequences to generate from one prompt: `n > 1` makes n of them. Fields that they share are sent once.

    A grammar's data is sent to an engine once too, with the first request that is held to it: see `Grammar`.
    """

    sequences: list[SequenceStart]
    prompt_token_ids: list[int]
    sampling: SamplingParams  # resolved: max_tokens is set, n is 1; `SequenceStart` has the seed
    priority: int = 0
    cache_salt: str | None = None
    grammar: Grammar | None = None
    prompt_embeds: PromptEmbeds | None = None
    num_new_tokens: int = 0  # that the engine will have to compute before it samples, as the sender expects
    pooling: Pooling | None = None  # hidden states are the output: no token is sampled, and `sampling` has no effect
    token_type_ids: list[int] | None = None  # the segment of each token of the prompt; None: all are of the first
    prefix_spans: list[PrefixSpan] = []  # of the prompt
    encoder: EncoderInput | None = None  # what the encoder reads; the prompt and the output are the decoder's
    rules: OutputRules | None = None  # of the checkpoint
    tenant: Tenant = Tenant()
    is_accepted: bool = False  # by an earlier engine: no queue is too full for it
    media: list[MediaItem] = []  # of the prompt, in the order of their tokens
    adapter: Adapter | None = None  # added to the model; None: the model alone
    prediction: list[int] = []  # tokens of the output that the client expects; they are tried as drafts
    adapter_start: int = 0  # the first token of the prompt to which the adapter is added


class LentFile(Struct, array_like=True, tag="file", frozen=True):
    """A file of the frontend's host, for an engine on another host. Sent before the first request that names it."""

    path: str  # as requests name it
    data: bytes


class DropGrammars(Struct, array_like=True, tag="drop_grammars", frozen=True):
    """The engine may forget these grammars: later requests that use one bring its data again."""

    keys: list[bytes]


class AbortRequests(Struct, array_like=True, tag="abort", frozen=True):
    """The client is gone, a stop string was found, or a deadline passed: free everything now."""

    request_ids: list[str]


class AbortReplies(Struct, array_like=True, tag="abort_replies", frozen=True):
    """Ends all requests of some replies, of any frontend. Each frontend gets the deltas of its own requests."""

    reply_ids: list[str]
    tenant: str = ""  # whose requests these are; those of others go on


class ResetPrefixCache(Struct, array_like=True, tag="reset_prefix_cache", frozen=True):
    """Forget every cached page that no request uses; answered with `PrefixCacheReset`."""

    preempt_running: bool = False  # running requests give up their pages first, and are computed again


class Hello(Struct, array_like=True, tag="hello", frozen=True):
    """First message of a frontend; the engine answers with `EngineReady` once the model is loaded."""


class Shutdown(Struct, array_like=True, tag="shutdown", frozen=True):
    """Stop: unfinished requests are dropped, the workers end, the process exits 0."""


class Profile(Struct, array_like=True, tag="profile", frozen=True):
    """Starts a recording of the engine's timeline, or ends it; answered with `Profiled`."""

    active: bool


class CallWorkers(Struct, array_like=True, tag="call_workers", frozen=True):
    """Runs a `WorkerCall` on every worker between two steps; answered with `WorkersAnswered`."""

    call_id: int  # of this frontend
    name: str
    payload: bytes = b""


class PrepareAdapter(Struct, array_like=True, tag="prepare_adapter", frozen=True):
    """Reads an adapter into the memory of the engine's hosts, and checks that it fits the model; answered with
    `WorkersAnswered`."""

    call_id: int  # of this frontend
    adapter: Adapter


EngineInput = (
    EngineRequest
    | LentFile
    | DropGrammars
    | AbortRequests
    | AbortReplies
    | ResetPrefixCache
    | Hello
    | Shutdown
    | Profile
    | CallWorkers
    | PrepareAdapter
)

# --------------------------------------------------------------------------------------------- engine -> frontend


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    ABORT = "abort"
    ERROR = "error"


class RequestDelta(Struct, array_like=True, gc=False):
    """The result of one step for one sequence.

    One is made per token, and none is ever part of a cycle, so the garbage collector does not track them.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop_token_ids entry that ended it; None for EOS and all other ends
    logprobs: list[TokenLogprobs] | None = None  # one per entry of token_ids, when asked for
    failure: RequestFailure | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    queued_at: float = 0.0  # CLOCK_MONOTONIC seconds of the engine's host; see `EngineClock`
    scheduled_at: float = 0.0
    num_preemptions: int = 0
    output: PromptOutput | None = None  # such a delta holds no tokens


class SchedulerStats(Struct, array_like=True):
    """Current gauges, and totals since the engine's start.

    Every frontend gets the same figures, independent of when it connected. It takes differences between messages of one
    engine. A sum over frontends must take these figures from one of them.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # share of pages in use, 0 to 1
    started_at: float = 0.0  # CLOCK_MONOTONIC seconds; identifies the engine of the totals
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    num_preemptions: int = 0
    num_steps: int = 0  # whose results are back, and brought tokens
    num_prompt_tokens: int = 0  # computed for the first time, chunk by chunk: not cached, and not after a preemption
    num_prefilled_tokens: int = 0  # of those, the ones of prompts that are complete: they enter with the first token
    num_generated_tokens: int = 0  # sampled for requests that were unfinished
    expert_balancedness: float | None = (
        None  # mean load of ranks over the busiest's in the last window that EPLB counted
    )
    num_pending_tokens: int = 0  # of prompts, that no plan computes yet; of waiting ones, as the senders expected
    running_adapters: list[str] = []  # names, of running requests
    waiting_adapters: list[str] = []
    num_drafts: int = 0  # rows that checked any
    num_draft_tokens: int = 0  # that they checked
    num_accepted_by_position: list[int] = []  # of these, the right ones, by their place after the newest token


class StepOutputs(Struct, array_like=True, tag="outputs"):
    """Everything that one step produced for one frontend."""

    deltas: list[RequestDelta]
    stats: SchedulerStats
    timestamp: float  # CLOCK_MONOTONIC seconds of the engine's host at which this was sent


class EngineReady(Struct, array_like=True, tag="ready"):
    """The model is loaded, and the engine has this capacity. Bytes are sums over all ranks, except a group's page."""

    num_pages: int  # pages of the pool, which all KV groups share
    block_size: int
    max_model_len: int
    weights_bytes: int
    kv_cache_bytes: int
    device_name: str
    kv_groups: KVGroups
    caches_prefixes: bool  # what one request has computed, another finds
    whole_prompts: bool = False  # a prompt is one prefix span: all its tokens see each other
    reads: list[Modality] = []  # what prompts may hold besides text
    media_spans: bool = False  # the tokens of an image see each other
    media_rows: int = 0  # that workers have room for, of images and sounds


FailureCause = Literal["setting", "memory", "peer", "host", "killed", "other"]
"""Why an engine or a worker has failed. "setting": it or the checkpoint; a restart would fail the same way.
"memory": there is too little of it now. "peer": it cannot go on without another engine or worker, which has ended.
"host": a host is gone. "killed": somebody outside has ended or stopped one of its processes."""


class EngineFailed(Struct, array_like=True, tag="failed"):
    """The engine cannot start or go on."""

    message: str
    cause: FailureCause
    needs_time: bool = False  # before it is killed: it still writes stacks, or tells other hosts


class Heartbeat(Struct, array_like=True, tag="heartbeat"):
    """Sent about once a second while no other message is."""

    stats: SchedulerStats
    waits_for: str | None = None  # what is missing before the engine can start, such as a node


class Profiled(Struct, array_like=True, tag="profiled"):
    """`Profile` was done."""

    path: str | None = None  # the timeline's file, at the end of a recording
    error: str | None = None  # why there is none


class WorkersAnswered(Struct, array_like=True, tag="workers_answered"):
    """The workers' answers to `CallWorkers`, by rank; empty after an error.

    For `PrepareAdapter`, the `RequestFailure` of an adapter that cannot be used, or nothing.
    """

    call_id: int
    results: list[bytes]
    error: str | None = None


class PrefixCacheReset(Struct, array_like=True, tag="prefix_cache_reset"):
    """`ResetPrefixCache` was done."""

    is_empty: bool  # no page is findable any more; else running requests hold some


EngineOutput = StepOutputs | EngineReady | EngineFailed | Heartbeat | Profiled | PrefixCacheReset | WorkersAnswered

# --------------------------------------------------------------------------------------------- engine <-> workers


class NewSlot(Struct, array_like=True):
    """A request enters the workers' slot table, for the first time or again after a preemption."""

    slot: int
    token_ids: list[int]  # all known tokens: the prompt, then output tokens sampled before
    num_prompt_tokens: int
    page_ids: list[list[int]]  # per KV group, pages of the first blocks, prefix-cache hits included; see `NO_PAGE`
    sampling: SamplingParams
    grammar: Grammar | None = None
    prompt_embeds: PromptEmbeds | None = None
    pooling: Pooling | None = None
    adapter: int = -1  # the slot of the workers' adapter for the request's tokens; -1: none
    token_type_ids: list[int] | None = None  # of the prompt
    prefix_spans: list[PrefixSpan] = []  # of the prompt; a step computes all of a span, or nothing
    encoded: EncodedInput | None = None  # the encoder input's keys and values; None: the model has no encoder
    rules: OutputRules | None = None
    media: list[MediaItem] = []  # of the prompt, without arrays: see `StepPlan.to_encode`
    adapter_files: Adapter | None = None  # what that slot of the workers has; they need no more than the number
    prediction: list[int] = []  # of the output, see `EngineRequest`
    adapter_start: int = 0  # the first token that has the adapter


class StepPlan(Struct, array_like=True, tag="step"):
    """One step for all workers: columns of equal length, one entry per scheduled row.

    A worker makes the moves of `moves_before`, in order. Then it applies `released`, `admitted` and `appended_pages`,
    encodes what the admitted requests bring (`EncodedInput.content`), drops the rows of `forgotten`, makes those of
    `to_encode`, runs the plan's rows, and makes the moves of `moves_after`. A plan may have moves alone, or not even
    those: it then asks for a result as soon as a slow move is done. Row i computes positions
    `num_computed[i] .. num_computed[i] + num_scheduled[i] - 1` of the request in slot `slots[i]`. A row that computes
    position 0 begins with an empty recurrent state.

    Moves read their pages before the plan's rows write to any: a plan may save a page and give it away. The state of a
    request that continues from a snapshot comes by a move to its slot, and snapshots of states are taken by
    `moves_after`.

    `num_wanted[i]` is the number of these positions, counted from the last, at which the row wants logits. 0: none, the
    row is a part of a prompt. 1: the row samples the next token. 1 + d: the row's last d positions hold the first d
    drafts that the worker has for this request; the row samples a token at each of its last 1 + d positions, up to the
    first that differs from the draft after it.

    `draft_limits` has, for each row that samples, the most drafts that the worker may then propose for its request. It
    is empty if none may have any. None: as many as there are.

    `outputs` names what rows want besides tokens. A row that samples may be among them.

    The worker also writes sampled tokens into its own table, because a later plan may refer to them before their values
    have come back. With several pipeline stages, the last one samples and proposes drafts. So a plan for a sampled
    token contains its value and those of the drafts after it in `sampled`, and is made when these are known.
    """

    step_id: int
    released: list[int]
    admitted: list[NewSlot]
    slots: list[int]
    num_computed: list[int]
    num_scheduled: list[int]
    num_wanted: list[int]
    appended_pages: list[tuple[int, list[list[int]]]]  # (slot, new pages per KV group)
    moves_before: list[PageMove] = []
    moves_after: list[PageMove] = []
    sampled: list[tuple[int, list[int]]] = []  # (row, its tokens), which another stage has sampled, or proposed
    outputs: list[tuple[int, OutputKind]] = []  # (row, kind)
    to_encode: list[MediaItem] = []  # whose rows the towers make, for this plan and later ones
    forgotten: list[bytes] = []  # digests of items whose rows no plan needs before they are made again
    draft_limits: list[int] | None = None  # see above


class StepResult(Struct, array_like=True, tag="result"):
    """The workers' result for one plan: a list of tokens for each row that wants any, in row order.

    A row with `num_wanted` 1 + d brings 1 to 1 + d tokens: the drafts that were accepted, and one more. `logprobs` has
    an entry (index into token_ids, values of each of the row's tokens) for each such row whose request asked.

    `num_drafts` has, for each entry of `token_ids`, the number of drafts that the worker now has for the tokens after
    these; it is empty when no row has drafts. `drafts` has these drafts with several pipeline stages, and else nothing.

    `outputs` has (row, value) for what rows of the plan computed besides tokens, and for what went wrong with them. A
    `RequestFailure` is "internal" if the first logits of a row are unusable (NaN), and "invalid" if the request itself
    left no token to choose from: only those requests fail. It is a "dead_end" if a grammar left none: the request's
    output ends. Tokens of such rows are dropped. A row whose later logits are unusable brings the tokens before, and
    fails in its request's next step.

    `spans` are the step's own times, when timelines are recorded (see `quire.core.trace`). `expert_balancedness` is as
    in `SchedulerStats`.

    `moved` has the ids of moves that are done, of this step or of earlier ones.
    """

    step_id: int
    token_ids: list[list[int]]
    logprobs: list[tuple[int, list[TokenLogprobs]]] = []
    num_drafts: list[int] = []
    outputs: list[tuple[int, RowOutput]] = []
    spans: list[tuple[str, float, float]] = []
    expert_balancedness: float | None = None
    moved: list[int] = []
    drafts: list[list[int]] = []


class LoadModel(Struct, array_like=True, tag="load", frozen=True):
    """The first message to a worker, which has imported everything by then: it joins the others, and loads its part."""


class AllocateCache(Struct, array_like=True, tag="allocate", frozen=True):
    """The pages and the length that every rank now sets up. Sent once all ranks have reported their capacity."""

    num_pages: int
    max_model_len: int


class WorkerCall(Struct, array_like=True, tag="call", frozen=True):
    """Something that every worker does once the steps before are done, such as running a function on the model.

    A worker knows a fixed set of names; see `quire.executor.worker.Worker.call`.
    """

    call_id: int
    name: str
    payload: bytes  # in the form that the name implies


class FileCopy(Struct, array_like=True, tag="file_copy", frozen=True):
    """A file of another host, which plans name by its path there, has a copy on this host."""

    path: str
    copy: str  # path on this host


WorkerInput = LoadModel | AllocateCache | StepPlan | WorkerCall | FileCopy

START_PROFILE = "start_profile"
"""A `WorkerCall` whose payload is a `StartProfile`."""
STOP_PROFILE = "stop_profile"
"""A `WorkerCall` without payload; the answer is the path of the file, in UTF-8."""


class StartProfile(Struct, array_like=True, frozen=True):
    """One recording of torch's profiler. None takes the value of `ProfilerConfig`."""

    prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")] | None = None  # of the file's name
    delay_iterations: Annotated[int, Meta(ge=0)] | None = None
    max_iterations: Annotated[int, Meta(ge=0)] | None = None


class WorkerReady(Struct, array_like=True, tag="ready"):
    """One rank has loaded its weights and planned its memory. Sent again once its cache is allocated."""

    rank: Rank
    num_pages: int
    max_model_len: int
    weights_bytes: int
    kv_cache_bytes: int
    device_name: str
    kv_groups: KVGroups
    whole_prompts: bool = False  # as in `EngineReady`
    reads: list[Modality] = []  # as in `EngineReady`
    media_spans: bool = False
    media_rows: int = 0


class WorkerFailed(Struct, array_like=True, tag="failed"):
    """One rank cannot start or go on."""

    rank: Rank
    message: str
    cause: FailureCause


class WorkerAnswer(Struct, array_like=True, tag="answer"):
    """One rank has done what a `WorkerCall` says, or failed at it, which harms no later step."""

    call_id: int
    rank: Rank
    result: bytes = b""
    error: str | None = None


WorkerOutput = WorkerReady | WorkerFailed | StepResult | WorkerAnswer


def encoder() -> msgspec.msgpack.Encoder:
    """A fresh encoder: each owner keeps one, because an encoder must not be shared between threads."""
    return msgspec.msgpack.Encoder()

"""The memory plan: the number of KV-cache pages that fit beside the weights. Pure arithmetic, except for device
queries.

budget = device memory * its share - weights - workspace - states unless the options name the bytes or pages
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from quire.core import envs
from quire.core.config.cache import CacheConfig
from quire.core.config.resolved import EngineConfig, ModelSpec, SchedulerLimits
from quire.core.errors import ModelLoadError, NoMemoryError
from quire.core.ram import available_ram
from quire.core.wire.kv_groups import KVGroupSpec
from quire.executor.models.base import MediaSupport, Model, ReadsMedia
from quire.executor.recordings import largest_step, num_recordings, rules_for
from quire.ops.recording import RecordingRules

GIB = 2**30
DEFAULT_CPU_CACHE_BYTES = 4 * GIB
"""The KV cache's bytes on a CPU without an option: the RAM is shared with everything else on the machine."""
MEDIA_BYTES = GIB // 4
"""What rows of images and sounds take that workers keep for requests with the same ones: of about 50 large images."""


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that one worker needs: `page_bytes` for a page of the pool, `state_bytes` for each sequence beside it.

    The workspace is that of the largest step, and of CUDA graphs.
    """

    weights_bytes: int
    workspace_bytes: int
    page_bytes: int
    state_bytes: int = 0


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one worker's device: the total, and the bytes that were free before the model was loaded."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class RequestPages:
    """The pages of the pool that one request takes, in all KV groups together.

    Attributes:
        largest_chunk: the most tokens of a request that one step computes.
        num_lookahead_tokens: places past its tokens that a request holds.
    """

    groups: Sequence[KVGroupSpec]
    block_size: int
    largest_chunk: int
    num_lookahead_tokens: int = 0

    def needed(self, num_tokens: int) -> int:
        """Counts the most pages that a request of `num_tokens` holds at once."""
        ahead = self.num_lookahead_tokens
        return sum(
            group.max_pages(num_tokens + ahead, block_size=self.block_size, largest_chunk=self.largest_chunk + ahead)
            for group in self.groups
        )

    def useful(self, num_tokens: int) -> int:
        """Counts the pages that a request of `num_tokens` can use: with all its snapshots, if there are any."""
        snapshots = [group.snapshot_pages * (num_tokens // group.interval) for group in self.groups if group.interval]
        return self.needed(num_tokens) + sum(snapshots)

    def longest(self, num_pages: int, limit: int) -> int:
        """Returns the tokens of the longest request that fits into `num_pages` pages; at most `limit`."""
        return max(0, bisect_right(range(limit + 1), num_pages, key=self.needed) - 1)


@dataclass(frozen=True)
class CachePlan:
    """The pages that the memory plan grants, enough for one request of `max_model_len` tokens."""

    num_pages: int
    max_model_len: int


def plan_cache(
    cache: CacheConfig,
    needs: MemoryNeeds,
    memory: DeviceMemory,
    *,
    device: str,
    pages: RequestPages,
    max_num_seqs: int,
    max_model_len: int,
    fit_max_model_len: bool,
) -> CachePlan:
    """Divides the device's memory.

    The KV cache gets the device's share less weights and workspace. On a CPU without an explicit share, it gets 4 GiB,
    or more if one request of full length needs it, but at most what `max_num_seqs` requests of full length can use. A
    model without keys and values has pages only for snapshots, or none.

    Raises:
        NoMemoryError: the states of `max_num_seqs` sequences do not fit, or no request of `max_model_len` tokens does.
            The message says how much is missing and what would help.
    """
    states_bytes = max_num_seqs * needs.state_bytes
    room = _usable(cache, memory) - needs.weights_bytes - needs.workspace_bytes
    if states_bytes > max(0, room):
        raise NoMemoryError(_too_many_states(states_bytes, max_num_seqs, needs, room))
    if cache.num_gpu_blocks_override is not None:
        num_pages = cache.num_gpu_blocks_override
        if num_pages < pages.needed(1):
            raise ModelLoadError(
                f"--num-gpu-blocks-override {num_pages} is too few: the shortest request takes {pages.needed(1)} "
                "pages, one of each KV group."
            )
        return CachePlan(num_pages, pages.longest(num_pages, max_model_len) if fit_max_model_len else max_model_len)
    full_request = pages.needed(max_model_len) * needs.page_bytes
    most = memory.free_bytes - needs.weights_bytes - needs.workspace_bytes - states_bytes
    asked = _asked_bytes(cache, device)
    if asked is not None:
        if asked > most:
            raise NoMemoryError(_too_much_asked(asked, most, needs, memory))
        budget = asked
    else:
        budget = room - states_bytes
        if device == "cpu" or not full_request:
            budget = min(budget, max_num_seqs * pages.useful(max_model_len) * needs.page_bytes)
        if device == "cpu" and cache.gpu_memory_utilization is None:
            budget = min(budget, max(DEFAULT_CPU_CACHE_BYTES, 0 if fit_max_model_len else full_request))
    num_pages = max(0, budget) // needs.page_bytes
    fitting = pages.longest(num_pages, max_model_len)
    if fitting < (1 if fit_max_model_len else max_model_len):
        raise NoMemoryError(_too_little(cache, needs, memory, budget, most, full_request, fitting, max_model_len))
    return CachePlan(num_pages, fitting)


def check_weights(weights_bytes: int, memory: DeviceMemory, name: str) -> None:
    """Checks the size of the weights before loading, because a process that runs out of memory is killed silently.

    Raises:
        NoMemoryError: the weights alone exceed the free memory.
    """
    missing = weights_bytes - memory.free_bytes
    if missing > 0:
        raise NoMemoryError(
            f"The weights of {name} need {describe(weights_bytes)} per worker and {describe(memory.free_bytes)} are "
            f"free: {missing} bytes are missing. Free memory, raise --tensor-parallel-size on more devices, choose a "
            f"16-bit --dtype if it is float32, or serve a smaller model."
        )


def workspace_bytes(
    spec: ModelSpec,
    model: Model,
    limits: SchedulerLimits,
    scratch_bytes: int,
    *,
    checks_drafts: bool = False,
    counts_towers: bool = True,
) -> int:
    """Counts the bytes of activations in the largest step of one rank's `model`. One that `checks_drafts` has rows of
    logits for these.

    They are a layer's intermediates apart from the residual stream, including rows that initialize sequences; the
    scratch memory of the backend's attention (`Backend.scratch_bytes`); and four float32 tensors of the logits' shape:
    logits, raw log-probabilities, probabilities, and a temporary of the sampler. A tower computes before that, and its
    activations count unless not `counts_towers`.
    """
    per_token = (4 * spec.hidden_size + model.activation_size) * dtype_bytes(spec.dtype)
    rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    num_first_rows = max((state.num_first_rows for state in model.state_layers), default=0)
    num_tokens = limits.max_num_batched_tokens + rows * num_first_rows
    rows = limits.most_draft_rows if checks_drafts else rows
    media = media_bytes(spec, model, limits)
    activations = max(num_tokens * per_token, media.encoding if counts_towers else 0)
    return activations + media.rows + scratch_bytes + 4 * rows * spec.vocab_size * 4


class MediaBytes(NamedTuple):
    """Memory for images and sounds: of the tower, while it makes the rows of a step, and of the rows that are kept."""

    encoding: int = 0
    rows: int = 0


def media_bytes(spec: ModelSpec, model: Model, limits: SchedulerLimits) -> MediaBytes:
    """Counts the memory of a tower that makes as many rows as a step has tokens, and of `num_media_rows`. An item with
    more rows needs more.
    """
    support = model.media if isinstance(model, ReadsMedia) else None
    if support is None:
        return MediaBytes()
    encoding = limits.max_num_batched_tokens * support.activation_size * dtype_bytes(spec.dtype)
    return MediaBytes(encoding, num_media_rows(spec, model, limits) * _media_row_bytes(spec, support))


def num_media_rows(spec: ModelSpec, model: Model, limits: SchedulerLimits) -> int:
    """Returns how many rows of images and sounds a worker keeps; 0 for a model that reads text alone."""
    support = model.media if isinstance(model, ReadsMedia) else None
    if support is None:
        return 0
    return max(limits.max_num_batched_tokens, MEDIA_BYTES // _media_row_bytes(spec, support))


def _media_row_bytes(spec: ModelSpec, support: MediaSupport) -> int:
    return (1 + support.num_deep) * spec.hidden_size * dtype_bytes(spec.dtype)


def graph_bytes(spec: ModelSpec, model: Model, config: EngineConfig, rules: RecordingRules) -> int:
    """Counts the bytes of CUDA graphs of one rank's `model`: the memory that all share, and that of each.

    All share the activations and the logits of the largest step, which its sampler writes once more, as float32. A
    backend without padded steps has no graphs, only lists of launches.
    """
    limits = config.limits
    is_recorded = config.layout.num_workers == 1 and config.graphs.is_enabled and not config.enforce_eager
    if not rules.row_counts or not is_recorded:
        return 0
    rules = rules_for(rules, config.graphs)
    checks_drafts = config.speculation is not None
    rows, size = largest_step(rules, limits.max_num_seqs, checks_drafts=checks_drafts), dtype_bytes(spec.dtype)
    step = rows * ((4 * spec.hidden_size + model.activation_size) * size + spec.vocab_size * (size + 4))
    number = num_recordings(rules, limits.max_num_seqs, config.max_model_len, checks_drafts=checks_drafts)
    return step + rules.shared_bytes + number * rules.each_bytes


def longest_row_bytes(spec: ModelSpec, model: Model, max_model_len: int) -> int:
    """Counts the bytes of the keys and values of one full-length request in one layer, in the model's dtype."""
    kv_size = max((layer.size for layer in model.kv_layers), default=0)
    num_rows = max(max_model_len, 0 if spec.encoder is None else spec.encoder.max_rows)
    return num_rows * kv_size * dtype_bytes(spec.dtype)


def dtype_bytes(dtype: str) -> int:
    """Returns the bytes of one element."""
    return 4 if dtype == "float32" else 2


def device_memory(device: torch.device, num_ranks: int, *, reserved_bytes: int = 0) -> DeviceMemory:
    """Returns the memory that this worker may use now. Ranks on a CPU share its RAM, but for `reserved_bytes`."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total, free)
    free = max(0, available_ram() - reserved_bytes) // num_ranks
    return DeviceMemory(free, free)


def still_free(before: DeviceMemory, weights_bytes: int, device: torch.device) -> DeviceMemory:
    """Returns what was free `before` the load of the weights, less what other processes have taken of it since."""
    if device.type != "cuda":
        return before
    torch.cuda.empty_cache()
    now, _ = torch.cuda.mem_get_info(device)
    return replace(before, free_bytes=min(before.free_bytes, now + weights_bytes))


def _asked_bytes(cache: CacheConfig, device: str) -> int | None:
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    gibibytes = envs.read_float("CPU_KVCACHE_SPACE")
    return int(gibibytes * GIB) if device == "cpu" and gibibytes > 0 else None


def _usable(cache: CacheConfig, memory: DeviceMemory) -> int:
    return min(memory.free_bytes, int(memory.total_bytes * cache.memory_share))


def _too_many_states(states_bytes: int, max_num_seqs: int, needs: MemoryNeeds, room: int) -> str:
    fitting = max(0, room) // needs.state_bytes
    remedy = f"--max-num-seqs {fitting}" if fitting else "a smaller model, or --tensor-parallel-size on more devices"
    return (
        f"The recurrent layers' states of {max_num_seqs} sequences need {describe(states_bytes)}, "
        f"{describe(needs.state_bytes)} each, and {describe(max(0, room))} are left after weights "
        f"({describe(needs.weights_bytes)}) and workspace ({describe(needs.workspace_bytes)}). Use {remedy}."
    )


def _too_much_asked(asked: int, most: int, needs: MemoryNeeds, memory: DeviceMemory) -> str:
    return (
        f"A KV cache of {describe(asked)} was asked for, but {describe(memory.free_bytes)} are free and weights "
        f"({describe(needs.weights_bytes)}) and workspace ({describe(needs.workspace_bytes)}) come first: "
        f"{asked - most} bytes are missing. Use --kv-cache-memory-bytes {max(needs.page_bytes, most)} or less."
    )


def _too_little(
    cache: CacheConfig,
    needs: MemoryNeeds,
    memory: DeviceMemory,
    budget: int,
    most: int,
    wanted: int,
    fitting: int,
    max_model_len: int,
) -> str:
    """Explains that of `wanted` bytes for a request of `max_model_len` tokens, `budget` exist, and `fitting` tokens
    fit.
    """
    remedies = []
    if fitting:
        remedies.append(f"--max-model-len {fitting} (or auto)")
    if wanted <= most:
        remedies.append(f"--kv-cache-memory-bytes {wanted}")
        share = (wanted + needs.weights_bytes + needs.workspace_bytes) / memory.total_bytes
        # Rounded up to four places; a remedy only if the share is the limit.
        share = -(-share * 10_000 // 1) / 10_000
        if cache.memory_share < share <= 1 and cache.kv_cache_memory_bytes is None:
            remedies.append(f"--gpu-memory-utilization {share:.4f}")
    if not remedies:
        remedies = ["a smaller model, a smaller --max-num-batched-tokens, or --tensor-parallel-size on more devices"]
    return (
        f"One request of {max_model_len} tokens needs {describe(wanted)} of KV cache and {describe(max(0, budget))} "
        f"are left after weights ({describe(needs.weights_bytes)}) and workspace ({describe(needs.workspace_bytes)}) "
        f"on a device with {describe(memory.free_bytes)} free: {wanted - max(0, budget)} bytes are missing. "
        f"Any of these makes it fit: {', '.join(remedies)}."
    )


def describe(num_bytes: int) -> str:
    """Formats bytes, such as `1.50 GiB`."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / 2**20:.1f} MiB"

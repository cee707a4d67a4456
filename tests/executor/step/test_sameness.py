"""Whatever a model's layers keep of a sequence: company, chunks, preemption and prefixes do not show in its tokens.

The workers are real, and the real scheduler drives them.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.core.config.cache import CacheConfig
from quire.core.wire.protocol import EngineRequest, RequestDelta, WorkerReady
from quire.core.wire.rank import Layout, Rank
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.worker import Worker
from tests.executor.models.test_dense_models import VARIANTS as DENSE
from tests.executor.models.test_hybrid_models import folder as hybrid  # noqa: F401
from tests.executor.models.test_latent_models import VARIANTS as LATENTS
from tests.executor.models.test_moe_models import VARIANTS as MIXTURES
from tests.executor.paged_driver import Checkpoints
from tests.executor.step.test_model_runner import (
    LIMITS,
    engine_config,
    generate,
    mixed_requests,
    prompt_of,
    request,
    tokens_of,
)
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)

BLOCK_SIZE, INTERVAL = 4, 16
"""Tokens of a page, and between two snapshots of a state."""
CHUNK = 32
"""Most tokens of a step that takes many pages."""

VARIANTS = {
    **DENSE, **MIXTURES, **LATENTS,
    "windows": ("gemma3", {"sliding_window": 8, "num_hidden_layers": 6, "tie": True}),
    "window": ("mistral", {"sliding_window": 12}),
    "codes": ("qwen3", {}),
    "latent-codes": ("deepseek_v32", {}),
}  # fmt: skip
STATES = [
    "bailing-hybrid", "kimi-linear", "lfm2", "lfm3", "mamba2", "nemotron-h-experts", "olmo-hybrid", "qwen3.5",
    "qwen3.5-moe", "qwen4-exp", "recurrent-gemma", "rwkv", "xlstm", "zamba2",
]  # fmt: skip
CODES = {**dict.fromkeys(("int8", "fp8", "fp8_e5m2", "int4"), "codes"), "latents-int8": "latent-codes"}
"""Checkpoints, by the name for `--kv-cache-dtype` at the end of a kind's."""
FAMILIES = [
    "windows", "window", "gemma3n", "gemma4", "gpt_oss", "llama4", "phimoe", "qwen3_moe", "deepseek_v2-lite",
    "deepseek_v32", "glm_moe_dsa-shared", *STATES,
]  # fmt: skip
_SLOW = {"qwen4-exp"}
"""Ranks that agree on its tokens find the same in each case: that is enough of a family whose steps take long."""
KINDS = [*(kind for kind in FAMILIES if kind not in _SLOW), *CODES]


class Served(NamedTuple):
    """A worker that is ready, and what runs requests on it."""

    folder: Path
    worker: Worker
    ready: WorkerReady
    generate: Callable[..., dict[str, list[RequestDelta]]]


def start(
    folder: Path, group: ParallelGroup | None = None, *, caching: bool = True, cache: CacheConfig | None = None,
    device: str = "cpu", **options: Any,
) -> Served:  # fmt: skip
    group = group or ParallelGroup()
    config = engine_config(
        folder,
        limits=msgspec.structs.replace(LIMITS, block_size=BLOCK_SIZE, enable_prefix_caching=caching),
        cache=cache or CacheConfig(num_gpu_blocks_override=600, mamba_block_size=INTERVAL if caching else None),
        layout=Layout(tensor=group.size),
        device=device,
    )
    worker = Worker(config, Rank(tensor=group.rank), group, **options)
    ready = worker.load()
    worker.allocate(ready.num_pages, ready.max_model_len)
    on_worker = partial(generate, worker, block_size=BLOCK_SIZE, kv_groups=ready.kv_groups)
    return Served(folder, worker, ready, partial(on_worker, whole_prompts=ready.whole_prompts))


def alone(served: Served, requests: list[EngineRequest]) -> dict[str, list[int]]:
    """Each request on its own, one step at a time, prompts whole, no prefix cache."""
    tokens: dict[str, list[int]] = {}
    for one in requests:
        tokens |= tokens_of(served.generate([one], depth=1, enable_prefix_caching=False))
    return tokens


Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(checkpoint: Checkpoints, hybrid: Folder) -> Folder:  # noqa: F811
    """The checkpoint of one of `KINDS`."""

    def folder(kind: str) -> Path:
        if kind in STATES:
            return hybrid(kind)
        family, options = VARIANTS[CODES.get(kind, kind)]
        return checkpoint(family, **options)

    return folder


def start_kind(kind: str, folder: Path, group: ParallelGroup | None = None) -> Served:
    if kind in STATES:
        return start(folder, group)
    dtype = kind.removeprefix("latents-") if kind in CODES else "auto"
    return start(folder, group, cache=CacheConfig(num_gpu_blocks_override=600, kv_cache_dtype=dtype))


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, folder_of: Folder) -> Served:
    return start_kind(request.param, folder_of(request.param))


@pytest.mark.parametrize("served", ["windows", "window", "lfm2", "mamba2", "qwen3.5"], indirect=True)
def test_greedy_tokens_are_transformers(served: Served) -> None:
    reference = AutoModelForCausalLM.from_pretrained(served.folder, dtype=torch.float32)
    prompts = [prompt_of(i, length) for i, length in enumerate([1, 16, 75])]
    got = tokens_of(served.generate([request(str(i), p, max_tokens=64) for i, p in enumerate(prompts)]))
    for i, prompt in enumerate(prompts):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + got[str(i)]])).logits[0, len(prompt) - 1 : -1]
        assert got[str(i)] == logits.argmax(dim=-1).tolist()


@pytest.mark.turns(4)
def test_tokens_do_not_depend_on_company_or_chunks(served: Served) -> None:
    """Of codes: a prompt reads its own keys and values as codes, whether it comes in one piece or in several."""
    expected = alone(served, mixed_requests())
    assert len({tuple(row) for row in expected.values()}) == len(expected), "outputs must differ to prove anything"
    for options in [
        {"depth": 3},
        {"max_num_seqs": 5, "long_prefill_token_threshold": 7},
        {"max_num_batched_tokens": 40, "depth": 3, "max_num_seqs": 9},
        {"enable_chunked_prefill": False},
    ]:
        assert tokens_of(served.generate(mixed_requests(), **options)) == expected, options


def growing_requests() -> list[EngineRequest]:
    return [request(str(i), prompt_of(i, 3), max_tokens=50, temperature=0.8, seed=i) for i in range(6)]


def preempted(served: Served, requests: list[EngineRequest]) -> dict[str, list[int]]:
    """Short prompts are admitted together, and their outputs grow until the pool is too small."""
    pages = sum(group.max_pages(128, block_size=BLOCK_SIZE, largest_chunk=CHUNK) for group in served.ready.kv_groups)
    deltas = served.generate(requests, num_pages=pages + 7, max_num_batched_tokens=CHUNK)
    if pages:  # a model of states alone runs as many requests as there are slots
        assert any(delta.num_preemptions for entries in deltas.values() for delta in entries)
    return tokens_of(deltas)


@pytest.mark.turns(4)
def test_tokens_do_not_depend_on_preemption(served: Served) -> None:
    assert preempted(served, growing_requests()) == alone(served, growing_requests())


@pytest.mark.turns(4)
@pytest.mark.parametrize("kind", FAMILIES)
def test_two_ranks_agree_whatever_happens_beside(kind: str, folder_of: Folder) -> None:
    """Each rank's scheduler makes the same plans, so that the ranks meet in every collective.

    Ranks that are threads wait for each other in every layer, so few requests run on their own.
    """
    folder, shared = folder_of(kind), prompt_of(7, 60)
    both = [request("a", shared, max_tokens=8), request("b", [*shared, 5, 6, 7], max_tokens=8)]

    def job(group: ParallelGroup) -> dict[str, list[int]]:
        served = start_kind(kind, folder, group)
        growing = growing_requests()
        apart, together = alone(served, both), tokens_of(served.generate(growing))
        assert alone(served, growing[:1]) == {"0": together["0"]}
        chunked = served.generate(both, long_prefill_token_threshold=7)
        after = served.generate(both, max_num_seqs=1)
        assert tokens_of(chunked) == tokens_of(after) == apart
        assert after["b"][0].num_cached_tokens >= 48
        assert preempted(served, growing) == together
        return apart | together

    first, second = on_every_rank(2, job)
    assert first == second
    assert len({tuple(row) for row in first.values()}) == len(first), "outputs must differ to prove anything"


@pytest.mark.turns(4)
def test_tokens_after_a_prefix_are_the_same(served: Served) -> None:
    shared = prompt_of(7, 100)
    both = [request("a", shared), request("b", [*shared, 5, 6, 7])]
    apart = alone(served, both)
    deltas = served.generate(both, max_num_seqs=1)
    assert tokens_of(deltas) == apart
    assert deltas["b"][0].num_cached_tokens >= 96

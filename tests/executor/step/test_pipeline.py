"""Layers divided among pipeline stages: the same tokens as of one stage, whatever a model hands from layer to layer."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from quire.core.config.cache import CacheConfig
from quire.core.config.load import LoadConfig
from quire.core.config.resolved import EngineConfig
from quire.core.config.speculative import Speculation
from quire.core.errors import ModelLoadError
from quire.core.wire.protocol import EngineRequest, RequestDelta, StepPlan, StepResult
from quire.core.wire.rank import Layout, Rank
from quire.executor.inspection.load_plan import plan_load
from quire.executor.inspection.pack_writer import pack_model
from quire.executor.inspection.shard_writer import save_shards
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.step.speculator import Speculator
from quire.executor.worker import Worker
from tests.executor.models.test_hybrid_models import folder as hybrid  # noqa: F401
from tests.executor.step.test_drafts import ToldDrafter
from tests.executor.step.test_model_runner import LIMITS, engine_config, prompt_of, request, tokens_of
from tests.executor.step.test_model_runner import generate as generate_with
from tests.executor.step.test_sameness import BLOCK_SIZE, INTERVAL, STATES, Folder, folder_of  # noqa: F401

pytestmark = pytest.mark.turns(4, among="whole systems")

torch.set_num_threads(1)


class Mailboxes:
    """See `StageNeighbours`: stages of this process, which take their turns."""

    def __init__(self, before: deque[Tensor], after: deque[Tensor]) -> None:
        self._before = before
        self._after = after

    def receive(self, message: Tensor) -> Tensor:
        received = self._before.popleft()
        assert (received.shape, received.dtype) == (message.shape, message.dtype)
        return received

    def send(self, message: Tensor) -> None:
        self._after.append(message.clone())


class Stages:
    """See `Worker`: all stages of a model, one after the other in each step. Only the last one's results count."""

    def __init__(self, config: EngineConfig, speculator: Speculator | None = None) -> None:
        boxes: list[deque[Tensor]] = [deque() for _ in range(config.layout.pipeline + 1)]
        self.workers = [
            Worker(
                config,
                Rank(pipeline=stage),
                ParallelGroup(),
                speculator=speculator if stage == config.layout.pipeline - 1 else None,
                stages=Mailboxes(*boxes[stage : stage + 2]),
            )
            for stage in range(config.layout.pipeline)
        ]
        ready = [worker.load() for worker in self.workers]
        self.kv_groups = ready[0].kv_groups
        assert all(other.kv_groups == self.kv_groups for other in ready)
        for worker in self.workers:
            worker.allocate(min(each.num_pages for each in ready), min(each.max_model_len for each in ready))

    def launch(self, plan: StepPlan) -> list[Any]:
        return [worker.launch(plan) for worker in self.workers]

    def collect(self, steps: Sequence[Any]) -> StepResult:
        *early, result = [worker.collect(step) for worker, step in zip(self.workers, steps, strict=True)]
        assert not any(each.token_ids for each in early)
        return result

    def generate(self, requests: list[EngineRequest], **options: Any) -> dict[str, list[RequestDelta]]:
        num_stages = len(self.workers)
        return generate_with(
            self, requests, depth=num_stages, num_stages=num_stages, block_size=BLOCK_SIZE,
            kv_groups=self.kv_groups, **options,
        )  # fmt: skip


def start(folder: Path, layers_by_stage: list[int], speculator: Speculator | None = None, **changes: Any) -> Stages:
    """Stages with so many layers; one stage for an empty list."""
    options = {
        "limits": msgspec.structs.replace(LIMITS, block_size=BLOCK_SIZE),
        "cache": CacheConfig(num_gpu_blocks_override=600),
        "layout": Layout(pipeline=len(layers_by_stage) or 1),
        "layers_by_stage": layers_by_stage,
    }
    return Stages(engine_config(folder, **{**options, **changes}), speculator)


SNAPSHOTS = CacheConfig(num_gpu_blocks_override=600, mamba_block_size=INTERVAL)
PARTITIONS: dict[str, list[int]] = {
    "windows": [1, 3, 2],
    "gemma3n": [2, 4],
    "gemma4": [1, 1],
    "llama4": [1, 3],
    "deepseek_v32": [2, 1],
    "lfm2": [1, 3],
    "mamba2": [3, 1],
    "nemotron-h-experts": [2, 2],
    "qwen3.5-moe": [3, 1],
    "qwen4-exp": [2, 2],
    "recurrent-gemma": [2, 2],
    "rwkv": [1, 3],
    "zamba2": [1, 1, 1],
}  # fmt: skip
"""Layers by stage. Of nemotron-h-experts and qwen3.5-moe, a stage keeps states alone, or keys and values alone."""


def requests() -> list[EngineRequest]:
    """Greedy and seeded rows with a common beginning, features, and a prompt that is scored."""
    shared = prompt_of(7, 40)
    return [
        request("greedy", shared, max_tokens=12),
        request("prefix", [*shared, 5, 6, 7], max_tokens=12, temperature=0.8, seed=3, logprobs=2),
        request("penalty", prompt_of(1, 9), max_tokens=12, presence_penalty=0.6, repetition_penalty=1.3),
        request("scored", prompt_of(2, 21), max_tokens=5, prompt_logprobs=1),
    ]


def name_of(wire: EngineRequest) -> str:
    return wire.sequences[0].request_id


def answers_of(deltas: dict[str, list[RequestDelta]]) -> tuple[Any, ...]:
    """Tokens, and the tokens of all log-probabilities."""
    kept = [delta for delta in deltas["prefix"] + deltas["scored"] if delta.logprobs or delta.output]
    logprobs = [entry.token_ids for delta in kept for entry in delta.logprobs or ()]
    scores = {
        part.start + number: entry.token_ids
        for delta in kept
        if (part := delta.output)
        for number, entry in enumerate(part.positions)
    }
    assert len(logprobs) == 12
    assert len(scores) == 20
    return tokens_of(deltas), logprobs, scores


@pytest.mark.parametrize("kind", PARTITIONS)
def test_stages_together_are_the_model(kind: str, folder_of: Folder) -> None:  # noqa: F811
    """Also in chunks, after a prefix and after a preemption."""
    folder, changes = folder_of(kind), {"cache": SNAPSHOTS} if kind in STATES else {}
    whole = start(folder, [], **changes)
    expected = answers_of(whole.generate(requests()))
    assert len({tuple(row) for row in expected[0].values()}) == 4, "outputs must differ to prove anything"
    growing = [request(str(i), prompt_of(i, 3), max_tokens=40, temperature=0.8, seed=i) for i in range(5)]
    staged = start(folder, PARTITIONS[kind], **changes)
    assert answers_of(staged.generate(requests())) == expected
    found = staged.generate(requests(), long_prefill_token_threshold=7, max_num_seqs=1)
    assert answers_of(found) == expected
    assert found["prefix"][0].num_cached_tokens >= 32
    pages = sum(group.max_pages(43, block_size=BLOCK_SIZE, largest_chunk=8) for group in staged.kv_groups)
    preempted = staged.generate(growing, num_pages=pages + 7, max_model_len=43, max_num_batched_tokens=8)
    assert tokens_of(preempted) == tokens_of(whole.generate(growing))
    if pages:  # a model of states alone runs as many requests as there are slots
        assert any(delta.num_preemptions for entries in preempted.values() for delta in entries)


@pytest.mark.parametrize("kind", ["windows", "gemma3n", "deepseek_v32"])
def test_all_stages_compute_the_drafts_of_the_last(kind: str, folder_of: Folder) -> None:  # noqa: F811
    """Right ones and wrong ones, also in chunks and after a preemption."""
    folder = folder_of(kind)
    expected = start(folder, []).generate(requests())
    drafter = ToldDrafter({tuple(each.prompt_token_ids): tokens_of(expected)[name_of(each)] for each in requests()})
    staged = start(folder, PARTITIONS[kind], drafter)
    found = staged.generate(requests())
    assert answers_of(found) == answers_of(expected)
    assert any(len(delta.token_ids) > 2 for delta in found["greedy"])
    assert any(len(delta.token_ids) == 1 for delta in found["greedy"][1:])
    found = staged.generate(requests(), long_prefill_token_threshold=7, max_num_seqs=1)
    assert answers_of(found) == answers_of(expected)


def test_stages_with_states_take_no_drafts(folder_of: Folder) -> None:  # noqa: F811
    folder, changes = folder_of("lfm2"), {"cache": SNAPSHOTS}
    expected = answers_of(start(folder, [], **changes).generate(requests()))
    with pytest.raises(ModelLoadError, match="recurrent layers, and its pipeline stages cannot take back"):
        start(folder, [1, 3], speculation=Speculation(method="ngram", num_tokens=4), **changes)
    told = [replace(each, prediction=expected[0][name_of(each)]) for each in requests()]
    assert answers_of(start(folder, [1, 3], speculation=Speculation(), **changes).generate(told)) == expected


def test_a_part_of_the_cache_may_be_kept_in_fewer_bits(folder_of: Folder) -> None:  # noqa: F811
    """Layers are named by their numbers in the model, whichever stage has them."""
    cache = CacheConfig(
        num_gpu_blocks_override=600, kv_cache_dtype="int8", kv_cache_dtype_skip_layers=["3", "sliding_window"]
    )
    folder = folder_of("windows")
    expected = answers_of(start(folder, [], cache=cache).generate(requests()))
    assert answers_of(start(folder, [3, 3], cache=cache).generate(requests())) == expected


@pytest.mark.parametrize(
    ("kind", "layers_by_stage", "message"),
    [
        ("gemma3n", [3, 3], r"Layer 4 reads keys and values of layer 2, .* in QUIRE_PP_LAYER_PARTITION"),
        ("glm_moe_dsa-shared", [1, 1], r"layer 1 attends to the tokens .* cannot be the first .*their own \(0\)"),
    ],
)
def test_layers_that_belong_in_one_stage_are_not_parted(
    kind: str, layers_by_stage: list[int], message: str, folder_of: Folder  # noqa: F811
) -> None:  # fmt: skip
    with pytest.raises(ModelLoadError, match=message):
        start(folder_of(kind), layers_by_stage)


@pytest.mark.parametrize(("kind", "layers_by_stage"), [("windows", [1, 3, 2]), ("lfm2", [1, 3])])
def test_a_class_of_transformers(kind: str, layers_by_stage: list[int], folder_of: Folder) -> None:  # noqa: F811
    """Its programs, and row by row over pages and states."""
    folder, changes = folder_of(kind), {"cache": SNAPSHOTS} if kind in STATES else {}
    spec = msgspec.structs.replace(engine_config(folder).spec, implementation="transformers")
    expected = answers_of(start(folder, [], spec=spec, **changes).generate(requests()))
    staged = start(folder, layers_by_stage, spec=spec, **changes)
    for options in ({}, {"long_prefill_token_threshold": 7, "max_num_seqs": 1}):
        assert answers_of(staged.generate(requests(), **options)) == expected


def test_shards_that_were_saved_for_ranks_serve_their_stages(folder_of: Folder, tmp_path: Path) -> None:  # noqa: F811
    folder = folder_of("window")
    save_shards(engine_config(folder), tmp_path / "shards")
    expected = answers_of(start(folder, []).generate(requests()))
    load = LoadConfig(load_format="sharded_state")
    assert answers_of(start(tmp_path / "shards", [1, 1], load=load).generate(requests())) == expected


def test_packed_weights_serve_the_stages_for_which_they_were_packed(
    folder_of: Folder, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    """Also by tied weights, and of a class of Transformers."""
    folder = folder_of("windows")
    spec = engine_config(folder).spec
    for number, each in enumerate((spec, msgspec.structs.replace(spec, implementation="transformers"))):
        expected = answers_of(start(folder, [], spec=each).generate(requests()))
        packed, layout = tmp_path / str(number), Layout(pipeline=2)
        assert (
            pack_model(engine_config(folder, spec=each, layout=layout, layers_by_stage=[2, 4]), packed).num_files == 2
        )
        own = msgspec.structs.replace(each, path=str(packed))
        assert answers_of(start(packed, [2, 4], spec=own).generate(requests())) == expected
        config = engine_config(packed, spec=own, layout=layout, layers_by_stage=[2, 4])
        assert plan_load(config, None).obstacle is None
        with pytest.raises(ModelLoadError, match=r"start with .* QUIRE_PP_LAYER_PARTITION=2,4\. To pack it"):
            start(packed, [3, 3], spec=own)

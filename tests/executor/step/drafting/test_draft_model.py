"""A draft model beside the target in one worker: tokens are those without drafts, and drafts are accepted."""

import itertools
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire.core.config.model import ModelConfig
from quire.core.config.resolved import DraftModelConfig, EngineConfig, SharedVocabulary
from quire.core.config.speculative import Speculation
from quire.core.errors import ModelLoadError
from quire.core.wire.protocol import RequestDelta
from quire.core.wire.rank import Layout, Rank
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.step.drafting.draft_model import DraftModel
from quire.executor.worker import Worker
from quire.frontend.checkpoint.model_spec import read_model_spec
from tests.checkpoints import VOCAB_SIZE
from tests.executor.models.test_hybrid_models import folder as hybrid  # noqa: F401
from tests.executor.step.drafting.head_references import watched
from tests.executor.step.test_drafts import check_same, requests_of_all_kinds
from tests.executor.step.test_launch import LateDevice
from tests.executor.step.test_model_runner import LIMITS, engine_config, generate, prompt_of, request
from tests.executor.thread_group import on_every_rank

NUM_DRAFTS = 3


def with_draft_model(folder: Path, draft: Path, **changes: Any) -> EngineConfig:
    spec = read_model_spec(draft, ModelConfig(model=str(draft)))
    return engine_config(
        folder,
        limits=replace(LIMITS, num_lookahead_tokens=NUM_DRAFTS),
        draft_model=DraftModelConfig(spec=spec, num_tokens=NUM_DRAFTS),
        speculation=Speculation(method="draft_model", num_tokens=NUM_DRAFTS),
        **changes,
    )


def serve(worker: Worker, **options: Any) -> Callable[..., dict[str, list[RequestDelta]]]:
    ready = worker.load()
    worker.allocate(ready.num_pages, ready.max_model_len)
    options = {"num_lookahead_tokens": NUM_DRAFTS, **options}
    return partial(generate, worker, kv_groups=ready.kv_groups, **options)


@pytest.fixture(scope="module", params=["llama", "qwen3-window"])
def folder(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    if request.param == "llama":
        return checkpoint("llama")
    return checkpoint("qwen3", sliding_window=20, layer_types=["sliding_attention", "full_attention"])


@pytest.fixture(scope="module")
def draft(checkpoint: Callable[..., Path]) -> Path:
    """A model of another family, with heads of another size."""
    return checkpoint("gemma2")


@pytest.fixture(scope="module")
def without(folder: Path) -> dict[str, list[RequestDelta]]:
    """The deltas of each request alone, without drafts."""
    alone = serve(Worker(engine_config(folder), Rank(), ParallelGroup()), num_lookahead_tokens=0, depth=1)
    deltas: dict[str, list[RequestDelta]] = {}
    for one in requests_of_all_kinds():
        deltas |= alone([one], enable_prefix_caching=False)
    return deltas


def num_accepted(deltas: dict[str, list[RequestDelta]]) -> int:
    return sum(len(delta.token_ids) - 1 for entries in deltas.values() for delta in entries if delta.token_ids)


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 2},
        {"depth": 3, "max_num_seqs": 5, "long_prefill_token_threshold": 7},
        {"num_pages": 60, "depth": 2, "max_num_batched_tokens": 40},
    ],
    ids=str,
)
def test_another_model_changes_no_token(
    folder: Path, draft: Path, without: dict[str, list[RequestDelta]], options: dict[str, Any]
) -> None:
    generate = serve(Worker(with_draft_model(folder, draft), Rank(), ParallelGroup()), **options)
    requests = requests_of_all_kinds()
    check_same(generate(requests), without)
    check_same(generate(requests), without)  # on the pages that the prefix cache found


def test_the_target_as_its_own_draft_model_is_always_right(
    folder: Path, without: dict[str, list[RequestDelta]]
) -> None:
    """Each greedy decode brings all drafts: keys and values of both models are where they belong, after chunks of
    prompts, across pages and on cached prefixes."""
    worker = Worker(with_draft_model(folder, folder), Rank(), ParallelGroup())
    generate = serve(worker, depth=1, long_prefill_token_threshold=20)
    requests = [request(f"r{index}", prompt_of(index % 5, 3 + 11 * index), max_tokens=33) for index in range(9)]
    for _ in range(2):
        deltas = generate(requests)
        for name, entries in deltas.items():
            sizes = [len(delta.token_ids) for delta in entries]
            assert sizes[0] == 1, name  # the prompt's own token, before any draft
            assert set(sizes[1:-1]) == {1 + NUM_DRAFTS}, (name, sizes)
    everything = generate(requests_of_all_kinds())
    check_same(everything, without)
    assert num_accepted(everything) > 200


def test_a_draft_model_on_a_device_that_is_late(
    folder: Path, draft: Path, without: dict[str, list[RequestDelta]]
) -> None:
    device = LateDevice()
    worker = Worker(with_draft_model(folder, draft), Rank(), ParallelGroup(), device)
    check_same(serve(worker)(requests_of_all_kinds()[:6]), {f"r{i}": without[f"r{i}"] for i in range(6)})


def test_two_ranks_propose_the_same(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("llama")
    config = with_draft_model(folder, folder, layout=Layout(tensor=2), executor="mp")
    requests = [request(f"r{index}", prompt_of(index, 3 + 11 * index)) for index in range(4)]

    def run(group: ParallelGroup) -> dict[str, list[RequestDelta]]:
        return serve(Worker(config, Rank(tensor=group.rank), group))(requests)

    first, second = on_every_rank(2, run)
    check_same(first, second)
    assert [len(each) for each in first.values()] == [len(each) for each in second.values()]
    assert num_accepted(first) > 40


def test_a_draft_model_counts_in_the_memory_plan(folder: Path, draft: Path) -> None:
    alone = Worker(engine_config(folder), Rank(), ParallelGroup()).load()
    helper = Worker(engine_config(draft), Rank(), ParallelGroup()).load()
    both = Worker(with_draft_model(folder, draft), Rank(), ParallelGroup()).load()
    assert both.weights_bytes == alone.weights_bytes + helper.weights_bytes
    layers = sorted(layer for group in both.kv_groups for layer in group.layers)
    assert len(layers) == sum(len(group.layers) for ready in (alone, helper) for group in ready.kv_groups)
    assert layers == list(range(len(layers)))


def test_draft_models_that_cannot_serve_are_refused(
    checkpoint: Callable[..., Path],
    hybrid: Callable[[str], Path],  # noqa: F811
) -> None:
    folder = checkpoint("llama")
    small = checkpoint("llama", vocab_size=200)
    with pytest.raises(ModelLoadError, match=r"200 tokens, fewer than .* choose a draft model with the same tokenizer"):
        Worker(with_draft_model(folder, small), Rank(), ParallelGroup()).load()
    with pytest.raises(ModelLoadError, match="cannot take a draft back"):
        Worker(with_draft_model(folder, hybrid("lfm2")), Rank(), ParallelGroup()).load()
    with pytest.raises(ModelLoadError, match="room for as many in each request's pages, got num_lookahead_tokens 0"):
        Worker(replace(with_draft_model(folder, folder), limits=LIMITS), Rank(), ParallelGroup()).load()
    config = with_draft_model(folder, folder, layout=Layout(pipeline=2), layers_by_stage=[1, 1], executor="mp")
    with pytest.raises(ModelLoadError, match="without --pipeline-parallel-size"):
        Worker(config, Rank(pipeline=1), ParallelGroup()).load()


def test_steps_without_memory_for_drafts_have_none(
    folder: Path, draft: Path, without: dict[str, list[RequestDelta]], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, calls = DraftModel._decode, itertools.count()

    def short(self: DraftModel, *arguments: Any) -> torch.Tensor:
        if next(calls) % 5 == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return decode(self, *arguments)

    monkeypatch.setattr(DraftModel, "_decode", short)
    deltas = serve(Worker(with_draft_model(folder, draft), Rank(), ParallelGroup()))(requests_of_all_kinds())
    assert next(calls) > 20
    check_same(deltas, without)


def test_a_draft_model_with_other_ids_is_right_as_often(
    folder: Path, without: dict[str, list[RequestDelta]], tmp_path: Path
) -> None:
    """The target with its tokens in another order as its own draft model; some tokens have no equal."""
    order = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    shutil.copytree(folder, tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name][order] = tensors[name].clone()
    save_file(tensors, tmp_path / "draft" / "model.safetensors", metadata={"format": "pt"})
    missing = {7, 8, 250}
    shared = SharedVocabulary(
        order.tolist(), [-1 if token in missing else own for token, own in enumerate(order.tolist())]
    )
    config = with_draft_model(folder, tmp_path / "draft")
    assert config.draft_model is not None
    config = replace(config, draft_model=replace(config.draft_model, vocabulary=shared))
    deltas = serve(Worker(config, Rank(), ParallelGroup()), depth=1)(requests_of_all_kinds())
    check_same(deltas, without)
    assert num_accepted(deltas) > 200


def test_all_drafts_in_one_step(folder: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are the likeliest tokens in the places of masks, as Transformers finds them in whole sequences."""
    mask = 9
    config = with_draft_model(folder, draft)
    options = Speculation(
        method="draft_model", num_tokens=NUM_DRAFTS, draft_sampling="greedy", mask_token_id=mask, is_adaptive=False
    )
    generate = serve(Worker(replace(config, speculation=options), Rank(), ParallelGroup()), depth=1)
    requests = [request(f"r{index}", prompt_of(index, 3 + 11 * index), max_tokens=12) for index in range(4)]
    alone = serve(Worker(engine_config(folder), Rank(), ParallelGroup()), num_lookahead_tokens=0, depth=1)
    with watched(monkeypatch, DraftModel) as drafted:
        check_same(generate(requests, long_prefill_token_threshold=20), alone(requests))
    model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32, attn_implementation="eager").eval()
    assert len(drafted) > 20
    for known, drafts in drafted:
        with torch.inference_mode():
            logits = model(torch.tensor([[*known, *[mask] * (NUM_DRAFTS - 1)]])).logits[0]
        expected = logits[len(known) - 1 :, :VOCAB_SIZE].argmax(-1).tolist()
        assert drafts == expected[: len(drafts)]

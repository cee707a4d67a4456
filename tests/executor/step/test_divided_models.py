"""Models whose positions several ranks divide: latents, classes of Transformers, states, and those that refuse."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from quire.core.config.cache import CacheConfig
from quire.core.errors import ModelLoadError
from quire.core.wire.rank import Layout, Rank
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.worker import Worker
from tests.executor.models.test_hybrid_models import Folder
from tests.executor.models.test_hybrid_models import folder as hybrid  # noqa: F401
from tests.executor.models.tiny_models import write_checkpoint
from tests.executor.paged_driver import Checkpoints
from tests.executor.step.sequence_ranks import BOTH, LITTLE_ROOM, ROOM, run_on_ranks, run_whole
from tests.executor.step.test_model_runner import engine_config

torch.set_num_threads(1)


CODES = msgspec.structs.replace(ROOM, kv_cache_dtype="int8")
LATENTS: dict[str, tuple[Any, dict[str, Any], Layout, int, CacheConfig]] = {
    "decode": ("deepseek_v3", {}, Layout(tensor=2, context=2), 1, ROOM),
    "decode-codes": ("deepseek_v2", {}, Layout(tensor=2, context=2), 1, CODES),
    "decode-some-ranks": ("deepseek_v2", {}, Layout(tensor=4, context=2), 4, ROOM),
    "decode-preempted": ("minicpm3", {"tie": True}, Layout(tensor=4, context=4), 2, LITTLE_ROOM),
    "prefill": ("deepseek_v3", {}, Layout(prefill=2), 1, ROOM),
    "prefill-tensor-preempted": ("deepseek_v2", {}, Layout(prefill=3, tensor=2), 2, LITTLE_ROOM),
    "both": ("deepseek_v3", {}, BOTH, 1, ROOM),
}
"""Family, options, layout, neighbouring positions of a rank, and cache."""


@pytest.mark.turns(4)
@pytest.mark.parametrize("case", LATENTS)
def test_latents(case: str, checkpoint: Checkpoints) -> None:
    family, options, layout, run, cache = LATENTS[case]
    folder = checkpoint(family, **options)
    whole = run_whole(folder, cache)
    for rank in run_on_ranks(folder, layout, run, cache):
        assert rank.tokens == whole.tokens
        # A page of as many bytes has so many times as many tokens: no rank keeps a latent of another.
        assert rank.page_bytes == whole.page_bytes
        assert 1 <= rank.share * layout.prefill < 1.4
        assert list(rank.scores) == list(whole.scores) == list(range(1, 60))
        for position, logprobs in whole.scores.items():
            assert rank.scores[position] == pytest.approx(logprobs, abs=1e-3)


CLASSES: dict[str, tuple[Any, dict[str, Any], Layout, int]] = {
    "decode": ("qwen3", {"num_key_value_heads": 1, "head_dim": 16}, Layout(tensor=2, context=2), 1),
    "decode-two-kv-heads": ("llama", {}, Layout(tensor=4, context=2), 2),
    "decode-whole-attention": ("phi3", {}, Layout(tensor=2, context=2), 2),
    "decode-sinks": ("gpt_oss", {"sliding_window": 12, "num_key_value_heads": 1}, Layout(tensor=2, context=2), 1),
    "decode-latents": ("deepseek_v2", {}, Layout(tensor=2, context=2), 1),
    "prefill": ("qwen3", {"num_key_value_heads": 1, "head_dim": 16}, Layout(prefill=2), 4),
    "prefill-experts": ("qwen3_moe", {}, Layout(prefill=3), 1),
    "prefill-latents": ("deepseek_v2", {}, Layout(prefill=2, tensor=2), 2),
    "both": ("llama", {"num_key_value_heads": 1}, BOTH, 1),
    "both-latents": ("minicpm3", {"tie": True}, BOTH, 2),
}
"""Family, options, layout, and neighbouring positions of a rank."""


@pytest.mark.turns(4)
@pytest.mark.parametrize("case", CLASSES)
def test_classes_of_transformers(case: str, checkpoint: Checkpoints) -> None:
    family, options, layout, run = CLASSES[case]
    folder = checkpoint(family, **options)
    whole = run_whole(folder, ROOM, "transformers")
    for rank in run_on_ranks(folder, layout, run, ROOM, "transformers"):
        assert rank.tokens == whole.tokens
        # Latents, and heads of attention that the class's plan leaves whole, are those of one worker.
        has_all = family in ("deepseek_v2", "minicpm3", "phi3")
        assert rank.page_bytes * (1 if has_all else layout.tensor // layout.context) == whole.page_bytes
        for position, logprobs in whole.scores.items():
            assert rank.scores[position] == pytest.approx(logprobs, abs=1e-3)


DUAL_CHUNKS: dict[str, tuple[Any, int, Layout, int]] = {
    "decode": ("qwen2", 1, Layout(tensor=2, context=2), 1),
    "decode-runs": ("qwen3_moe", 1, Layout(tensor=2, context=2), 4),
    "prefill": ("qwen3_moe", 2, Layout(prefill=4), 1),
    "both": ("qwen2", 1, BOTH, 2),
}
"""Family, KV heads, layout, and neighbouring positions of a rank."""


@pytest.mark.turns(4)
@pytest.mark.parametrize("case", DUAL_CHUNKS)
def test_dual_chunks(case: str, checkpoint: Checkpoints) -> None:
    """Sequences of up to ten chunks, whose first tokens have keys of their own chunk on some ranks alone."""
    family, num_kv_heads, layout, run = DUAL_CHUNKS[case]
    dual = {"chunk_size": 11, "local_size": 3, "original_max_position_embeddings": 30}
    folder = checkpoint(family, num_key_value_heads=num_kv_heads, dual_chunk_attention_config=dual)
    whole = run_whole(folder, ROOM)
    for rank in run_on_ranks(folder, layout, run, ROOM):
        assert rank.tokens == whole.tokens
        assert rank.page_bytes * layout.num_workers == whole.page_bytes * layout.sequence
        for position, logprobs in whole.scores.items():
            assert rank.scores[position] == pytest.approx(logprobs, abs=1e-3)


@pytest.mark.parametrize(("kind", "num_ranks"), [("nemotron-h", 4), ("kimi-linear", 2)])
def test_models_with_states(kind: str, num_ranks: int, hybrid: Folder) -> None:  # noqa: F811
    folder, cache = hybrid(kind), CacheConfig(num_gpu_blocks_override=600)
    [whole] = run_on_ranks(folder, Layout(), 1, cache)
    for rank in run_on_ranks(folder, Layout(tensor=num_ranks, context=2), 1, cache):
        assert rank.tokens == whole.tokens


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("qwen3", {"num_key_value_heads": 2}, "puts each of 2 KV heads on 1; choose 1"),
        (
            "mistral",
            {"sliding_window": 10, "num_key_value_heads": 1},
            "turns of 4 do not divide .* chunks of 10 tokens",
        ),
        ("falcon", {"alibi": True, "multi_query": True}, "needs --cp-kv-cache-interleave-size 1 for this model"),
        ("deepseek_v32", {}, "decode-context-parallel-size is not there for sparse attention"),
        ("transformers", {"num_key_value_heads": 2}, "puts each of 2 KV heads on 1; choose 1"),
    ],
)
def test_models_that_cannot_divide_positions_are_refused(
    family: Any, options: dict[str, Any], message: str, checkpoint: Checkpoints
) -> None:
    is_foreign = family == "transformers"
    config = engine_config(
        checkpoint("qwen3" if is_foreign else family, **options),
        layout=Layout(tensor=2, context=2),
        cp_kv_cache_interleave_size=2,
    )
    if is_foreign:
        spec = msgspec.structs.replace(config.spec, implementation="transformers")
        config = msgspec.structs.replace(config, spec=spec)
    with pytest.raises(ModelLoadError, match=message):
        Worker(config, Rank(), ParallelGroup(0, 2)).load()


def test_classes_that_run_row_by_row_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "bloom")
    with pytest.raises(ModelLoadError, match="row by row, on whole sequences, and --prefill-context-parallel-size div"):
        Worker(engine_config(tmp_path, layout=Layout(prefill=2)), Rank(), ParallelGroup()).load()


def test_rows_of_several_tokens_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v4")
    with pytest.raises(ModelLoadError, match="not there for attention to rows of several tokens"):
        Worker(engine_config(tmp_path, layout=Layout(prefill=2)), Rank(), ParallelGroup()).load()


def test_states_need_all_tokens(hybrid: Folder) -> None:  # noqa: F811
    config = engine_config(hybrid("nemotron-h"), layout=Layout(prefill=2))
    with pytest.raises(ModelLoadError, match="prefill-context-parallel-size is not there for recurrent layers"):
        Worker(config, Rank(), ParallelGroup()).load()

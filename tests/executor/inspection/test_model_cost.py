"""Counted costs against the model's sizes, and against the memory plan, which builds every expert."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from transformers import AutoConfig

from quire.core.config.engine_args import EngineArgs
from quire.core.config.resolved import EngineConfig
from quire.core.errors import ModelLoadError
from quire.executor.inspection.load_plan import plan_load
from quire.executor.inspection.model_cost import count_cost
from quire.frontend.checkpoint.model_spec import read_model_spec
from quire.frontend.launch.options import resolve
from tests.executor.paged_driver import Checkpoints


def resolved(
    checkpoint: Checkpoints,
    family: Any,
    tensor: int = 1,
    sizes: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> EngineConfig:
    folder = checkpoint(family, **sizes)
    args = EngineArgs.from_flat(model=str(folder), tensor_parallel_size=tensor, device="cpu", **options)
    return resolve(args, read_model_spec(folder, args.model), "server")


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "qwen3_moe", "gpt_oss", "mixtral"])
def test_the_bytes_of_a_rank_are_those_of_the_memory_plan(family: Any, checkpoint: Checkpoints) -> None:
    cost = count_cost(resolved(checkpoint, family), [1, 2])
    for shard in cost.shards:
        [rank, *_] = plan_load(resolved(checkpoint, family, shard.tensor), None).ranks
        assert (shard.weights_bytes, shard.page_bytes) == (rank.weights_bytes, rank.page_bytes)
    assert [shard.tensor for shard in cost.shards] == [1, 2]


def test_a_dense_model_is_multiplied_by_all_its_linear_layers(checkpoint: Checkpoints) -> None:
    config = AutoConfig.from_pretrained(checkpoint("llama"))
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * inner
    [whole, half] = count_cost(resolved(checkpoint, "llama", dtype="bfloat16"), [1, 2]).shards
    assert whole.layers.num_weights == config.num_hidden_layers * layer
    assert whole.head.num_weights == config.vocab_size * hidden
    assert half.layers.num_weights * 2 == whole.layers.num_weights
    [attention] = whole.attention
    assert attention.bytes_per_token == config.num_hidden_layers * 2 * keys * 2
    assert attention.operations == config.num_hidden_layers * 4 * queries


def test_experts_are_counted_apart(checkpoint: Checkpoints) -> None:
    config = AutoConfig.from_pretrained(checkpoint("qwen3_moe"))
    cost = count_cost(resolved(checkpoint, "qwen3_moe"), [1])
    assert (cost.num_experts, cost.experts_per_token) == (config.num_experts, config.num_experts_per_tok)
    each = 3 * config.hidden_size * config.moe_intermediate_size
    assert cost.shards[0].experts.num_weights == cost.num_expert_layers * config.num_experts * each


def test_layers_with_windows_have_a_cost_of_their_own(checkpoint: Checkpoints) -> None:
    sizes = {"sliding_window": 16, "num_hidden_layers": 6}
    [shard] = count_cost(resolved(checkpoint, "gemma3", sizes=sizes), [1]).shards
    found = {kind.window: kind.bytes_per_token for kind in shard.attention}
    assert found == {16: 5 * found[None], None: found[None]}


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("name", ["auto", "int8", "int4"])
def test_attention_reads_codes_and_scales(family: Any, name: str, checkpoint: Checkpoints) -> None:
    config = resolved(checkpoint, family, kv_cache_dtype=name)
    [shard] = count_cost(config, [1]).shards
    [attention] = shard.attention
    assert attention.bytes_per_token * config.limits.block_size == shard.page_bytes


def test_a_number_of_ranks_that_does_not_divide_is_refused_with_its_reason(checkpoint: Checkpoints) -> None:
    [(size, why)] = count_cost(resolved(checkpoint, "llama"), [1, 3]).refusals
    assert size == 3
    assert "does not divide" in why


def test_packed_weights_are_refused(checkpoint: Checkpoints) -> None:
    config = resolved(checkpoint, "llama")
    manifest = checkpoint("llama") / "packed.json"
    manifest.write_text("{}")
    try:
        with pytest.raises(ModelLoadError, match="packed for one layout"):
            count_cost(config, [1])
    finally:
        manifest.unlink()

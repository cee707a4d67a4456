"""The recurrent group of a model: how often its states are copied, and into how many pages."""

import pytest
import torch

from quire.core.config.cache import CacheConfig
from quire.core.config.resolved import SchedulerLimits
from quire.core.errors import ModelLoadError
from quire.core.wire.kv_groups import KVGroupSpec
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.memory.state_layout import StateLayout, describe_states

CPU = torch.device("cpu")
LAYERS = [LayerState(((250,),), (torch.float32,))] * 3  # 3,000 bytes


def group(num_paged: int, page_bytes: int, *, caching: bool = True, **cache: int) -> KVGroupSpec:
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, enable_prefix_caching=caching)
    paged = [KVGroupSpec("full", [0], page_bytes)] * num_paged
    [made] = StateLayout(LAYERS, CPU).groups(paged, page_bytes, CacheConfig(**cache), limits)
    return made


@pytest.mark.parametrize(
    ("num_paged", "page_bytes", "interval"),
    [(1, 3000, 512), (1, 94, 512), (1, 93, 1024), (2, 93, 512), (1, 30, 2048), (1, 3, 2048), (0, 3000, 2048)],
)
def test_a_snapshot_takes_no_more_than_the_keys_and_values_between_two(
    num_paged: int, page_bytes: int, interval: int
) -> None:
    made = group(num_paged, page_bytes)
    assert made.interval == interval
    assert made.snapshot_pages == -(-3000 // page_bytes)


def test_an_option_says_how_often() -> None:
    assert group(1, 3000, mamba_block_size=32).interval == 32
    assert group(1, 3000, caching=False).interval is None
    no_layers = StateLayout([], CPU)
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64)
    assert no_layers.groups([], 8, CacheConfig(), limits) == []
    with pytest.raises(ModelLoadError, match="no such layers: drop the option"):
        no_layers.groups([], 8, CacheConfig(mamba_block_size=16), limits)


def test_the_log_names_both_sizes() -> None:
    made = group(1, 1024, mamba_block_size=64)
    assert describe_states([KVGroupSpec("full", [0], 1024), made]) == [
        "recurrent state in layers: 3; 3000 bytes a sequence",
        "a snapshot of 3072 bytes every 64 tokens",
    ]
    assert describe_states([group(1, 1024, caching=False)])[1] == "no snapshots"

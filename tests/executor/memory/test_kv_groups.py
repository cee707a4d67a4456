"""Layers in groups, and the tensors that groups share."""

import pytest
import torch

from quire import ops
from quire.core.wire.kv_groups import KVGroupSpec
from quire.executor.layers.attention.layer_kv import LatentKV, LayerKV
from quire.executor.memory.kv_groups import form_groups
from quire.executor.memory.kv_layout import KVLayout


def groups_of(windows: list[int | None]) -> list[KVGroupSpec]:
    return form_groups([LayerKV(2, 16, window) for window in windows], [100] * len(windows))


def test_layers_of_one_kind_are_one_group() -> None:
    assert groups_of([None] * 28) == [KVGroupSpec("full", list(range(28)), 2800)]
    assert groups_of([12, 12, 12]) == [KVGroupSpec("window", [0, 1, 2], 300, 12)]


def test_kinds_are_cut_into_groups_with_pages_of_equal_bytes() -> None:
    assert groups_of([8, 8, None, 8, 8, None]) == [
        KVGroupSpec("full", [2, 5], 200),
        KVGroupSpec("window", [0, 1], 200, 8),
        KVGroupSpec("window", [3, 4], 200, 8),
    ]
    assert groups_of([8, 4, 8, None]) == [
        KVGroupSpec("full", [3], 100),
        KVGroupSpec("window", [1], 100, 4),
        KVGroupSpec("window", [0], 100, 8),
        KVGroupSpec("window", [2], 100, 8),
    ]


@pytest.mark.parametrize(
    ("windows", "num_full", "sizes"),
    [
        ([8, 8, 8, 8, 8, None] * 4 + [8] * 2, 1, [4, 4, 4, 4, 4, 4, 2]),  # Gemma 3 1B
        ([8, 8, 8, 8, 8, None] * 10 + [8] * 2, 1, [10, 10, 10, 10, 10, 10, 2]),  # Gemma 3 27B
        ([None] * 20 + [8] * 8, 4, [5, 5, 5, 5, 5, 3]),  # of 8, the full layers would leave 4 places of 24 empty
        ([None] * 21 + [8] * 7, 3, [7, 7, 7, 7]),
    ],
)
def test_full_layers_leave_few_places_empty(windows: list[int | None], num_full: int, sizes: list[int]) -> None:
    groups = groups_of(windows)
    assert [len(group.layers) for group in groups] == sizes
    assert [group.kind for group in groups].count("full") == num_full
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert len({group.page_bytes for group in groups}) == 1


def test_layers_that_differ_in_size_lie_one_after_another() -> None:
    assert form_groups([LayerKV(2, 16), LayerKV(4, 16), LayerKV(2, 16)], [100, 200, 100]) == [
        KVGroupSpec("full", [0, 1, 2], 400)
    ]
    layers = [LayerKV(2, 16, window) for window in (8, 8, 8, 8, None) * 2]
    assert form_groups(layers, [100, 100, 100, 100, 300] * 2) == [  # of 300, both kinds would have more groups
        KVGroupSpec("full", [4, 9], 600),
        KVGroupSpec("window", [0, 1, 2, 3, 5, 6], 600, 8),
        KVGroupSpec("window", [7, 8], 600, 8),
    ]
    few = [LayerKV(2, 16, window) for window in (None, None, 8)]
    assert form_groups(few, [300, 300, 100]) == [  # a page has room for the largest layer
        KVGroupSpec("full", [0], 300),
        KVGroupSpec("full", [1], 300),
        KVGroupSpec("window", [2], 300, 8),
    ]


def test_pages_of_layers_that_differ_in_size_do_not_overlap() -> None:
    layers = [LayerKV(1, 16, 8), LayerKV(2, 16), LayerKV(1, 8, 8), LayerKV(1, 32), LayerKV(3, 8, 8)]
    layout = KVLayout(
        layers, ops.bind("cpu"), block_size=4, dtypes=[torch.bfloat16] * len(layers), device=torch.device("cpu")
    )
    [memory], caches = layout.allocate(5)
    assert memory.shape == (5, layout.page_bytes)
    for group in layout.groups:
        memory.zero_()
        for layer in group.layers:
            pages = caches[layer].pages
            assert pages.shape == (5, 2, layers[layer].num_kv_heads, 4, layers[layer].head_dim)
            assert not pages.any(), "another layer of the group has written here"
            assert pages[1].is_contiguous()
            pages[1:3] = 1
        assert not memory[[0, 3, 4]].any(), "another page was written"


def test_the_jth_layer_of_each_group_has_the_jth_tensor() -> None:
    layers = [LayerKV(2, 16, window) for window in (8, 8, None, 8, 8, None, 8)]
    layout = KVLayout(
        layers, ops.bind("cpu"), block_size=4, dtypes=[torch.bfloat16] * len(layers), device=torch.device("cpu")
    )
    tensors, caches = layout.allocate(10)
    assert layout.page_bytes == 2 * 2 * 2 * 4 * 16 * 2  # layers, keys and values, heads, tokens, head_dim, bytes
    assert sum(tensor.nbytes for tensor in tensors) == 10 * layout.page_bytes
    assert [cache.group for cache in caches] == [1, 1, 0, 2, 2, 0, 3]
    for cache, tensor in zip(caches, [0, 1, 0, 0, 1, 1, 0], strict=True):
        assert cache.pages.dtype == torch.bfloat16
        assert cache.pages.shape == (10, 2, 2, 4, 16)
        assert cache.pages.data_ptr() == tensors[tensor].data_ptr()
    kinds = "full attention in layers: 2, groups: 1; windows of 8 tokens in layers: 5, groups: 3"
    assert str(layout) == f"{kinds}; 1024 bytes a page of 4 tokens; 256 bytes a token"


def test_latents_take_one_vector_a_token() -> None:
    layout = KVLayout(
        [LatentKV((512, 64))] * 3,
        ops.bind("cpu"),
        block_size=16,
        dtypes=[torch.bfloat16] * 3,
        device=torch.device("cpu"),
    )
    assert layout.groups == [KVGroupSpec("full", [0, 1, 2], 3 * 16 * 576 * 2)]
    assert str(layout).startswith("latent attention in layers: 3, groups: 1; ")
    assert str(layout).endswith(" 3456 bytes a token")

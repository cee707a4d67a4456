"""Forms KV groups: decides which of a model's layers share a block table."""

from collections.abc import Mapping, Sequence

from quire.core.wire.kv_groups import KVGroupSpec
from quire.executor.layers.attention import AttentionKV


def form_groups(layers: Sequence[AttentionKV], page_bytes: Sequence[int]) -> list[KVGroupSpec]:
    """Groups that hold each of `layers` once; layers with the same window are of one kind.

    If all layers are of one kind, they are one group. Otherwise each kind is cut into groups, full layers first, whose
    pages have the same size: the layers of a group lie one after another in its page. What a group's layers leave of
    their page stays unused.

    `page_bytes` is by layer: the bytes of a page that holds this layer alone.
    """
    kinds: dict[int | None, list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault(layer.window, []).append(index)
    size = _page_size(kinds, page_bytes)
    return [
        KVGroupSpec("full" if window is None else "window", group, size, window)
        for window, members in sorted(kinds.items(), key=lambda kind: kind[0] or 0)
        for group in _cut(members, page_bytes, size)
    ]


def _cut(members: Sequence[int], page_bytes: Sequence[int], size: int) -> list[list[int]]:
    """Layers in order, in as many groups as pages of `size` bytes need."""
    groups: list[list[int]] = []
    room = 0
    for layer in members:
        if page_bytes[layer] > room:
            groups.append([])
            room = size
        groups[-1].append(layer)
        room -= page_bytes[layer]
    return groups


def _page_size(kinds: Mapping[int | None, Sequence[int]], page_bytes: Sequence[int]) -> int:
    """The bytes of a page, from the layers of each kind, by window.

    Candidates are pages for all layers of the smallest kind, down to half of them. The best wastes the fewest bytes in
    groups of full layers, whose pages grow with a sequence as those of window groups do not; then, it makes the fewest
    groups.
    """
    smallest = min(kinds.values(), key=lambda members: sum(page_bytes[layer] for layer in members))
    most = max(page_bytes)
    candidates = [
        max(most, sum(page_bytes[layer] for layer in smallest[:count]))
        for count in range(len(smallest), (len(smallest) - 1) // 2, -1)
    ]
    full = kinds.get(None, [])

    def waste(size: int) -> tuple[int, int]:
        used = sum(page_bytes[layer] for layer in full)
        groups = sum(len(_cut(members, page_bytes, size)) for members in kinds.values())
        return len(_cut(full, page_bytes, size)) * size - used, groups

    return min(candidates, key=waste)

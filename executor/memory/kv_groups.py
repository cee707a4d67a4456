"""Forms KV groups: the layers of a model that share a block table."""

from collections.abc import Mapping, Sequence

from quire.core.wire.kv_groups import KVGroupSpec
from quire.executor.layers.attention.layer_kv import AttentionKV

_Kind = tuple[bool, int]
"""True for attention to an encoder, and the window, or 0: kinds of layers in the order of their groups."""


def form_groups(
    layers: Sequence[AttentionKV], page_bytes: Sequence[int], encoder_rows: int | None = None
) -> list[KVGroupSpec]:
    """Forms groups that contain each of `layers` once; layers that see the same tokens are of one kind.

    If all layers are of one kind, they are one group. Otherwise each kind is divided into groups, windows behind others
    and attention to an encoder last. Pages of all groups have the same size: the layers of a group lie one after
    another in its page, and the rest of a page is unused.

    `page_bytes` is by layer: the bytes of a page for only this layer. `encoder_rows` are the most of an encoder input.
    """
    kinds: dict[_Kind, list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault((layer.is_cross, layer.window or 0), []).append(index)
    size = _page_size(kinds, page_bytes)
    return [
        KVGroupSpec("cross", group, size, encoder_rows=encoder_rows)
        if is_cross
        else KVGroupSpec("window" if window else "full", group, size, window or None)
        for (is_cross, window), members in sorted(kinds.items())
        for group in _cut(members, page_bytes, size)
    ]


def _cut(members: Sequence[int], page_bytes: Sequence[int], size: int) -> list[list[int]]:
    """Divides layers, in order, into as many groups as pages of `size` bytes require."""
    groups: list[list[int]] = []
    room = 0
    for layer in members:
        if page_bytes[layer] > room:
            groups.append([])
            room = size
        groups[-1].append(layer)
        room -= page_bytes[layer]
    return groups


def _page_size(kinds: Mapping[_Kind, Sequence[int]], page_bytes: Sequence[int]) -> int:
    """Chooses the bytes of a page, from the layers of each kind.

    Candidates are pages for all layers of the smallest kind, down to half of them. The best one wastes the fewest bytes
    in groups without a window, whose pages grow with a sequence. Among equals, it has the fewest groups.
    """
    smallest = min(kinds.values(), key=lambda members: sum(page_bytes[layer] for layer in members))
    most = max(page_bytes)
    candidates = [
        max(most, sum(page_bytes[layer] for layer in smallest[:count]))
        for count in range(len(smallest), (len(smallest) - 1) // 2, -1)
    ]
    growing = [members for (_, window), members in kinds.items() if not window]

    def waste(size: int) -> tuple[int, int]:
        used = sum(page_bytes[layer] for members in growing for layer in members)
        pages = sum(len(_cut(members, page_bytes, size)) for members in growing)
        groups = sum(len(_cut(members, page_bytes, size)) for members in kinds.values())
        return pages * size - used, groups

    return min(candidates, key=waste)

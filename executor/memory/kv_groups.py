"""Forms KV groups: decides which of a model's layers share a block table."""

from collections.abc import Sequence

from quire.core.errors import ModelLoadError
from quire.core.wire.kv_groups import KVGroupSpec
from quire.executor.layers.attention import AttentionKV


def form_groups(layers: Sequence[AttentionKV], page_bytes: Sequence[int]) -> list[KVGroupSpec]:
    """Groups that hold each of `layers` once; layers with the same window are of one kind.

    Every group has pages of the same size, with room for equally many layers. If all layers are of one kind, they are
    one group. Otherwise each kind is cut into groups, full layers first. A kind's last group may have fewer layers
    than its pages have room for; the rest of such a page stays unused.

    `page_bytes` is by layer: the bytes of a page that holds this layer alone.

    Raises:
        ModelLoadError: layers whose pages differ in size.
    """
    for index, num_bytes in enumerate(page_bytes):
        if num_bytes != page_bytes[0]:
            raise ModelLoadError(
                f"Layers whose keys and values differ in size are not supported: a page of layer 0 has "
                f"{page_bytes[0]} bytes, one of layer {index} has {num_bytes}. Serve a model whose layers all have "
                "the same number of KV heads and the same head_dim."
            )
    kinds: dict[int | None, list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault(layer.window, []).append(index)
    size = _group_size({window: len(members) for window, members in kinds.items()})
    return [
        KVGroupSpec("full" if window is None else "window", members[first : first + size], size * page_bytes[0], window)
        for window, members in sorted(kinds.items(), key=lambda kind: kind[0] or 0)
        for first in range(0, len(members), size)
    ]


def _group_size(num_layers: dict[int | None, int]) -> int:
    """The number of layers that a page has room for, from the number of layers of each kind, by window.

    Candidates are the size of the smallest kind, down to half of that. The best wastes the fewest places in groups of
    full layers, whose pages grow with a sequence as those of window groups do not; then, it makes the fewest groups.
    """
    smallest = min(num_layers.values())

    def waste(size: int) -> tuple[int, int]:
        return -num_layers.get(None, 0) % size, sum(-(-count // size) for count in num_layers.values())

    return min(range(smallest, (smallest - 1) // 2, -1), key=waste)

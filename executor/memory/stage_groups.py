"""Merges the KV groups of all pipeline stages, because all workers of an engine have the same block tables.

Each stage forms groups of its own layers, with page sizes of its own rank. The n-th group of a kind serves the n-th
group of that kind in every stage. A stage with fewer groups of a kind has pages that it does not use.
"""

from collections.abc import Sequence
from itertools import count

from msgspec.structs import replace

from quire.core.wire.kv_groups import KVGroupSpec

_Key = tuple[bool, int, int]
"""True for a cross group, its window or 0, and its number among such groups: the order of groups."""


def join_stages(stages: Sequence[Sequence[KVGroupSpec]]) -> list[KVGroupSpec]:
    """Returns the groups of the model, from those of each stage in order.

    A page's bytes are those of the stage with the most. A recurrent group has the bytes of the stage whose snapshots
    take the most pages, and the longest interval.
    """
    paged: dict[_Key, list[KVGroupSpec]] = {}
    recurrent: list[KVGroupSpec] = []
    num_layers = num_states = 0
    for groups in stages:
        own = [group for group in groups if not group.is_recurrent]
        for key, group in zip(_keys(own), own, strict=True):
            paged.setdefault(key, []).append(_moved(group, num_layers))
        num_layers += sum(len(group.layers) for group in own)
        for group in groups:
            if group.is_recurrent:
                recurrent.append(_moved(group, num_states))
                num_states += len(group.layers)
    joined = [_joined(parts, max(parts, key=lambda part: part.page_bytes)) for _, parts in sorted(paged.items())]
    if recurrent:
        interval = max((group.interval for group in recurrent if group.interval), default=None)
        largest = max(recurrent, key=lambda part: (part.snapshot_pages, part.state_bytes))
        joined.append(replace(_joined(recurrent, largest), interval=interval))
    return joined


def group_numbers(own: Sequence[KVGroupSpec], joined: Sequence[KVGroupSpec]) -> list[int]:
    """Returns the indices of a stage's paged groups in `joined`, the groups of all stages."""
    places = {key: number for number, key in enumerate(_keys([group for group in joined if not group.is_recurrent]))}
    return [places[key] for key in _keys(own)]


def _keys(paged: Sequence[KVGroupSpec]) -> list[_Key]:
    kinds = [(group.is_cross, group.window or 0) for group in paged]
    counts = {kind: count() for kind in kinds}
    return [(*kind, next(counts[kind])) for kind in kinds]


def _moved(group: KVGroupSpec, offset: int) -> KVGroupSpec:
    """Returns the group with its layers numbered among those of all stages."""
    return replace(group, layers=[layer + offset for layer in group.layers])


def _joined(parts: Sequence[KVGroupSpec], largest: KVGroupSpec) -> KVGroupSpec:
    return replace(largest, layers=[layer for part in parts for layer in part.layers])

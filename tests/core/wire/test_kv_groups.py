"""KV groups on the wire."""

import msgspec
import pytest

from quire.core.wire.kv_groups import KVGroupSpec
from quire.core.wire.protocol import KVGroups


@pytest.mark.parametrize(("kind", "window"), [("window", None), ("window", 0), ("full", 8), ("full", 0)])
def test_a_window_belongs_to_window_groups_alone(kind: str, window: int | None) -> None:
    with pytest.raises(ValueError, match=f"{kind} KV group"):
        KVGroupSpec(kind, [0], 64, window)  # type: ignore[arg-type]


def test_a_model_declares_at_least_one_group() -> None:
    decoder = msgspec.msgpack.Decoder(KVGroups)
    groups = [KVGroupSpec("full", [5], 64), KVGroupSpec("window", [0, 1], 64, 8)]
    assert decoder.decode(msgspec.msgpack.encode(groups)) == groups
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(msgspec.msgpack.encode([]))

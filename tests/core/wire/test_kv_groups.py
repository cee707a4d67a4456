"""KV groups on the wire."""

import msgspec
import pytest

from quire.core.wire.kv_groups import KVGroupSpec, keeps_nothing, shares_prefixes
from quire.core.wire.protocol import KVGroups


@pytest.mark.parametrize(("kind", "window"), [("window", None), ("window", 0), ("full", 8), ("full", 0)])
def test_a_window_belongs_to_window_groups_alone(kind: str, window: int | None) -> None:
    with pytest.raises(ValueError, match=f"{kind} KV group"):
        KVGroupSpec(kind, [0], 64, window)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "state_bytes", "interval"), [("recurrent", 0, 16), ("full", 5, None), ("full", 0, 16)]
)
def test_a_state_belongs_to_recurrent_groups_alone(kind: str, state_bytes: int, interval: int | None) -> None:
    with pytest.raises(ValueError, match=f"{kind} KV group"):
        KVGroupSpec(kind, [0], 64, state_bytes=state_bytes, interval=interval)  # type: ignore[arg-type]


def test_a_snapshot_takes_whole_pages() -> None:
    sizes = [KVGroupSpec("recurrent", [0], 64, state_bytes=size, interval=16).snapshot_pages for size in (1, 64, 65)]
    assert sizes == [1, 1, 2]
    assert KVGroupSpec("recurrent", [0], 64, state_bytes=1).snapshot_pages == 0


def test_an_encoder_declares_no_groups() -> None:
    decoder = msgspec.msgpack.Decoder(KVGroups)
    groups = [KVGroupSpec("full", [5], 64), KVGroupSpec("window", [0, 1], 64, 8)]
    assert decoder.decode(msgspec.msgpack.encode(groups)) == groups
    assert decoder.decode(msgspec.msgpack.encode([])) == []
    assert keeps_nothing([])
    assert not shares_prefixes([])
    assert not keeps_nothing(groups)
    states = [KVGroupSpec("recurrent", [0], 64, state_bytes=1, interval=16)]
    assert (keeps_nothing(states), shares_prefixes(states)) == (False, True)
    assert not shares_prefixes(states, whole_prompts=True)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 30])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("block_size", [1, 4])
def test_the_most_pages_are_those_of_the_worst_step(block_size: int, chunk: int, window: int | None) -> None:
    """Against every step that computes positions start .. end - 1, of requests of up to 60 tokens."""
    spec = KVGroupSpec("full" if window is None else "window", [0], 0, window)
    worst = [0]
    for end in range(1, 61):
        steps = range(max(0, end - chunk), end)
        firsts = [0 if window is None else max(0, start - window + 1) for start in steps]
        worst.append(max(worst[-1], *((end - 1) // block_size - first // block_size + 1 for first in firsts)))
    limits = {"block_size": block_size, "largest_chunk": chunk}
    bounds = [spec.max_pages(num_tokens, **limits) for num_tokens in range(61)]
    assert bounds[60] == worst[60]
    assert all(0 <= bound - most <= 1 for bound, most in zip(bounds, worst, strict=True))

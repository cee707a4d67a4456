"""An encoder's short steps from recordings: the same vectors as without, for lengths that come again."""

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from quire.executor.step import recorded_sequences
from tests.executor.models.tiny_encoders import write_encoder
from tests.executor.step.heads.test_pooler import pool
from tests.executor.step.test_encoders import serve, vectors

torch.set_num_threads(1)


def prompt(size: int, start: int) -> list[int]:
    return [(31 * place * place + 7 * place + start) % 197 + 3 for place in range(size)]


@pytest.mark.parametrize("family", ["bert", "nomic", "modernbert"])
def test_lengths_that_come_again_come_from_a_recording(
    tmp_path: Path, launched: list[int], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    write_encoder(tmp_path, family)
    served = serve(tmp_path)
    asked = []
    for start in range(5):
        asked += [pool(f"{way} {start}", prompt(9, start), way) for way in ("mean", "all")]  # type: ignore[arg-type]
        types = [0] * 5 + [1] * 4
        asked.append(replace(pool(f"typed {start}", prompt(9, start), "mean"), token_type_ids=types))
    got = {}
    for request in asked:
        got |= vectors(served, [request])
    assert len(launched) == len(asked) - 2  # the first step is noted, the second one recorded
    monkeypatch.setattr(recorded_sequences, "MAX_TOKENS", 0)
    for request in asked:
        [(name, values)] = vectors(served, [request]).items()
        np.testing.assert_array_equal(values, got[name])
    assert len(launched) == len(asked) - 2


def test_long_steps_and_new_lengths_run_as_they_are(
    tmp_path: Path, launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_sequences, "MAX_TOKENS", 100)
    write_encoder(tmp_path, "bert")
    served = serve(tmp_path)
    for start in range(3):
        vectors(served, [pool(f"a {start}", prompt(60, start), "mean"), pool(f"b {start}", prompt(60, start), "mean")])
        vectors(served, [pool(f"new {start}", prompt(10 + start, start), "mean")])
    assert not launched

"""Decode steps of models with recurrent layers come from recordings, which find each step's slots and states."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.core.wire.protocol import EngineRequest
from quire.executor.weights.quantization.int8 import quantize
from quire.ops.cpu import launches
from quire.ops.cpu.libraries import load_kernels
from quire.ops.cpu.native import NativeBackend
from quire.ops.linear import LinearWeight
from tests.executor.models.test_hybrid_models import folder as hybrid  # noqa: F401
from tests.executor.step.test_model_runner import prompt_of, request, tokens_of
from tests.executor.step.test_sameness import start

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """All linear layers have weights of one byte, because these have kernels of ours on every processor."""
    if load_kernels() is None:
        pytest.skip("plain torch cannot be recorded")
    for name in ("pack_linear", "pack_gated_linear"):
        pack = getattr(NativeBackend, name)

        def pack_bytes(
            self: NativeBackend, weight: LinearWeight, bias: torch.Tensor | None = None, pack: Any = pack
        ) -> Any:
            return pack(self, quantize(weight) if isinstance(weight, torch.Tensor) else weight, bias)

        monkeypatch.setattr(NativeBackend, name, pack_bytes)


def requests() -> list[EngineRequest]:
    """Prompts of one token, which begin their sequences in a decode step, and longer ones, of different lengths."""
    return [request(str(i), prompt_of(i, 1 + 7 * (i % 3)), max_tokens=6 + 5 * (i % 4)) for i in range(14)]


@pytest.mark.parametrize("variant", ["lfm2", "mamba2", "qwen3.5"])
def test_tokens_are_those_of_the_ordinary_way(
    variant: str,
    hybrid: Callable[[str], Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = start(hybrid(variant))
    run = served.generate
    with monkeypatch.context() as patch:
        patch.setattr(served.worker._runner._inputs, "_decode_inputs", None)
        expected = tokens_of(run(requests()))
    recorded: list[int] = []
    play = launches.Recording.run

    def count(self: launches.Recording) -> None:
        recorded.append(1)
        play(self)

    monkeypatch.setattr(launches.Recording, "run", count)
    for _ in range(2):  # the second time, every decode step has a recording
        assert tokens_of(run(requests(), max_num_seqs=5)) == expected
    assert len(recorded) > 40

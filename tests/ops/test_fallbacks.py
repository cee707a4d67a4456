"""The log says once for each reason that an operation runs without its kernel."""

import ctypes
import logging
from collections.abc import Callable

import pytest
import torch

from quire.ops.cpu.fallbacks import Fallbacks
from quire.ops.cpu.native import NativeBackend
from quire.ops.cpu.onednn import OneDnnLinear, OneDnnWeight
from quire.ops.cpu.panels import PanelLinear, PanelWeight
from quire.ops.cpu.quantized_panels import QuantizedPanelWeight
from quire.ops.quantized import QuantizedWeight
from tests.ops.levels import RUNNABLE, Level
from tests.ops.test_attention import Step


@pytest.fixture(params=RUNNABLE, ids=lambda level: level.name)
def level(request: pytest.FixtureRequest) -> Level:
    return request.param


@pytest.fixture
def own() -> NativeBackend:
    """A backend that has logged nothing yet."""
    return RUNNABLE[0].backend()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings since the last call."""

    def take() -> list[str]:
        messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        caplog.clear()
        return messages

    return take


def test_an_operation_in_plain_torch_is_told_once_a_dtype(own: NativeBackend, told: Callable[[], list[str]]) -> None:
    own.activate_and_mul(torch.ones(3, 8))
    assert told() == []
    for num_tokens in (3, 4):
        own.activate_and_mul(torch.ones(num_tokens, 8, dtype=torch.float64))
    (message,) = told()
    assert "activate_and_mul runs in plain torch" in message
    assert "float64 [3, 8]" in message
    own.rms_norm(torch.ones(3, 8, dtype=torch.float64), torch.ones(8, dtype=torch.float64), 1e-6)
    own.activate_and_mul(torch.ones(8, 3).T)
    assert [message.split()[0] for message in told()] == ["rms_norm", "activate_and_mul"]


def test_attention_that_its_kernel_does_not_take(own: NativeBackend, told: Callable[[], list[str]]) -> None:
    step = Step(own, [(1, 5)], num_heads=65, num_kv_heads=1, head_dim=8)
    for _ in range(3):
        step.run()
    (message,) = told()
    assert "attention runs in plain torch" in message
    assert "[1, 65, 8]" in message


def test_a_mistake_is_not_told_as_a_missing_kernel(own: NativeBackend, told: Callable[[], list[str]]) -> None:
    with pytest.raises(IndexError):
        own.take_rows(torch.ones(2, 3), torch.tensor([2]))
    assert told() == []


def test_layers_in_bfloat16_have_kernels_everywhere(level: Level, told: Callable[[], list[str]]) -> None:
    native = level.backend()
    packed = [native.pack_linear(torch.ones(4, 4).bfloat16()), native.pack_gated_linear(torch.ones(4, 4).bfloat16())]
    assert all(isinstance(weight, PanelWeight if level.has_panels else QuantizedPanelWeight) for weight in packed)
    assert told() == []


def test_weights_without_a_kernel_are_told_once_a_kind(own: NativeBackend, told: Callable[[], list[str]]) -> None:
    """Codes of another type than the contract names are not read by mistake."""
    scales = torch.ones(4, 1)
    own.pack_linear(QuantizedWeight(torch.ones(4, 4, dtype=torch.int8), scales))
    assert told() == []
    for _ in range(2):
        packed = own.pack_linear(QuantizedWeight(torch.ones(4, 4, dtype=torch.int16), scales))
    (message,) = told()
    assert "int16, one scale for 4 values" in message
    assert torch.equal(own.linear(torch.ones(1, 4), packed), torch.full((1, 4), 4.0))


def test_registers_that_the_system_withholds(own: NativeBackend, told: Callable[[], list[str]]) -> None:
    size = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_long)(lambda *_: -1)
    panels = PanelLinear({"quire_panels_size": size}, own._launcher, Fallbacks())  # type: ignore[arg-type]
    for _ in range(2):
        assert panels.pack(torch.ones(4, 4).bfloat16()) is None
    (message,) = told()
    assert "does not let this process use the processor's AMX registers" in message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_layers_that_onednn_lacks_are_told(dtype: torch.dtype, told: Callable[[], list[str]]) -> None:
    layers = OneDnnLinear()
    packed: list[OneDnnWeight] = [layers.pack(torch.ones(4, 4).to(dtype), None) for _ in range(2)]
    messages = told()
    assert len(messages) == (not packed[0].is_blocked)
    assert all(str(dtype).removeprefix("torch.") in message for message in messages)


def test_steps_that_cannot_be_recorded_say_why(own: NativeBackend, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(2, 4)
    with caplog.at_level(logging.INFO):
        own.record(lambda: own.activate_and_mul(x))
        assert not caplog.records
        own.record(lambda: own.activate_and_mul(torch.sin(x)))
    (record,) = caplog.records
    assert record.getMessage().endswith("torch's own operations: sin")

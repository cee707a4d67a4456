"""Decode steps on an accelerator that is not there: nothing is read from the device, so that a graph can hold them."""

from pathlib import Path
from typing import Any

import pytest
import torch

import quire.ops
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from quire.ops.triton.backend import TritonBackend
from quire.ops.triton.launch import Kernel
from tests.executor.models.test_left_out_fields import NATIVE
from tests.executor.models.tiny_models import write_checkpoint
from tests.executor.paged_driver import PagedDriver, load_model, read_spec
from tests.executor.pretend_device import PretendDevice

PROMPTS = {0: list(range(3, 33)), 1: [7, 5, 9]}
STEPS = [{0: [11], 1: [12]}, {0: [13], 1: [14]}]


READING = {"qwen4_exp_text"}
"""The host counts the tokens of Qwen4 that choose blocks."""
GRAPHIC = [name for name in NATIVE if name not in READING]


@pytest.mark.turns(4)
@pytest.mark.parametrize("model_type", GRAPHIC)
def test_a_decode_step_reads_nothing_from_the_device(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In plain torch: the interpreter of kernels is slow, and they are compared elsewhere."""
    write_checkpoint(tmp_path, model_type)
    spec = read_spec(tmp_path)
    here = PagedDriver(load_model(spec, device="cpu"), 2, 64, device="cpu")
    expected = [here.step(tokens) for tokens in (PROMPTS, *STEPS)]
    monkeypatch.setattr(quire.ops, "bind", lambda _: EagerBackend(PlainLinear()))
    with PretendDevice() as device:
        there = PagedDriver(load_model(spec, device="cuda"), 2, 64, device="cuda")
        got = [there.step(PROMPTS)]
        with device.without_reads():
            logits = [there.launch(tokens) for tokens in STEPS]
        got += [dict(enumerate(each.cpu().split(1))) for each in logits]
    for own, theirs in zip(got, expected, strict=True):
        for row, logits in own.items():
            torch.testing.assert_close(logits.as_subclass(torch.Tensor), theirs[row], atol=2e-4, rtol=0)


@pytest.mark.turns(4)
@pytest.mark.parametrize("model_type", GRAPHIC)
def test_the_launches_of_a_decode_step_read_nothing_either(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are launched in the dtype that they serve, but do not run."""
    launched: list[str] = []
    monkeypatch.setattr(Kernel, "__call__", lambda self, *_, **__: launched.append(self.name))
    write_checkpoint(tmp_path, model_type)
    spec = read_spec(tmp_path, dtype="bfloat16")
    with PretendDevice() as device:
        there = PagedDriver(load_model(spec, device="cuda"), 2, 64, device="cuda")
        there.step(PROMPTS)
        launched.clear()
        with device.without_reads():
            there.launch(STEPS[0])
    assert launched


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "deepseek_v3", "deepseek_v32"])
def test_a_decode_step_can_be_captured(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With our kernels, no operation of the step needs the host: it reads nothing, and nothing is sent."""
    write_checkpoint(tmp_path, model_type)
    spec = read_spec(tmp_path)
    with PretendDevice():
        there = PagedDriver(load_model(spec, device="cuda"), 2, 64, device="cuda")
        expected = [there.step(tokens) for tokens in (PROMPTS, *STEPS)]
        there = PagedDriver(load_model(spec, device="cuda"), 2, 64, device="cuda")
        assert isinstance(there.ops, TritonBackend)
        attention, forward = there._attention, there.model.forward

        def copied(*arguments: Any) -> list[Any]:
            batches = attention(*arguments)
            assert all(batch.rows is not None for batch in batches), "as before a recorded step"
            return batches

        def captured(*arguments: Any) -> torch.Tensor:
            with there.ops._recorder._capturing():
                return forward(*arguments)

        got = [there.step(PROMPTS)]
        monkeypatch.setattr(there, "_attention", copied)
        monkeypatch.setattr(there.model, "forward", captured)
        got += [there.step(tokens) for tokens in STEPS]
    for own, theirs in zip(got, expected, strict=True):
        for row, logits in own.items():
            assert torch.equal(logits.as_subclass(torch.Tensor), theirs[row].as_subclass(torch.Tensor))

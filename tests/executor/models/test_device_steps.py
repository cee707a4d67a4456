"""Decode steps on an accelerator that is not there: nothing is read from the device, so that a graph can hold them."""

from pathlib import Path
from typing import Any

import pytest
import torch

import quire.ops
from quire.ops.backend import AttentionForm
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from quire.ops.triton.attention import covers
from quire.ops.triton.backend import TritonBackend
from quire.ops.triton.canary_cases import CASES
from quire.ops.triton.launch import Kernel
from quire.ops.triton.rows import PagedRows
from tests.executor.models.test_left_out_fields import NATIVE
from tests.executor.models.tiny_models import write_checkpoint
from tests.executor.paged_driver import PagedDriver, load_model, read_spec
from tests.executor.pretend_device import PretendDevice

PROMPTS = {0: list(range(3, 33)), 1: [7, 5, 9]}
STEPS = [{0: [11], 1: [12]}, {0: [13], 1: [14]}]


@pytest.mark.turns(4)
@pytest.mark.parametrize("model_type", NATIVE)
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
@pytest.mark.parametrize("model_type", NATIVE)
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


@pytest.mark.turns(3)
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


@pytest.mark.parametrize("model_type", ["gemma4_text", "qwen4_exp_text", "mamba", "recurrent_gemma", "falcon_mamba"])
def test_the_launches_of_a_decode_step_can_be_captured(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, where the interpreter would be slow: kernels do not run."""
    monkeypatch.setattr(Kernel, "__call__", lambda *_, **__: None)
    write_checkpoint(tmp_path, model_type)
    spec = read_spec(tmp_path, dtype="bfloat16")
    with PretendDevice() as device:
        there = PagedDriver(load_model(spec, device="cuda"), 2, 64, device="cuda")
        there.step(PROMPTS)
        there.sends_rows = True
        forward = there.model.forward

        def captured(*arguments: Any) -> torch.Tensor:
            with there.ops._recorder._capturing():
                return forward(*arguments)

        monkeypatch.setattr(there.model, "forward", captured)
        with device.without_reads():
            there.launch(STEPS[0])


DUAL_CHUNKS = {"dual_chunk_attention_config": {"chunk_size": 16, "local_size": 4}, "layer_types": None}


@pytest.mark.parametrize(
    ("model_type", "overrides", "num_steps"),
    [("deepseek_v4", {}, 4), ("qwen2", DUAL_CHUNKS, 1)],
)
def test_lengths_that_only_the_device_knows(
    model_type: str, overrides: dict[str, Any], num_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step has them there alone; the host's are those of the capture. Kernels compute decode attention."""
    others = {each for case in CASES for each in case.operations if "attention" not in each}
    monkeypatch.setattr(quire.ops, "bind", lambda _: TritonBackend(others))
    monkeypatch.setattr("quire.ops.triton.backend.covers", covers_decode_steps)
    write_checkpoint(tmp_path, model_type)
    spec = read_spec(tmp_path, **overrides)
    here = PagedDriver(load_model(spec, device="cpu"), 2, 64, device="cpu")
    steps = [STEPS[index % 2] for index in range(num_steps)]  # some complete a compressed row
    expected = [here.step(tokens) for tokens in (PROMPTS, *steps)]
    with PretendDevice() as device:
        there = PagedDriver(load_model(spec, device="cuda"), 2, 64, device="cuda")
        there.sends_rows = True
        forward = there.model.forward

        def captured(*arguments: Any) -> torch.Tensor:
            with there.ops._recorder._capturing():
                return forward(*arguments)

        got = [there.step(PROMPTS)]
        monkeypatch.setattr(there.model, "forward", captured)
        for tokens in steps:
            with device.without_reads():
                logits = there.launch(tokens)
            got.append(dict(enumerate(logits.cpu().split(1))))
    for own, theirs in zip(got, expected, strict=True):
        for row, logits in own.items():
            torch.testing.assert_close(logits.as_subclass(torch.Tensor), theirs[row], atol=2e-4, rtol=0)


def covers_decode_steps(q: torch.Tensor, kv_cache: torch.Tensor, rows: PagedRows, form: AttentionForm) -> bool:
    return rows.max_query_len == 1 and covers(q, kv_cache, rows, form)

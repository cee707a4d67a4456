"""Recordings of the C++ kernels: right results from new inputs, and no recording if it would be wrong."""

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.ops.backend import AttentionForm
from quire.ops.cpu import calls
from quire.ops.cpu.native import NativeBackend


@pytest.fixture(scope="module")
def native(own_native: NativeBackend) -> NativeBackend:
    """One build: recordings do not depend on the processor's instructions."""
    return own_native


def test_new_inputs_in_the_same_place_give_what_the_operations_give(native: NativeBackend) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(5, 32), torch.randn(5, 32)
    index = torch.arange(5)

    def run() -> Tensor:
        taken = native.take_rows(residual, index)
        normal = native.rms_norm(x, weight, 1e-6)
        for _ in range(3):  # the memory of dropped tensors is used again
            normal, taken = native.add_rms_norm(normal, taken, weight, 1e-6)
        return native.activate_and_mul(normal)

    weight = torch.linspace(0.5, 1.5, 32)
    first, recording = native.record(run)
    assert recording is not None
    assert torch.equal(first, run())
    for _ in range(3):
        x.copy_(torch.randn(5, 32))
        residual.copy_(torch.randn(5, 32))
        index.copy_(torch.randperm(5))
        recording.run()
        assert torch.equal(first, run())


def test_sums_norms_and_activations_are_recorded(native: NativeBackend) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(5, 32), torch.randn(32)

    def run() -> Tensor:
        out = native.layer_norm(x, weight, weight, 1e-5)
        out = native.add(native.activate(native.layer_norm(x, None, None, 1e-5), "gelu"), out)
        return native.scale(out, 0.5, 2.0)

    result, recording = native.record(run)
    assert recording is not None
    x.normal_()
    recording.run()
    assert torch.equal(result, run())


def test_two_recordings_share_memory_and_do_not_mix(native: NativeBackend) -> None:
    torch.manual_seed(1)
    inputs = [torch.randn(rows, 64) for rows in (3, 4)]
    made = [native.record(lambda x=x: native.activate_and_mul(native.activate_and_mul(x))) for x in inputs]
    assert made[0][0].untyped_storage().data_ptr() == made[1][0].untyped_storage().data_ptr()
    for _ in range(2):
        for (result, recording), x in zip(made, inputs, strict=True):
            x.normal_()
            assert recording is not None
            recording.run()
            assert torch.equal(result, native.activate_and_mul(native.activate_and_mul(x)))


@pytest.mark.parametrize(
    "form",
    [
        AttentionForm(0.2),
        AttentionForm(0.2, window=30, chunk=40, softcap=2.0, sinks=torch.randn(4), slopes=torch.rand(4)),
    ],
    ids=["plain", "all options"],
)
def test_attention_follows_lengths_and_pages_that_change(native: NativeBackend, form: AttentionForm) -> None:
    torch.manual_seed(2)
    block_size, rows = 16, 3
    kv_cache = torch.randn(native.kv_cache_shape(12, block_size, 2, 32, torch.float32))
    q, slot_mapping = torch.randn(rows, 4, 32), torch.zeros(rows, dtype=torch.int64)
    seq_lens, tables = np.array([5, 17, 30]), np.arange(12, dtype=np.int32).reshape(3, 4)

    def run() -> Tensor:  # the batch is made inside: the recording must keep it
        batch = native.attention_batch(np.ones(rows, np.int64), seq_lens, tables, slot_mapping, block_size=block_size)
        return native.attention(q, kv_cache, batch, form)

    result, recording = native.record(run)
    assert recording is not None
    for lengths in ([1, 64, 33], [60, 2, 16]):
        seq_lens[:] = lengths
        tables[:] = np.random.default_rng(lengths[0]).permutation(12).reshape(3, 4)
        recording.run()
        assert torch.equal(result, run())


def test_an_operation_of_torchs_own_prevents_a_recording(
    native: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(4, 32)
    index = torch.tensor([1, 0])
    monkeypatch.setattr(native._quantized, "is_fast", False)
    packed = native.pack_linear(torch.randn(16, 16))  # for oneDNN
    strangers: list[Callable[[], Tensor]] = [
        lambda: native.activate_and_mul(x * 2),
        lambda: native.activate_and_mul(x)[index],
        lambda: native.activate_and_mul(x.T.contiguous()),
        lambda: native.activate_and_mul(x).add_(1),
        lambda: native.activate_and_mul(x.T.reshape(4, 32)),  # a copy
        lambda: native.activate_and_mul(torch.cat([x, x])),
        lambda: native.activate_and_mul(torch.empty(4, 32)),
        lambda: native.linear(native.activate_and_mul(x), packed),
        lambda: native.activate_and_mul(x if x.sum().item() > 1e9 else x.view(4, 32)),
    ]
    for stranger in strangers:
        assert native.record(stranger)[1] is None
    _, recording = native.record(lambda: native.activate_and_mul(x.view(2, 64)[:, :64]).unflatten(1, (2, 16)))
    assert recording is not None, "views are not operations"


def test_what_falls_back_to_torch_is_not_recorded(native: NativeBackend) -> None:
    x = torch.randn(4, 32, dtype=torch.float64)  # a dtype that the kernels lack
    assert native.record(lambda: native.activate_and_mul(x))[1] is None


def test_a_kernel_that_fails_in_a_recording_raises(native: NativeBackend) -> None:
    x, index = torch.randn(4, 8), torch.tensor([0, 3])
    _, recording = native.record(lambda: native.take_rows(x, index))
    assert recording is not None
    index[1] = 4
    with pytest.raises(RuntimeError, match="launch 1 of 1"):
        recording.run()


def test_times_of_each_launch_come_in_order(native: NativeBackend) -> None:
    x = torch.randn(4, 64)
    _, recording = native.record(lambda: native.activate_and_mul(native.activate_and_mul(x)))
    assert recording is not None
    ends = list(recording.run_timed())
    assert len(ends) == 2
    assert ends == sorted(ends)


def test_recording_does_not_import_the_compiler(native: NativeBackend) -> None:
    """The import takes longer than many steps."""
    code = """if True:
        import sys, torch
        from quire.ops import bind
        native = bind("cpu")
        x = torch.randn(4, 32)
        with torch.inference_mode():
            assert native.record(lambda: native.activate_and_mul(x.view(2, 64)))[1] is not None
        assert "torch._dynamo" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_fields_by_name_are_those_of_the_call_and_no_others(native: NativeBackend) -> None:
    x, index, out = torch.arange(6.0).view(3, 2), torch.tensor([2, 0]), torch.empty(2, 2)
    fields = {
        "scale": 1.0, "dtype": 0, "row_bytes": 8, "count": 2, "rows": 3,
        "x": x.data_ptr(), "index": index.data_ptr(), "out": out.data_ptr(),
    }  # fmt: skip
    take_rows = native._launcher.bind_by_name(calls.TAKE_ROWS)
    assert take_rows(**fields) == 0
    assert torch.equal(out, x[index])
    for others in (fields | {"stride": 2}, {name: value for name, value in fields.items() if name != "rows"}):
        with pytest.raises(TypeError, match=r"quire_take_rows .*: (stride|rows)$"):
            take_rows(**others)

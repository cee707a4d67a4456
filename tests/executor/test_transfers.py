"""Copies between host and device, on an accelerator that is not there."""

import numpy as np
import pytest
import torch

from quire.executor.transfers import CudaTransfers, Mirror, PinnedRing, to_device_together
from quire.ops.sampling import new_tokens
from tests.executor.pretend_device import PretendDevice


def test_arrays_of_any_type_and_length_arrive_in_one_copy() -> None:
    arrays = [np.array([True, False, True]), np.arange(5), np.zeros(0, np.int64), np.arange(6, dtype=np.int32)[::2]]
    with PretendDevice():
        there = to_device_together(arrays, torch.device("cuda"))
        assert {each.device.type for each in there} == {"cuda"}
        assert len({each.untyped_storage().data_ptr() for each in there}) == 1
        assert [each.tolist() for each in there] == [each.tolist() for each in arrays]
    here = to_device_together(arrays, torch.device("cpu"))
    assert [each.dtype for each in here] == [torch.bool, torch.int64, torch.int64, torch.int32]
    assert np.shares_memory(here[1].numpy(), arrays[1])


def test_a_mirror_stays_in_place() -> None:
    with PretendDevice():
        mirror = Mirror(6, torch.device("cuda"))
        place = mirror.there.data_ptr()
        for step in range(9):  # more than there are buffers
            mirror.host[:] = range(step, step + 6)
            mirror.upload(4)
            mirror.host[:] = 99
            assert mirror.there.tolist() == [step, step + 1, step + 2, step + 3, 0, 0]
        assert mirror.there.data_ptr() == place
    shared = Mirror(6, torch.device("cpu"))
    shared.host[:] = 9
    assert shared.there.tolist() == [9] * 6, "on a CPU the host's memory is the device's"


def test_pinned_buffers_are_used_again() -> None:
    with PretendDevice() as device:
        ring, there = PinnedRing(), torch.zeros(600, dtype=torch.uint8, device="cuda")
        for size in [5, 100, 5, 64, *[3, 5] * 20, 600, *[5] * 20]:
            array = np.arange(size, dtype=np.uint8)
            ring.copy(array, there)
            assert there[:size].tolist() == array.tolist()
    assert device.num_pinned <= 9


def test_results_arrive_in_memory_that_is_used_again() -> None:
    with PretendDevice() as device:
        transfers = CudaTransfers()
        results = []
        for step in range(12):
            tokens = torch.arange(5, device="cuda") + step
            usable = torch.tensor([True, False, True], device="cuda")
            results.append(transfers.to_host([tokens, usable]))
            if step >= 2:
                got = results[step - 2].values()
                assert [each.tolist() for each in got] == [list(range(step - 2, step + 3)), [True, False, True]]
                assert got[0].device.type == "cpu"
        assert device.num_pinned == 3, "as many as were under way"
        assert results[0].values()[0].tolist() == [0, 1, 2, 3, 4], "not overwritten since"
        assert transfers.to_host(()).values() == []
        [large] = transfers.to_host([torch.ones(1 << 19, device="cuda")]).values()
        assert large.sum() == 1 << 19


@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_tokens_in_one_memory_arrive_in_one_copy(num_rows: int) -> None:
    with PretendDevice() as device:
        token_ids, usable = new_tokens(num_rows, torch.device("cuda"))
        token_ids.copy_(torch.arange(num_rows, device="cuda"))
        usable.fill_(True)
        usable[0] = False
        device.num_copies.clear()
        got = CudaTransfers().to_host((token_ids, usable)).values()
    assert device.num_copies == {"out": 1}
    assert [each.tolist() for each in got] == [[*range(num_rows)], [False] + [True] * (num_rows - 1)]


def test_parts_of_one_memory_that_lie_apart_are_copied_alone() -> None:
    with PretendDevice() as device:
        memory = torch.arange(100, device="cuda")
        for parts in ((memory[:2], memory[90:]), (memory[::2], memory[1:4])):
            device.num_copies.clear()
            got = CudaTransfers().to_host(parts).values()
            assert device.num_copies == {"out": 2}
            assert [each.tolist() for each in got] == [each.tolist() for each in parts]

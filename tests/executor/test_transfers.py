"""Copies between host and device, on an accelerator that is not there."""

import numpy as np
import torch

from quire.executor.transfers import MirroredColumns, to_device_together
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


def test_columns_stay_in_place() -> None:
    with PretendDevice():
        columns = MirroredColumns(2, 3, torch.device("cuda"))
        place = columns.there.data_ptr()
        columns.host[:] = range(6)
        columns.upload(2, 5)
        columns.host[:] = 9
        assert columns.there.tolist() == [0, 0, 2, 3, 4, 0]
        assert columns.there.data_ptr() == place
    shared = MirroredColumns(2, 3, torch.device("cpu"))
    shared.host[:] = 9
    assert shared.there.tolist() == [9] * 6, "on a CPU the host's memory is the device's"

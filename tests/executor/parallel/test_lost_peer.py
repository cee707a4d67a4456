"""Which errors say that another rank cannot be reached; the texts are torch's."""

import pytest

from quire.executor.parallel.lost_peer import lost_peer
from tests.executor.doubles import DistBackendError

NCCL = "NCCL error in: ProcessGroupNCCL.cpp:77, {}, NCCL version 2.27.5\n{}: {}\nLast error:\n"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            RuntimeError("[/src/gloo/transport/tcp/pair.cc:537] Connection closed by peer [::1]:7. x"),
            "Connection closed",
        ),
        (
            DistBackendError(NCCL.format("remote process exited or there was a network error", "ncclRemoteError", "A")),
            "remote process exited",
        ),
        (DistBackendError(NCCL.format("unhandled system error", "ncclSystemError", "A call failed")), "system error"),
        (DistBackendError(NCCL.format("unhandled cuda error", "ncclUnhandledCudaError", "out of memory")), None),
        (DistBackendError(NCCL.format("invalid usage", "ncclInvalidUsage", "two ranks on one GPU")), None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
    ],
)
def test_only_what_another_rank_may_have_caused_is_its_loss(error: Exception, reason: str | None) -> None:
    found = lost_peer(error)
    assert found is None if reason is None else found is not None and reason in found

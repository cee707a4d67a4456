"""Tells the end of another rank from faults of this one. This file must not import torch."""

_TRANSPORT = "gloo/transport"
"""gloo raises RuntimeError, whose text begins with the place in its source."""
_EXCEPTION = "DistError"
"""The base of what torch.distributed itself raises, for NCCL and for the place where ranks meet."""
_OWN_FAULTS = ("ncclUnhandledCudaError", "ncclInternalError", "ncclInvalidArgument", "ncclInvalidUsage")
"""Results of NCCL that are this process's fault; torch puts a result's name into the text. NCCL's documentation of
`ncclResult_t` says of the others, ncclRemoteError and ncclSystemError, that another rank may have ended."""


def lost_peer(error: BaseException) -> str | None:
    """Why a rank cannot be reached, if that is what `error` says; else None."""
    text = str(error)
    if _TRANSPORT in text:
        return text.partition("] ")[2].partition(". ")[0]
    if any(fault in text for fault in _OWN_FAULTS):
        return None
    if any(each.__name__ == _EXCEPTION for each in type(error).__mro__):
        return text.partition("\n")[0]
    return None

"""Distinguishes the end of another rank from faults of this one. This file must not import torch."""

_TRANSPORT = "gloo/transport"
"""The start of gloo's RuntimeErrors, which begin with the place in its source."""
_EXCEPTION = "DistError"
"""The base of torch.distributed's own errors, for NCCL and for the rendezvous."""
_OWN_FAULTS = ("ncclUnhandledCudaError", "ncclInternalError", "ncclInvalidArgument", "ncclInvalidUsage")
"""NCCL's results that are this process's fault; torch's text contains the result's name. NCCL's documentation of
`ncclResult_t` says of the others, ncclRemoteError and ncclSystemError, that another rank may have ended.
"""


def lost_peer(error: BaseException) -> str | None:
    """Returns why a rank cannot be reached, if `error` reports that; else None."""
    text = str(error)
    if _TRANSPORT in text:
        return text.partition("] ")[2].partition(". ")[0]
    if any(fault in text for fault in _OWN_FAULTS):
        return None
    if any(each.__name__ == _EXCEPTION for each in type(error).__mro__):
        return text.partition("\n")[0]
    return None

"""Binds the Triton backend to this process."""

import logging
import os
import threading
import time
from collections.abc import Collection, Sequence

import torch

from quire.ops.triton.backend import TritonBackend
from quire.ops.triton.build import VariantError, build_fitting
from quire.ops.triton.canary import Canary
from quire.ops.triton.jobs import cache_folder, shipped_archive
from quire.ops.triton.variants import Variant, all_variants

logger = logging.getLogger(__name__)


def bind(*, serves: bool, is_invariant: bool) -> TritonBackend:
    """The backend for torch's current device.

    If this process `serves` requests, operations whose kernels do not work on the card are left to plain torch. On the
    first start, they are looked for beside the load of the weights, and kernels are compiled in the background; those
    of quantized caches, when a model has such a cache. `QUIRE_TRITON_CANARY=0` takes all operations to work.
    """
    wanted = os.environ.get("QUIRE_TRITON_CANARY", os.environ.get("VLLM_TRITON_CANARY", "1"))
    if not serves or not torch.cuda.is_available():
        return TritonBackend(is_invariant=is_invariant)
    if wanted == "0":
        return TritonBackend(compile_caches=_compile_caches, is_invariant=is_invariant)
    canary = Canary.of_this_card()
    if canary.is_decided:
        return TritonBackend(canary.broken_operations(), compile_caches=_compile_caches, is_invariant=is_invariant)
    canary.start()
    plain = [each for each in all_variants() if not each.cache]
    _compile_in_background(plain)
    return TritonBackend(
        find_broken=canary.broken_operations, compile_caches=_compile_caches, is_invariant=is_invariant
    )  # fmt: skip


def _compile_caches(kinds: Collection[str]) -> None:
    """Compiles the kernels of these kinds of quantized caches, if there are none yet."""
    _compile_in_background([each for each in all_variants() if each.cache in kinds])


def _compile_in_background(variants: Sequence[Variant]) -> None:
    threading.Thread(target=_compile, args=(variants,), name="compile kernels", daemon=True).start()


def _compile(variants: Sequence[Variant]) -> None:
    """Compiles what neither a wheel nor an earlier start brings; what fails is told where it is launched."""
    if torch.version.hip is not None:
        return
    major, minor = torch.cuda.get_device_capability()
    started = time.monotonic()
    num_processes = max(1, len(os.sched_getaffinity(0)) // 2)  # the others are for the load and the first requests
    arch = f"sm_{major}{minor}"
    try:
        built, _ = build_fitting(variants, arch, cache_folder(), num_processes, known=[shipped_archive()])
    except OSError as error:  # a disk that is full, or not to be written to
        logger.info("kernels are compiled when they are first launched, because they cannot be kept: %s", error)
        return
    faults = [each for each in built if isinstance(each, VariantError)]
    logger.info("%d kernels are compiled, %.1f s", len(built) - len(faults), time.monotonic() - started)
    for fault in faults:
        logger.info("a kernel cannot be compiled for this card: %s", fault)

"""Variants of kernels: the closed set that a server may launch, so that none is compiled while requests wait.

Each file of kernels lists its own in a function `variants()`.
"""

import functools
import importlib
import pkgutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import ModuleType
from typing import NamedTuple

import quire.ops.triton
from quire.ops.triton.kernel_function import KernelFunction, is_pointer
from quire.ops.triton.specialization import Specialization


class Variant(NamedTuple):
    """One compiled form of a kernel.

    Attributes:
        kernel: the kernel.
        signature: Triton's type of each parameter that is no constant: `*bf16`, `i32`, `i64`, `fp32`.
        constants: values of the `tl.constexpr` parameters, and None for a pointer that is left out.
        num_warps: warps of a program.
        num_stages: depth of the pipeline.
        reason: why these constants, warps and stages.
        cache: the kind of the quantized caches that it reads or writes, see `kv_rows`; empty: none.
    """

    kernel: KernelFunction
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int
    num_stages: int
    reason: str
    cache: str = ""

    @property
    def specialization(self) -> Specialization:
        """The conditions of the compiled form, apart from the kernel's source and the card.

        Raises:
            ValueError: a parameter has neither a type nor a value, or there is no such parameter.
        """
        parameters = self.kernel.parameters
        if wrong := {*self.signature, *self.constants} ^ set(parameters):
            raise ValueError(f"{self.kernel.name}: neither typed nor given a value, or unknown: {sorted(wrong)}")
        types = tuple("constexpr" if name in self.constants else self.signature[name] for name in parameters)
        constants = tuple((name, self.constants[name]) for name in parameters if name in self.constants)
        return Specialization(types, constants, (), self.num_warps, self.num_stages)


def types_of(
    kernel: KernelFunction, constants: Collection[str], known: Mapping[str, str], number: str = "bf16"
) -> dict[str, str]:
    """The types of a kernel's arguments: `known` ones, pointers to numbers of the type `number`, and integers."""
    names = [name for name in kernel.parameters if name not in constants]
    return {name: known.get(name, f"*{number}" if is_pointer(name) else "i32") for name in names}


def kernel_files() -> Iterator[ModuleType]:
    """The modules of this package that list variants."""
    for each in pkgutil.iter_modules(quire.ops.triton.__path__):
        module = importlib.import_module(f"quire.ops.triton.{each.name}")
        if callable(vars(module).get("variants")):
            yield module


def all_variants() -> list[Variant]:
    """Every variant that a server may launch, each once."""
    found: dict[tuple[str, str, Specialization], Variant] = {}
    for module in kernel_files():
        for variant in module.variants():
            found.setdefault((variant.kernel.module, variant.kernel.name, variant.specialization), variant)
    return list(found.values())


def some_of_each(variants: Iterable[Variant], most: int) -> list[Variant]:
    """At most so many variants of each kernel: in bfloat16, if there are such, evenly from the first to the last."""
    by_kernel: dict[str, list[Variant]] = {}
    for variant in variants:
        by_kernel.setdefault(variant.kernel.name, []).append(variant)
    chosen: list[Variant] = []
    for each in by_kernel.values():
        candidates = [variant for variant in each if "*bf16" in variant.signature.values()] or each
        count = min(most, len(candidates))
        chosen += [candidates[number * (len(candidates) - 1) // max(count - 1, 1)] for number in range(count)]
    return chosen


def is_listed(kernel: KernelFunction, specialization: Specialization, *, or_shallower: bool = False) -> bool:
    """Returns True if a list of variants has this form of the kernel.

    With `or_shallower`, also if a listed form has more stages: those of a card with less shared memory are so.
    """
    key = kernel.module, kernel.name, specialization._replace(num_stages=0)
    depths = _listed().get(key, set())
    return specialization.num_stages in depths or (or_shallower and specialization.num_stages < max(depths, default=0))


@functools.cache
def _listed() -> dict[tuple[str, str, Specialization], set[int]]:
    """The numbers of stages of each form."""
    found: dict[tuple[str, str, Specialization], set[int]] = {}
    for each in all_variants():
        key = each.kernel.module, each.kernel.name, each.specialization._replace(num_stages=0)
        found.setdefault(key, set()).add(each.num_stages)
    return found

"""Options: the accelerator."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class DeviceConfig(Struct, frozen=True, kw_only=True):
    """The accelerator."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="Where the model runs; auto prefers an accelerator.")
    ] = "auto"
    enforce_eager: Annotated[
        bool,
        Meta(
            description="Launch the kernels of a decode step one by one: no CUDA graphs, and no recorded lists of "
            "kernels on a CPU. Slower, for a search for faults."
        ),
    ] = False

"""Options: the accelerator."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class DeviceConfig(Struct, frozen=True, kw_only=True):
    """The accelerator."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="Where the model runs; auto prefers an accelerator.")
    ] = "auto"

"""Options: where weights come from."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class LoadConfig(Struct, frozen=True, kw_only=True):
    """Where weights come from."""

    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        Meta(
            description="auto and safetensors read *.safetensors; dummy draws random weights from --seed.",
            extra={"otherwise": "Convert weights in other formats to safetensors."},
        ),
    ] = "auto"
    download_dir: Annotated[str | None, Meta(description="Cache folder for hub downloads.")] = None
    use_tqdm_on_load: Annotated[bool, Meta(description="Show a progress bar while weights load, on a terminal.")] = True

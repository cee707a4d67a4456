"""Options: where weights come from."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

BESIDE_WEIGHTS = (
    *("training_args", "optimizer", "scheduler", "scaler", "rng_state", "random_states"),  # what trainers save
    "adapter",
)
"""Prefixes of other files beside a model's weights with the same endings."""

ADAPTERS = ("adapter*.safetensors", "adapter*.bin")
"""Patterns of the files of an adapter's weights."""


class LoadConfig(Struct, frozen=True, kw_only=True):
    """Options for loading weights."""

    load_format: Annotated[
        Literal["auto", "safetensors", "pt", "npcache", "mistral", "sharded_state", "bitsandbytes", "gguf", "dummy"],
        Meta(
            description="auto reads *.safetensors, or else *.bin, or else Mistral's own files; pt reads *.bin, *.pt "
            "and *.pth (tensors alone, never code); npcache is pt, as mapped files need no copy for numpy; mistral "
            "reads consolidated*.safetensors; sharded_state what `quire save-sharded-state` wrote; bitsandbytes is "
            "auto with --quantization bitsandbytes; gguf the GGUF file in a folder that has other weights, too; dummy "
            "draws random weights from --seed.",
            extra={
                "refused": {
                    "tensorizer": "Use safetensors, which is mapped into memory.",
                    "fastsafetensors": "Use safetensors, which is mapped into memory.",
                    "instanttensor": "Use safetensors, which is mapped into memory.",
                    "runai_streamer": "Weights are read from local folders: download them, and use safetensors.",
                    "modelexpress": "Weights are read from local folders: download them, and use safetensors.",
                    "ipc_cache": "Weights are read at every start; safetensors stay in the system's file cache.",
                },
            },
        ),
    ] = "auto"
    download_dir: Annotated[str | None, Meta(description="Cache folder for hub downloads.")] = None
    use_tqdm_on_load: Annotated[bool, Meta(description="Show a progress bar while weights load, on a terminal.")] = True

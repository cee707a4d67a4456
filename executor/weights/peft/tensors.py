"""Reads the tensors of an adapter that PEFT or another trainer has saved, by the modules that they change."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.core.wire.adapters import WEIGHTS_NAMES, Adapter, adapter_digest
from quire.executor.weights.peft.config import PeftConfig
from quire.executor.weights.tensor_files import open_file

_WRAPPERS = frozenset({"base_model", "model", "language_model", "transformer", "module", "text_model"})
"""Leading components of names, which trainers add or leave out."""

_INNER = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})
"""Components that compilers and shards of training put anywhere."""

_MEDIA = frozenset(
    {"vision", "visual", "image", "images", "audio", "speech", "sound", "video", "tower", "projector", "connector"}
    | {"aligner", "merger", "resampler", "perceiver", "siglip", "clip", "vit", "vpm", "apm", "mm", "multimodal"}
)
"""Words in the names of towers and of what is between them and the language model."""

_KINDS = {
    "a": r"lora_A(?:\.\w+)?\.weight",
    "b": r"lora_B(?:\.\w+)?\.weight",
    "b_bias": r"lora_B(?:\.\w+)?\.bias",
    "magnitude": r"lora_magnitude_vector(?:\.(?!weight$)\w+)?(?:\.weight)?",
    "embedding_a": r"lora_embedding_A(?:\.\w+)?",
    "embedding_b": r"lora_embedding_B(?:\.\w+)?",
    "tokens": r"(?:token_adapter\.)?trainable_tokens_delta(?:\.\w+)?",
    "factors": r"ia3_l(?:\.\w+)?",
    "bias": r"(?:base_layer\.)?bias",
    "weight": r"(?:modules_to_save\.(?:\w+\.)?|base_layer\.)?weight",
}
_KEY = re.compile(r"(?P<module>.+?)\.(?:" + "|".join(f"(?P<{kind}>{form})" for kind, form in _KINDS.items()) + ")")


@dataclass
class ModuleTensors:
    """What an adapter has for one module of the base model.

    Attributes:
        module: its name, without what trainers put before it.
        scale: the factor of the product of `a` and `b`.
        by_kind: the tensors, by their kinds: "a" [rank, in] and "b" [out, rank], the bias of the latter ("b_bias"),
            the "magnitude" [out] of DoRA, the "factors" [out, 1] or [1, in] of (IA)³, a new "bias" [out] or "weight";
            of an embedding "embedding_a" [rank, vocab] and "embedding_b" [size, rank], or the new rows of some "tokens"
            [num_tokens, size].
        keys: the tensors' names in the file, by kind.
        token_ids: of the "tokens".
        full_name: by which PEFT's patterns look for it.
    """

    module: str
    scale: float
    token_ids: list[int]
    full_name: str
    by_kind: dict[str, Tensor] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


class PeftCheckpoint:
    """An adapter's configuration and tensors; the tensors are views into its file.

    Attributes:
        modules: by name without what trainers put before it; see `plain_name`.
    """

    def __init__(self, adapter: Adapter) -> None:
        """Opens the adapter.

        Raises:
            ModelLoadError: it cannot be read, is of another kind, or its files have changed since the request came.
        """
        folder = Path(adapter.path)
        self.config = PeftConfig.read(folder)
        path = find_weights(folder)
        if adapter_digest(folder) != adapter.digest:
            raise ModelLoadError(
                f"The files in {folder} have changed since this version of the adapter was loaded, and are not in "
                "memory any more. Load it again."
            )
        self._file = open_file(path)
        self.modules: dict[str, ModuleTensors] = {}
        for key in sorted(self._file.names):
            self._add(key)

    def close(self) -> None:
        """Unmaps the file; views of it stay valid."""
        self._file.close()

    def _add(self, key: str) -> None:
        match = _KEY.fullmatch(key)
        if match is None:
            raise ModelLoadError(f"The adapter's tensor {key} is none that PEFT's LoRA has; save it in PEFT's format.")
        module = plain_name(match["module"])
        kind = next(kind for kind in _KINDS if match[kind] is not None)
        tensors = self.modules.get(module)
        if tensors is None:
            name = full_name(match["module"])
            tensors = ModuleTensors(module, self.config.scale(name), self.config.trained_tokens(name), name)
            self.modules[module] = tensors
        if kind in tensors.by_kind:
            raise ModelLoadError(f"The adapter has {tensors.keys[kind]} and {key} for the same module.")
        tensors.by_kind[kind] = self._file.read(key, None, torch.float32)
        tensors.keys[kind] = key


def find_weights(folder: Path) -> Path:
    """Returns the file of an adapter's tensors. Raises ModelLoadError if there is none."""
    found = next((folder / name for name in WEIGHTS_NAMES if (folder / name).is_file()), None)
    if found is None:
        raise ModelLoadError(f"{folder} has no {WEIGHTS_NAMES[0]}. Finish the download.")
    return found


def full_name(module: str) -> str:
    """A module's name in the base model, by which PEFT's patterns look for it."""
    return _without_inner(module.removeprefix("base_model.model."))


def plain_name(module: str) -> str:
    """A module's name without the leading components that trainers add or leave out."""
    parts = _without_inner(module).split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        parts = parts[1:]
    return ".".join(parts)


def is_of_media(module: str) -> bool:
    """Returns True for the name of a module in a tower, or between one and the language model."""
    return any(not _MEDIA.isdisjoint(part.split("_")) for part in module.split("."))


def _without_inner(module: str) -> str:
    return ".".join(part for part in module.split(".") if part not in _INNER)

"""Reads adapter_config.json of PEFT: what the tensors of an adapter mean."""

import math
import re
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from quire.core import checkpoint_file
from quire.core.errors import ModelLoadError
from quire.core.wire.adapters import CONFIG_NAME, LAYER_TYPES

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` that change the base model's weights when training begins."""


class PeftConfig(Struct, frozen=True):
    """The fields of adapter_config.json that matter after training."""

    peft_type: str = "LORA"
    r: int = 8
    lora_alpha: float = 8
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    use_rslora: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    modules_to_save: list[str] | None = None
    init_lora_weights: bool | str | None = True
    layer_replication: Any = None
    use_qalora: bool = False
    use_bdlora: Any = None
    arrow_config: Any = None
    alora_invocation_tokens: list[int] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    token_indices: list[int] = []
    ensure_weight_tying: bool = False
    target_parameters: list[str] | None = None

    @classmethod
    def read(cls, folder: Path) -> "PeftConfig":
        """Reads the file in `folder`.

        Raises:
            ModelLoadError: there is none, it is damaged, or it asks for what is not served.
        """
        path = folder / CONFIG_NAME
        if not path.is_file():
            raise ModelLoadError(f"{folder} has no {CONFIG_NAME}, so it is no adapter that PEFT has saved.")
        content = checkpoint_file.read_json(path)
        given = {name: value for name, value in content.items() if value is not None}
        try:
            config = msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise ModelLoadError(f"{path}: {error}. Save the adapter again.") from None
        config._check(path)
        return config

    def rank(self, module: str) -> int:
        """The rank of a module's weights, by its name in the base model."""
        return self.rank_pattern.get(_pattern_of(self.rank_pattern, module), self.r)

    def trained_tokens(self, module: str) -> list[int]:
        """The tokens whose rows of a module's weight are trained, by its name in the base model."""
        indices = self.trainable_token_indices or self.token_indices
        if isinstance(indices, list):
            return indices
        return next((each for name, each in indices.items() if module == name or module.endswith(f".{name}")), [])

    def scale(self, module: str) -> float:
        """The factor of the product of a module's weights."""
        alpha = self.alpha_pattern.get(_pattern_of(self.alpha_pattern, module), self.lora_alpha)
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def _check(self, path: Path) -> None:
        if self.peft_type not in LAYER_TYPES:
            raise ModelLoadError(
                f"{path}: adapters of the type {self.peft_type!r} are not served; {', '.join(LAYER_TYPES)} are."
            )
        if isinstance(self.init_lora_weights, str) and self.init_lora_weights.lower().startswith(_CHANGES_BASE):
            raise ModelLoadError(
                f"{path}: training began with other base weights (init_lora_weights {self.init_lora_weights!r}). "
                "Save the adapter with path_initial_model_for_weight_conversion, which makes a plain one of it."
            )
        unserved = {
            "layer_replication": self.layer_replication,
            "use_qalora": self.use_qalora,
            "use_bdlora": self.use_bdlora,
            "arrow_config": self.arrow_config,
        }
        if asked := [name for name, value in unserved.items() if value]:
            raise ModelLoadError(f"{path}: {asked[0]} is not served; merge the adapter into its base model.")


def _pattern_of(patterns: dict[str, Any], module: str) -> str:
    """The first pattern that matches a module's whole name, or an end of it after a dot; else the name."""
    return next((each for each in patterns if re.match(rf"(.*\.)?({each})$", module)), module)

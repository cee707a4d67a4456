"""The tokens that a sequence may have, by what config.json says of positions and of rotary scaling."""

from pathlib import Path
from typing import Any

from quire.core.errors import ConfigError

_STATE_EXTENDED = ("gemma3", "gemma3_text", "gemma3n", "gemma3n_text")
"""Model types whose configurations give the extended length, for every kind of scaling."""

_BEHIND_PADDING = (
    "camembert", "data2vec-text", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
"""Model types whose sequences begin behind the position of padding, which has the number of its token."""
_PREDICTING = ("prophetnet",)
"""Such model types whose last position is that of the token to be predicted."""
_FIXED_PADDING = {"mpnet": 1}
"""Those of them whose position of padding is the same whatever its token."""


def context_length(config: dict[str, Any], positions: int, path: Path) -> int:
    """The context length in tokens, including the extension by rotary scaling.

    Args:
        positions: the length that `config` states.
        path: of the file of `config`, for messages.

    Raises:
        ConfigError: the scaling is no object, or the padding token's id no number that leaves positions.
    """
    rope = _rope(config, path)
    if config.get("model_type") in _STATE_EXTENDED:
        return positions
    if config.get("model_type") in _PREDICTING:
        return positions - 1 - _first_position({"pad_token_id": 0, **config}, positions - 1, path)
    if config.get("model_type") in _BEHIND_PADDING:
        return positions - _first_position(config, positions, path)
    kind, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("factor")
    if kind not in ("linear", "dynamic", "yarn") or not isinstance(factor, (int, float)):
        return positions  # llama3 and longrope give the extended length already
    if kind == "yarn":
        # Qwen's configs give the original length in both fields, DeepSeek's give the extended length in the first.
        return max(positions, int(rope.get("original_max_position_embeddings", positions) * factor))
    return int(positions * factor)


def _first_position(config: dict[str, Any], positions: int, path: Path) -> int:
    padding = _FIXED_PADDING.get(config["model_type"], config.get("pad_token_id", 1))
    if not isinstance(padding, int) or not 0 <= padding < positions - 1:
        raise ConfigError(
            f"{path}: pad_token_id must be a number from 0 to {positions - 2}, since sequences of such models "
            f"begin behind the position that it names, got {padding!r}."
        )
    return padding + 1


def _rope(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The checkpoint's rotary scaling; empty if it has none."""
    for key in ("rope_parameters", "rope_scaling"):
        if (value := config.get(key)) is not None and not isinstance(value, dict):
            raise ConfigError(f"{path}: {key} must be an object, got {value!r}.")
    return config.get("rope_parameters") or config.get("rope_scaling") or {}

"""Counts a checkpoint's layers for multi-token prediction (arXiv:2404.19737, 2412.19437), which are not the model's
own.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

_FIELDS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_LAYER = re.compile(r"(?:^|\.)mtp(?:_block|_layers|\.layers)\.(\d+)\.")


def num_mtp_layers(config: Mapping[str, Any], names: Iterable[str]) -> int:
    """Counts them, by config.json or else by the `names` of the checkpoint's tensors."""
    stated = next((config[field] for field in _FIELDS if config.get(field)), 0)
    return stated or len({found[1] for name in names if (found := _LAYER.search(name))})

"""Towers are loaded for what a model reads and prompts may have."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.core.config.multimodal import MultimodalConfig
from quire.frontend.launch.media import reads_media

SEES, HEARS = {"vision_config": {}, "image_token_id": 1}, {"audio_config": {}, "audio_token_id": 2}
LAYOUT: Any = SimpleNamespace(pipeline=1, sequence=1, shares_experts=False)


@pytest.mark.parametrize(
    ("config", "limits", "is_loaded"),
    [
        (SEES, {}, True), (SEES, {"image": 0}, False), (SEES, {"audio": 0}, True),
        (HEARS, {"image": 0}, True), (HEARS, {"audio": {"count": 0}}, False),
        ({**SEES, **HEARS}, {"image": 0}, True), ({**SEES, **HEARS}, {"image": 0, "audio": 0}, False),
    ],
)  # fmt: skip
def test_a_limit_of_no_items_leaves_towers_out(
    config: dict[str, Any], limits: dict[str, Any], is_loaded: bool, tmp_path: Path
) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{}")
    spec: Any = SimpleNamespace(path=str(tmp_path), config_json=config)
    assert reads_media(MultimodalConfig(limit_mm_per_prompt=limits), spec, LAYOUT) == is_loaded

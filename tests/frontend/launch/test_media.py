"""Towers are loaded for what a model reads and prompts may have."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.core.config.multimodal import MultimodalConfig
from quire.core.errors import ConfigError
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
    spec: Any = SimpleNamespace(path=str(tmp_path), config_json=config, is_encoder=False)
    assert reads_media(MultimodalConfig(limit_mm_per_prompt=limits), spec, LAYOUT) == is_loaded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_mm_per_prompt": {"smell": 1}}, "'smell' is no kind of item"),
        ({"limit_mm_per_prompt": {"image": {"count": 2, "length": 5}}}, "image has no 'length'; it has count, width"),
        ({"limit_mm_per_prompt": {"image": {"width": 0}}}, "width must be a whole number above 0"),
        ({"limit_mm_per_prompt": {"video": {"count": -1}}}, "video must be a whole number from 0"),
        ({"media_io_kwargs": {"document": {"pages": 3}}}, "document has no 'pages'; it has dpi and max_pages"),
        ({"media_io_kwargs": {"document": {"max_pages": True}}}, "max_pages must be a whole number above 0"),
        ({"media_io_kwargs": {"image": {"rgba_background_color": [1, 2]}}}, "three whole numbers"),
        ({"media_io_kwargs": {"video": {"fps": float("nan")}}}, "fps must be a number above 0"),
    ],
)
def test_options_that_there_are_not_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MultimodalConfig(**options)


def test_sizes_beside_a_limit_change_nothing() -> None:
    limits = {"image": {"count": 2, "width": 64, "height": 64}, "video": {"num_frames": 8}, "audio": {"length": 160}}
    config = MultimodalConfig(limit_mm_per_prompt=limits)
    assert [config.limit_of(kind) for kind in ("image", "video", "audio")] == [2, 999, 999]

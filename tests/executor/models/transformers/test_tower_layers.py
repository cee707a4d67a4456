"""Our layers and attention in towers: what is replaced, and that rows stay those of the library."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForImageTextToText

from quire.core.wire.media import Array, MediaItem
from quire.executor.memory.dry_build import held_bytes
from quire.executor.models.base import MediaRows, ReadsMedia
from tests.executor.paged_driver import load_model, transformers_spec
from tests.executor.thread_group import ThreadGroup, on_every_rank
from tests.executor.weights.stored_formats import FORMATS
from tests.image_checkpoints import write_checkpoint

torch.set_num_threads(1)

FORMS: dict[str, dict[str, Any]] = {
    "llava": {"pixel_values": (1, 3, 56, 56)},
    "gemma3": {"pixel_values": (1, 3, 32, 32)},
    "internvl": {"pixel_values": (2, 3, 32, 32)},
    "idefics3": {"pixel_values": (1, 2, 3, 32, 32)},
    "mistral3": {"pixel_values": (1, 3, 32, 48), "image_sizes": [[32, 48]]},
    "qwen2_vl": {"pixel_values": (48, 3 * 2 * 14**2), "image_grid_thw": [[1, 6, 8]]},
    "qwen2_5_vl": {"pixel_values": (120, 3 * 2 * 14**2), "image_grid_thw": [[1, 10, 12]]},
    "qwen3_vl": {"pixel_values": (48, 3 * 2 * 16**2), "image_grid_thw": [[1, 6, 8]]},
    "qwen3_5": {"pixel_values": (48, 3 * 2 * 16**2), "image_grid_thw": [[1, 6, 8]]},
}


def make_arrays(family: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(form, generator=generator) if isinstance(form, tuple) else torch.tensor(form)
        for name, form in FORMS[family].items()
    }


def item_of(arrays: dict[str, torch.Tensor], num_rows: int, digest: bytes = b"one") -> MediaItem:
    made = {
        name: Array(str(value.numpy().dtype), tuple(value.shape), value.numpy().tobytes())
        for name, value in arrays.items()
    }
    return MediaItem("image", digest, [(0, num_rows)], arrays=made)


def rows_of(features: Any) -> torch.Tensor:
    made = getattr(features, "pooler_output", features)
    if isinstance(made, torch.Tensor):
        return made.reshape(-1, made.shape[-1])
    return torch.cat([rows_of(each) for each in made])


def expected_rows(folder: Path, arrays: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    reference: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
    own = {name: value.to(dtype) if value.is_floating_point() else value for name, value in arrays.items()}
    with torch.inference_mode():
        return rows_of(reference.model.get_image_features(**own, return_dict=True))


@pytest.mark.turns(4)
@pytest.mark.parametrize("family", FORMS)
def test_rows_are_those_of_the_library(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention is ours as well: all of it, once a layer and an image, in windows too."""
    folder, arrays = write_checkpoint(tmp_path, family), make_arrays(family)
    expected = expected_rows(folder, arrays, torch.float32)
    model = load_model(transformers_spec(folder), reads_media=True)
    assert isinstance(model, ReadsMedia)
    monkeypatch.setattr(nn.Linear, "forward", lambda *_: pytest.fail("a linear layer of the library's runs"))
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *_, **__: pytest.fail("torch's attention runs")
    )
    with torch.inference_mode():
        [made] = model.encode_media([item_of(arrays, len(expected))])
    torch.testing.assert_close(made.rows, expected, atol=1e-4, rtol=1e-4)
    assert model.media is not None
    assert model.media.activation_size > 0
    assert model.media.num_deep == (0 if made.deep is None else len(made.deep))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_rows_in_16_bits(family: str, tmp_path: Path) -> None:
    folder, arrays = write_checkpoint(tmp_path, family), make_arrays(family)
    expected = expected_rows(folder, arrays, torch.float32)
    spec = msgspec.structs.replace(transformers_spec(folder), dtype="bfloat16")
    model = load_model(spec, reads_media=True)
    assert isinstance(model, ReadsMedia)
    with torch.inference_mode():
        [made] = model.encode_media([item_of(arrays, len(expected))])
    assert made.rows.dtype == torch.bfloat16
    assert float((made.rows.float() - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_ranks_divide_weights_or_items(family: str, tmp_path: Path) -> None:
    """All ranks get all rows. An item that cannot be read does not hold up the others."""
    folder, arrays = write_checkpoint(tmp_path, family), make_arrays(family)
    expected = expected_rows(folder, arrays, torch.float32)
    spec, number = transformers_spec(folder), len(expected)
    odd = item_of({"pixel_values": torch.zeros(3)}, 2, b"odd")
    items = [item_of(arrays, number), odd, item_of(arrays, number, b"again")]
    num_bytes = {}
    for divides in (True, False):

        def on_rank(group: ThreadGroup, divides: bool = divides) -> tuple[list[MediaRows], int]:
            model = load_model(spec, reads_media=True, group=group, divides_towers=divides)
            assert isinstance(model, ReadsMedia)
            with torch.inference_mode():
                return model.encode_media(items), held_bytes(model)

        for made, num_bytes[divides] in on_every_rank(2, on_rank):
            for place in (0, 2):
                torch.testing.assert_close(made[place].rows, expected, atol=1e-4, rtol=1e-4)
            assert bool(made[1].rows.isnan().all())
            assert [each.deep is not None for each in made] == [family == "qwen3_vl"] * 3
    assert num_bytes[True] < num_bytes[False]


def test_towers_are_quantized_where_the_checkpoint_is(tmp_path: Path) -> None:
    """Its layers take int8 codes as they are stored, and nothing is quantized at load."""
    plain, stored = (write_checkpoint(tmp_path / name, "qwen2_5_vl") for name in ("plain", "stored"))
    weights = load_file(plain / "model.safetensors")
    codes = dict(weights)
    for name, weight in weights.items():
        if ".blocks." in name and weight.dim() == 2:
            scale = weight.abs().amax(1, keepdim=True) / 127
            codes[name] = (weight / scale).round().to(torch.int8)
            codes[f"{name}_scale"] = scale
            weights[name] = codes[name] * scale
    assert len(codes) > len(weights)
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    save_file(codes, stored / "model.safetensors", {"format": "pt"})
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**config, "quantization_config": FORMATS["ct-int8"].config}))
    arrays = make_arrays("qwen2_5_vl")
    expected = expected_rows(plain, arrays, torch.float32)
    models = [
        load_model(transformers_spec(stored), reads_media=True),
        load_model(transformers_spec(plain), reads_media=True),
        load_model(transformers_spec(plain), reads_media=True, quantization="int8"),
    ]
    for model in models:
        assert isinstance(model, ReadsMedia)
        with torch.inference_mode():
            [made] = model.encode_media([item_of(arrays, len(expected))])
        torch.testing.assert_close(made.rows, expected, atol=1e-4, rtol=1e-4)
    assert held_bytes(models[0]) < held_bytes(models[1])


def test_an_item_that_cannot_be_read_fails_alone(tmp_path: Path) -> None:
    folder, arrays = write_checkpoint(tmp_path, "qwen3_vl"), make_arrays("qwen3_vl")
    expected = expected_rows(folder, arrays, torch.float32)
    model = load_model(transformers_spec(folder), reads_media=True)
    assert isinstance(model, ReadsMedia)
    odd = {**arrays, "image_grid_thw": torch.tensor([[1, 5, 7]])}
    with torch.inference_mode():
        broken, made = model.encode_media([item_of(odd, 8, b"odd"), item_of(arrays, len(expected))])
    torch.testing.assert_close(made.rows, expected, atol=1e-4, rtol=1e-4)
    assert made.deep is not None
    assert broken.deep is not None
    assert bool(broken.rows.isnan().all())
    assert broken.rows.shape == (8, expected.shape[1])
    assert broken.deep.shape == (2, 8, expected.shape[1])

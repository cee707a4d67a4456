"""Scales that checkpoints bring for cached keys and values: which are used, and that codes are those of the scales."""

import contextlib
import json
import shutil
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as with_fields
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.core.config.cache import CacheConfig, KVCacheDtype
from quire.core.errors import ModelLoadError
from quire.executor.inspection.pack_writer import pack_model
from quire.executor.memory.dry_build import dry_build
from quire.executor.models.registry import build_model
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.weights.packing import PackAtLoad
from quire.executor.weights.quantization.cache_scheme import CacheScales
from quire.ops.cache_rows import LARGEST_CODE
from quire.ops.cpu.onednn import OneDnnLinear
from quire.ops.eager.backend import EagerBackend
from tests.executor.doubles import make_config
from tests.executor.inspection.starts import config_of, outputs
from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model, model_context, read_spec
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)

PROMPT = list(range(5, 37))
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20}
SCALES = torch.tensor([[[0.7, 1.3], [1.9, 0.6]], [[1.1, 0.4], [0.5, 1.7]]])
"""[layers, keys and values, heads]: the greatest numbers that they reach; keys and values of the model exceed some."""
E4M3, INT8 = CacheScales("fp8_e4m3", True), CacheScales("int8", True)
ATOL = {"fp8_e4m3": 2e-4, "int8": 4e-3}
"""Attention to int8 multiplies integers, to which it rounds queries."""
DTYPES: dict[KVCacheDtype, torch.dtype] = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}

NAMES = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "vllm": ("attn.k_scale", "attn.v_scale"),
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
    "modelopt-fused": ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    "quark": ("k_proj.output_scale", "v_proj.output_scale"),
}


def with_scales(source: Path, folder: Path, scales: Tensor, names: tuple[str, str], **config: Any) -> Path:
    """The checkpoint `source` with `scales` [layers, 2] or [layers, 2, heads] of keys and values."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for layer, both in enumerate(scales):
        for name, each in zip(names, both, strict=True):
            shaped = each.view(-1, 1, 1) if each.dim() else each
            tensors[f"model.layers.{layer}.self_attn.{name}"] = shaped.clone()
    save_file(tensors, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(text))
    return folder


class RoundedKeysAndValues(EagerBackend):
    """Plain torch over a cache of float32, whose keys and values are first rounded by the formula of the codes."""

    def __init__(self, scales: Tensor, dtype: torch.dtype) -> None:
        super().__init__(OneDnnLinear())
        self._scales = cycle(scales)  # layers store one after another
        self._dtype = dtype

    def write_kv(
        self, k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, scales: Tensor | None = None
    ) -> None:
        most = LARGEST_CODE[self._dtype]
        rounded = []
        for x, scale in zip((k, v), next(self._scales).unsqueeze(-1), strict=True):
            codes = (x / scale).clamp(-most, most)
            codes = codes.to(self._dtype).float() if self._dtype.is_floating_point else codes.round()
            rounded.append(codes * scale)
        super().write_kv(*rounded, kv_cache, slot_mapping)


def expected_logits(folder: Path, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """By the plain formula; `scales` [layers, 2, heads]."""
    ops, spec = RoundedKeysAndValues(scales, dtype), read_spec(folder)
    context = replace(model_context(spec), ops=ops, packing=PackAtLoad(ops))
    with contextlib.closing(context.weights), torch.inference_mode():
        driver = PagedDriver(build_model(spec, context), 1, 40)
    driver.ops = ops
    return driver.step({0: PROMPT})[0]


def logits(folder: Path, cache: CacheScales, group: ParallelGroup | None = None) -> Tensor:
    model = load_model(read_spec(folder), group=group, cache_scales=cache)
    return PagedDriver(model, 1, 40, dtype=DTYPES[cache.dtype]).step({0: PROMPT})[0]


@pytest.mark.parametrize("cache", [E4M3, INT8], ids=["fp8", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2"])
def test_codes_are_those_of_the_scales(
    family: Any, cache: CacheScales, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """A scale for each head, on one rank, on two, and on four, of which two each hold the same head."""
    source = checkpoint(family, **SIZES)
    scales = SCALES / LARGEST_CODE[DTYPES[cache.dtype]]
    folder = with_scales(source, tmp_path / "scaled", scales, NAMES["compressed-tensors"])
    expected = expected_logits(source, scales, DTYPES[cache.dtype])
    for own in (logits(source, cache), logits(folder, cache._replace(are_used=False))):
        assert (own - expected).abs().amax() > 1e-2, "scales of each token would show"
    ranks = [rank for size in (2, 4) for rank in on_every_rank(size, lambda group: logits(folder, cache, group))]
    for got in (logits(folder, cache), *ranks):
        torch.testing.assert_close(got, expected, atol=ATOL[cache.dtype], rtol=0)


@pytest.mark.parametrize("names", NAMES)
def test_scales_of_a_layer_have_many_names(names: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    source, scales = checkpoint("llama", **SIZES), SCALES[:, :, 0] / 448
    folder = with_scales(source, tmp_path / "scaled", scales, NAMES[names])
    expected = expected_logits(source, scales.unsqueeze(-1).expand(-1, -1, 2), torch.float8_e4m3fn)
    torch.testing.assert_close(logits(folder, E4M3), expected, atol=2e-4, rtol=0)


def test_keys_and_values_may_share_a_scale(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source, scales = checkpoint("llama", **SIZES), torch.tensor([[0.9, 0.9], [1.2, 1.2]]) / 448
    folder = with_scales(source, tmp_path / "scaled", scales, ("kv_scale", "kv_scale"))
    expected = expected_logits(source, scales.unsqueeze(-1).expand(-1, -1, 2), torch.float8_e4m3fn)
    torch.testing.assert_close(logits(folder, E4M3), expected, atol=2e-4, rtol=0)


FP8 = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
COMPRESSED = {"quant_method": "compressed-tensors"}


@pytest.mark.parametrize(
    ("config", "name", "expected"),
    [
        (COMPRESSED | FP8, "auto", E4M3),
        (COMPRESSED | FP8, "fp8", E4M3),
        (COMPRESSED | FP8, "fp8_inc", E4M3),
        (COMPRESSED | FP8, "fp8_per_token_head", CacheScales("fp8_e4m3", False)),
        (COMPRESSED | FP8, "fp8_e5m2", CacheScales("fp8_e4m3", False)),  # whose greatest code is another
        (COMPRESSED | FP8, "int8", CacheScales("fp8_e4m3", False)),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "int8", INT8),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "fp8", CacheScales("int8", False)),
        ({"quant_method": "quark"}, "auto", CacheScales("fp8_e4m3", False)),
        ({"quant_method": "quark"}, "fp8", E4M3),
        ({"quant_method": "fp8"}, "fp8_e4m3", E4M3),
        (None, "fp8", None),
    ],
)
def test_scales_are_used_for_the_type_that_they_are_for(
    config: dict[str, Any] | None, name: KVCacheDtype, expected: CacheScales | None
) -> None:
    plain = make_config()
    spec = with_fields(plain.spec, hf_config={} if config is None else {"quantization_config": config})
    cache = CacheConfig(kv_cache_dtype=name)
    assert CacheScales.of(with_fields(plain, spec=spec, cache=cache)) == expected
    calculated = CacheScales.of(with_fields(plain, spec=spec, cache=with_fields(cache, calculate_kv_scales=True)))
    assert calculated == (expected and expected._replace(are_used=False))


@pytest.mark.parametrize(
    ("cache", "scales", "message"),
    [
        (E4M3, torch.tensor([[0.0, 1.0]]), r"self_attn\.k_scale holds a scale .* --calculate-kv-scales takes"),
        (E4M3, torch.tensor([[1.0, torch.inf]]), r"self_attn\.v_scale holds a scale that is not positive and finite"),
        (INT8, torch.ones(1, 2, 3), r"k_scale has the shape \(3, 1, 1\), not one scale or 2\. --calculate-kv-scales"),
    ],
)
def test_scales_that_cannot_be_meant_are_refused(
    cache: CacheScales, scales: Tensor, message: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = with_scales(checkpoint("llama", **SIZES), tmp_path / "scaled", scales, NAMES["compressed-tensors"])
    with pytest.raises(ModelLoadError, match=message):
        load_model(read_spec(folder), cache_scales=cache)
    load_model(read_spec(folder), cache_scales=cache._replace(are_used=False))


def test_bytes_are_counted_with_scales(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Which have no values then."""
    names = NAMES["compressed-tensors"]
    spec = read_spec(with_scales(checkpoint("llama", **SIZES), tmp_path / "scaled", SCALES, names))
    assert dry_build(spec, model_context(spec, cache_scales=E4M3)).kv_layers


def test_packed_files_keep_scales_for_a_later_start(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """They are packed with keys and values in 32 bits."""
    scheme = {"quant_method": "fp8", "modules_to_not_convert": [f"layers.{layer}." for layer in range(2)]}
    names = NAMES["compressed-tensors"]
    folder = with_scales(
        checkpoint("llama", **SIZES), tmp_path / "scaled", SCALES / 448, names, quantization_config=scheme
    )
    pack_model(config_of(folder), tmp_path / "packed")
    options = {"kv_cache_dtype": "fp8"}
    assert outputs(tmp_path / "packed", **options) == outputs(folder, **options)
    own = outputs(folder, calculate_kv_scales=True, **options)
    assert own == outputs(folder, kv_cache_dtype="fp8_per_token_head") != outputs(folder, **options)

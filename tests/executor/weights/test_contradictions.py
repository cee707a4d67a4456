"""Checkpoints whose tensors and configuration contradict each other, or whose configuration is none, are refused."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.core.errors import ModelLoadError
from tests.executor.paged_driver import Checkpoints, load_model, read_spec
from tests.executor.weights.test_quantized_checkpoints import FORMATS, write

torch.set_num_threads(1)


class Damage(NamedTuple):
    """A format, what becomes of the tensors of one kind (None: they are lost), and of the configuration's fields."""

    form: str
    message: str
    kind: str = ""
    change: Callable[[Tensor], Tensor] | None = None
    config: Mapping[str, Any] = MappingProxyType({})


_AS = r"of a layer with 64 outputs and 64 inputs is "
_ASKS = r", where config.json's quantization_config asks for "
_HAS = "config.json's quantization_config has "

DAMAGES: dict[str, Damage] = {
    "half-of-the-scales": Damage(
        "ct-fp8-channel", rf"q_proj.weight_scale {_AS}float32 \[32, 1\]{_ASKS}.* \(no blocks\). Take the config.json",
        "weight_scale", lambda scales: scales[: len(scales) // 2],
    ),
    "no-size-of-blocks": Damage(
        "fp8-block", rf"q_proj.weight_scale_inv {_AS}float32 \[2, 2\]{_ASKS}.*no blocks",
        config={"weight_block_size": None},
    ),
    "another-size-of-blocks": Damage(
        "fp8-block", rf"q_proj.weight_scale_inv {_AS}float32 \[2, 2\]{_ASKS}.*blocks of 24 x 24",
        config={"weight_block_size": [24, 24]},
    ),
    "blocks-of-one-number": Damage("fp8-block", f"{_HAS}128 as weight_block_size", config={"weight_block_size": 128}),
    "blocks-of-one-side": Damage("fp8-block", rf"{_HAS}\[128\] as weight_block", config={"weight_block_size": [128]}),
    "blocks-of-nothing": Damage("fp8-block", rf"{_HAS}\[0, 8\] as weight_blo", config={"weight_block_size": [0, 8]}),
    "awq-without-zero-points": Damage("awq", rf"q_proj.qzeros {_AS}missing{_ASKS}zero points \(zero_point", "qzeros"),
    "gptq-without-zero-points": Damage("gptq-zeros", rf"q_proj.qzeros {_AS}missing{_ASKS}zero points \(sym", "qzeros"),
    "words-without-zero-points": Damage(
        "ct-w4-zeros", rf"q_proj.weight_zero_point {_AS}missing{_ASKS}zero points \(symmetric", "weight_zero_point"
    ),
    "bytes-without-zero-points": Damage(
        "ct-int8-zeros", rf"q_proj.weight_zero_point {_AS}missing{_ASKS}zero points \(symmetric", "weight_zero_point"
    ),
    "an-input-without-a-group": Damage(
        "gptq-order", rf"q_proj.g_idx of .* is int32 \[64\]{_ASKS}groups below 2.* largest is 6", "g_idx",
        lambda groups: groups + 5,
    ),
    "awq-as-gptq": Damage(
        "awq", rf"q_proj.qweight {_AS}int32 \[64, 8\]{_ASKS}GPTQ's words", config={"quant_method": "gptq"}
    ),
    "gptq-as-awq": Damage("gptq-4", r"q_proj.qweight.* is \[8, 64\]", config={"quant_method": "awq"}),
    "gptq-with-one-scale": Damage("gptq-4", "q_proj.scales", "scales", lambda scales: scales.flatten()[0].clone()),
    "words-with-one-scale": Damage(
        "ct-w4-group", "q_proj.weight_scale", "weight_scale", lambda scales: scales.flatten()[0].clone()
    ),
    "too-few-words": Damage("ct-w4-group", "q_proj.weight_packed", "weight_packed", lambda words: words[:, :-1]),
    "fewer-sparse-numbers": Damage(
        "ct-sparse", r"q_proj.compressed .*numbers, as many as bitmask", "compressed", lambda numbers: numbers[:-1]
    ),
    "sparse-numbers-of-other-rows": Damage("ct-sparse24", "two of four", "compressed", lambda kept: kept[:, :-1]),
    "bits-in-quotes": Damage("gptq-4", f"{_HAS}'4' as bits, which has to be a whole number", config={"bits": "4"}),
    "groups-in-quotes": Damage("awq", f"{_HAS}'32' as group_size", config={"group_size": "32"}),
    "a-list-of-groups": Damage("ct-int8", rf"{_HAS}\[1, 2\] as config_groups", config={"config_groups": [1, 2]}),
    "a-list-of-lists-of-layers": Damage("quark-int8", rf"{_HAS}\[\[5\]\] as exclude", config={"exclude": [[5]]}),
    "layers-left-out-by-number": Damage("quark-int8", f"{_HAS}5 as exclude, which has to", config={"exclude": 5}),
    "a-pattern-that-is-none": Damage(
        "ct-int8", rf"{_HAS}'re:.*\(' as a layer, .* regular expression \(missing \)", config={"ignore": ["re:.*("]}
    ),
    "one-layer-left-out": Damage("ct-int8", f"{_HAS}'lm_head' as ignore", config={"ignore": "lm_head"}),
    "signed-words-without-zero-points": Damage(
        "quark-int4-zeros", rf"q_proj.weight_zero_point {_AS}missing{_ASKS}zero points \(.*symmetric: false",
        "weight_zero_point",
    ),
    "signed-outputs-without-zero-points": Damage(
        "quark-int4-channel-zeros", rf"q_proj.weight_zero_point {_AS}missing{_ASKS}zero points \(symmetric: false",
        "weight_zero_point",
    ),
    "zero-points-of-some-layers": Damage(
        "quark-int4-zeros", rf"layers.0.self_attn.o_proj.weight_zero_point {_AS}missing{_ASKS}zero points \(symm",
        "weight_zero_point", config={
            "global_quant_config": {"weight": {"dtype": "int4", "group_size": 32}},
            "layer_quant_config": {
                "*0.self_attn.o_proj": {"weight": {"dtype": "int4", "group_size": 32, "symmetric": False}}
            },
        },
    ),
    "zero-points-of-a-layer-by-its-name": Damage(
        "quark-int4-zeros", rf"layers.0.self_attn.o_proj.weight_zero_point {_AS}missing{_ASKS}zero points \(symm",
        "weight_zero_point", config={
            "global_quant_config": {"weight": {"dtype": "int4", "group_size": 32}},
            "layer_quant_config": {
                "*.o_proj": {"weight": {"dtype": "int4", "group_size": 32}},
                "model.layers.0.self_attn.o_proj": {"weight": {"dtype": "int4", "group_size": 32, "symmetric": False}},
            },
        },
    ),
    "zero-points-of-groups-of-bytes": Damage(
        "quark-int8-groups-zeros", rf"q_proj.weight_zero_point {_AS}missing{_ASKS}zero points", "weight_zero_point"
    ),
    "quark-rounded-twice": Damage(
        "quark-int4", "rounded twice, here to int8 and int4",
        config={"global_quant_config": {"weight": [{"dtype": "int8"}, {"dtype": "int4"}]}},
    ),
    "quark-rounded-twice-in-some-layers": Damage(
        "quark-int8", "rounded twice, here to int8 and int4",
        config={"layer_quant_config": {"*q_proj": {"weight": [{"dtype": "int8"}, {"dtype": "int4"}]}}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_the_error_names_the_tensor_or_the_field(name: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    form, message, kind, change, config = DAMAGES[name]
    packed, _ = write(checkpoint("llama"), tmp_path, FORMATS[form])
    load_model(read_spec(packed))
    tensors = load_file(packed / "model.safetensors")
    for each in [each for each in tensors if kind and each.endswith(f"_proj.{kind}")]:
        tensor = tensors.pop(each)
        if change is not None:
            tensors[each] = change(tensor).contiguous()
    save_file(tensors, packed / "model.safetensors")
    whole = json.loads((packed / "config.json").read_text())
    whole["quantization_config"] |= config
    (packed / "config.json").write_text(json.dumps(whole))
    with pytest.raises(ModelLoadError, match=message):
        load_model(read_spec(packed))


def test_a_configuration_is_an_object(checkpoint: Checkpoints, tmp_path: Path) -> None:
    packed, _ = write(checkpoint("llama"), tmp_path, FORMATS["awq"])
    config = json.loads((packed / "config.json").read_text()) | {"quantization_config": "awq"}
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="'awq' as quantization_config, which has to be an object"):
        load_model(read_spec(packed))


def test_no_zero_points_where_there_need_be_none(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Layers of another group may be symmetric."""
    form = FORMATS["ct-w4-group"]
    first, second = ({"weights": {"num_bits": 4, "type": "int", "symmetric": value}} for value in (False, True))
    groups = {"config_groups": {"0": first | {"targets": ["re:.*o_proj"]}, "1": second | {"targets": ["Linear"]}}}
    packed, _ = write(checkpoint("llama"), tmp_path, form._replace(config=form.config | groups))
    load_model(read_spec(packed))

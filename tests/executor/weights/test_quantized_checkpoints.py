"""Checkpoints that are quantized already: in each format, a model computes with the numbers that its layers have."""

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.core.config.load import LoadConfig
from quire.core.errors import ModelLoadError
from quire.executor.layers.linear import GatedLinear
from quire.executor.memory.dry_build import dry_build, held_bytes
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.weights.quantization import log_once, sharding
from quire.executor.weights.quantization.formats.by_name import canonical, read_format
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard, Stored, StoredRows
from quire.ops import bind
from quire.ops.cpu.quantized_panels import QuantizedPanelWeight
from quire.ops.quantized import QuantizedWeight
from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model, model_context, read_spec
from tests.executor.thread_group import on_every_rank
from tests.executor.weights import stored_formats, stored_modelopt, stored_quark, stored_torchao
from tests.executor.weights.stored_formats import Format

torch.set_num_threads(1)

FORMATS = stored_formats.FORMATS | stored_modelopt.FORMATS | stored_quark.FORMATS | stored_torchao.FORMATS
PROMPT = list(range(5, 37))
LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.(.*proj|experts.*)\.weight")


def write(source: Path, root: Path, form: Format, layers: re.Pattern[str] = LINEAR) -> tuple[Path, Path]:
    """The checkpoint `source` with its layers in a format, and one with the same numbers."""
    packed, plain = root / "packed", root / "plain"
    for folder in (packed, plain):
        shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(source / "model.safetensors")
    numbers = dict(tensors)
    for name in sorted(tensors):
        if layers.fullmatch(name):
            out, size = tensors.pop(name).shape
            stored, numbers[name] = form.write(out, size, generator)
            tensors |= {f"{name.removesuffix('.weight')}.{kind}": each for kind, each in stored.items()}
    for folder, content in ((packed, tensors), (plain, numbers)):
        save_file({name: each.contiguous() for name, each in content.items()}, folder / "model.safetensors")
    config = json.loads((packed / "config.json").read_text()) | {"quantization_config": form.config}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


def logprobs_of(folder: Path, **options: Any) -> Callable[[ParallelGroup], Tensor]:
    def logprobs(group: ParallelGroup) -> Tensor:
        driver = PagedDriver(load_model(read_spec(folder), group=group, **options), 1, 40)
        return driver.step({0: PROMPT})[0].log_softmax(-1)

    return logprobs


ODD_SIZES = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 8, "head_dim": 20}
"""A rank of two has 20 keys, which cut a word of eight outputs, and 80 inputs, which cut a group or block of 32."""

_MULTIPLES_OF_64 = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "head_dim": 32}
ROUND_SIZES = dict.fromkeys(
    ("awq-gemv-fast", "awq-gemv-fast-autoawq", "ct-marlin-24", "ct-marlin-24-bytes"), _MULTIPLES_OF_64
)
"""For formats that have no others: of 64 inputs, and of 64 outputs."""


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", FORMATS)
def test_outputs_are_those_of_the_numbers(name: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    """On one rank and on two, whose parts cut groups, blocks and words."""
    packed, plain = write(checkpoint("qwen3", **ROUND_SIZES.get(name, ODD_SIZES)), tmp_path, FORMATS[name])
    expected = logprobs_of(plain)(ParallelGroup())
    assert expected.exp().amax() < 0.9, "a model that is sure of one token hides differences"
    logprobs = logprobs_of(packed)
    for got in (logprobs(ParallelGroup()), *on_every_rank(2, logprobs)):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


ONE_OF_EACH_LAYOUT = (
    *(
        "ct-w4-zeros",
        "ct-w4-order",
        "ct-sparse24-fp8",
        "ct-mxfp4",
        "ct-nvfp4-e5m3",
        "ct-mxfp6",
        "ct-marlin-24",
        "quark-mxfp6",
        "quark-int4-of-fp8",
        "quark-int4-zeros-of-zero",
        "quark-int4-channel-zeros-of-zero",
        "quark-int8-zeros-of-zero",
        "quark-int8-groups",
        "quark-int8-groups-zeros",
        "quark-int2",
        "quark-int3",
        "quark-int2-zeros",
        "quark-int3-zeros",
        "quark-uint4-channel",
        "quark-int4-channel-zeros",
        "modelopt-w8a16",
        "modelopt-w4a8-mxfp4",
        "modelopt-w4a8-nvfp4",
        "ct-int8",
        "gptq-3",
        "gptq-zeros",
        "gptq-order",
        "gptq-mixed",
    ),
    *(
        "awq",
        "awq-5",
        "awq-8",
        "awq-gemv",
        "awq-gemv-fast",
        "fp8-block",
        "modelopt-nvfp4",
        "bnb-int8",
        "bnb-nf4",
        "hqq-4",
    ),
    *(
        "torchao-int8",
        "torchao-int4-in-bytes",
        "torchao-int6-zeros",
        "torchao-fp8",
        "torchao-int4",
        "torchao-int4-tiles",
    ),
    *("torchao-mxfp4", "torchao-nvfp4"),
)


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", ONE_OF_EACH_LAYOUT)
def test_bytes_are_counted_before_a_weight_is_read(name: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    packed, plain = write(checkpoint("llama", **ROUND_SIZES.get(name, {})), tmp_path, FORMATS[name])
    spec = read_spec(packed)
    model = load_model(spec)
    counted = held_bytes(dry_build(spec, model_context(spec)))
    assert counted == pytest.approx(held_bytes(model), rel=0.001), "but for tables of sixteen values"
    assert held_bytes(model) < 0.7 * held_bytes(load_model(read_spec(plain)))
    if name == "gptq-mixed":
        return  # its files say which layers are larger
    dummy = load_model(spec, load=LoadConfig(load_format="dummy"))
    assert held_bytes(dummy) == pytest.approx(held_bytes(model), rel=0.02), "known from config.json alone"
    assert PagedDriver(dummy, 1, 40).step({0: PROMPT})[0].isfinite().all()


OTHER_MODELS: dict[str, tuple[str, str, str]] = {
    "rows-of-a-fused-layer": ("phi3", "ct-w4-zeros", r"model\.layers\.\d+\.(self_attn|mlp)\..*proj\.weight"),
    "rows-in-another-order": ("glm", "gptq-zeros", r"model\.layers\.\d+\.(self_attn|mlp)\..*proj\.weight"),
    "experts": ("qwen3_moe", "gptq-zeros", r"model\.layers\.\d+\.(self_attn|mlp\.experts)\..*proj\.weight"),
    "a-layer-that-is-no-product": ("deepseek_v3", "fp8-block", r"model\.layers\.\d+\.(self_attn|mlp)\..*proj\.weight"),
    "the-head-too": ("llama", "gptq-zeros", r"(model\.layers\.\d+\.(self_attn|mlp)\..*proj|lm_head)\.weight"),
    "the-head-in-bytes": ("llama", "ct-int8", r"(model\.layers\.\d+\.(self_attn|mlp)\..*proj|lm_head)\.weight"),
    "some-layers-are-plain": ("llama", "awq", r"model\.layers\.\d+\.(self_attn\.[kqo]|mlp\.(gate|down))_proj\.weight"),
}
"""A family, a format, and the layers that have it."""


@pytest.mark.turns(4)
@pytest.mark.parametrize("case", OTHER_MODELS)
def test_other_models_compute_with_the_numbers(case: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    family, name, layers = OTHER_MODELS[case]
    sizes = {"moe_intermediate_size": 64} if "moe" in family or "deepseek" in family else {}
    source = checkpoint(family, hidden_size=64, intermediate_size=96, **sizes)
    packed, plain = write(source, tmp_path, FORMATS[name], re.compile(layers))
    expected = logprobs_of(plain)(ParallelGroup())
    logprobs = logprobs_of(packed)
    for got in (logprobs(ParallelGroup()), *on_every_rank(2, logprobs)):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_a_quantized_head_keeps_its_codes(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Also where the last rank has rows past the vocabulary's end."""
    source = checkpoint("llama", vocab_size=321)
    folders = [
        write(source, tmp_path / name, FORMATS["ct-int8"], re.compile(rf"(model\.layers\.\d+\.mlp\..*{head})\.weight"))
        for name, head in (("both", "proj|lm_head"), ("layers", "proj"))
    ]
    both, layers = (held_bytes(load_model(read_spec(packed))) for packed, _ in folders)
    assert layers - both == pytest.approx(321 * 64 * 3, rel=0.1), "a byte a number instead of four"
    expected = logprobs_of(folders[0][1])(ParallelGroup())
    for got in on_every_rank(2, logprobs_of(folders[0][0])):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


PLAIN_LAYERS = {
    "gptq-order": (
        2,
        r"some layers are stored in an order of their inputs that ranks cut: they are kept in float32",
    ),
    "hqq-columns": (
        1,
        r"in groups that are not neighbouring inputs of one output \(axis 0\): they are kept in float32",
    ),
    "uneven": (1, r"in groups of different lengths: they are kept in float32"),
    "gptq-4": (2, None),
}
"""Formats, numbers of ranks, and what the log says of layers that become plain numbers."""


@pytest.mark.parametrize("name", PLAIN_LAYERS)
def test_what_cannot_stay_short_is_said_once(
    name: str, checkpoint: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log_once._log.cache_clear()  # another test may have heard it
    num_ranks, message = PLAIN_LAYERS[name]
    form = Format(FORMATS["gptq-order"].config, uneven_groups) if name == "uneven" else FORMATS[name]
    packed, plain = write(checkpoint("qwen3"), tmp_path, form, LINEAR)
    expected, logprobs = logprobs_of(plain)(ParallelGroup()), logprobs_of(packed)
    with caplog.at_level("INFO", logger="quire"):
        for got in [logprobs(ParallelGroup())] if num_ranks == 1 else on_every_rank(num_ranks, logprobs):
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    said = [record.getMessage() for record in caplog.records if "some layers are stored" in record.getMessage()]
    assert len(said) == (0 if message is None else 1)
    assert message is None or re.search(message, said[0])


@pytest.mark.parametrize("layers", ["gate|down", "up"])
def test_gates_and_ups_that_differ_are_products_of_their_own(
    layers: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """In codes and plain, each as it is stored."""
    wanted = re.compile(rf"model\.layers\.\d+\.mlp\.({layers})_proj\.weight")
    source = checkpoint("llama", hidden_act="gelu", mlp_bias=True)
    packed, plain = write(source, tmp_path, FORMATS["awq"], wanted)
    expected, spec = logprobs_of(plain)(ParallelGroup()), read_spec(packed)
    for got in (logprobs_of(packed)(ParallelGroup()), *on_every_rank(2, logprobs_of(packed))):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    context = model_context(spec)
    gate, up = (LinearPart(f"model.layers.0.mlp.{name}_proj", 96, Shard(0, 0, 96)) for name in ("gate", "up"))
    with contextlib.closing(context.weights):
        mixed = GatedLinear(context, gate, up, 64, "silu", bias=True)
    assert held_bytes(mixed) < 96 * 64 * 4 * 1.25, "floats of one of both, and codes"


class _OneLayer:
    """See `TensorSource`: the tensors of the layer `x`."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        tensor = self._tensors[name.removeprefix("x.")]
        assert tensor.shape == shape
        return tensor if dtype is None else tensor.to(dtype)

    def find(self, name: str, otherwise: Stored | None = None) -> Stored | None:
        tensor = self._tensors.get(name.removeprefix("x."))
        return None if tensor is None else Stored(tuple(tensor.shape), tensor.dtype)

    def locate(self, layer: str, out_features: int) -> StoredRows:
        return StoredRows(self, layer, out_features)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_multiplied_by_in_its_codes_or_says_that_it_is_not(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    log_once._log.cache_clear()
    form, ops = FORMATS[name], bind("cpu")
    tensors, numbers = form.write(64, 128, torch.Generator().manual_seed(0))
    scheme = read_format(canonical(form.config["quant_method"]), form.config, torch.float32)
    with caplog.at_level("INFO", logger="quire"):
        weight = scheme.read_weight(_OneLayer(tensors), LinearPart("x", 64, Shard(0, 0, 64)), 128)
        packed = ops.pack_linear(weight)
    is_as_stored = isinstance(weight, QuantizedWeight) and isinstance(packed, QuantizedPanelWeight)
    said = re.search("some layers are stored|dequantized by plain torch", caplog.text)
    assert (said is None) == (is_as_stored and "sparse" not in name and "marlin" not in name)
    x = torch.randn(3, 128)
    torch.testing.assert_close(ops.linear(x, packed), x @ numbers.t(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("out", [40, 48, 72])
@pytest.mark.parametrize("bits", [5, 6, 7])
def test_words_of_awq_may_end_after_the_last_code(bits: int, out: int) -> None:
    form = FORMATS["awq-5"]
    tensors, numbers = stored_formats.awq_wide(bits)(out, 64, torch.Generator().manual_seed(0))
    scheme = read_format("awq", form.config | {"bits": bits}, torch.float32)
    weight = scheme.read_weight(_OneLayer(tensors), LinearPart("x", out, Shard(0, 0, out)), 64)
    torch.testing.assert_close(sharding.dequantized(weight, torch.float32), numbers)


@pytest.mark.parametrize(("name", "shape"), [("quark-int4", (4, 8)), ("quark-int4-channel", (8,))])
def test_zero_points_that_are_zero_cost_nothing(name: str, shape: tuple[int, ...]) -> None:
    """Quark may have them in symmetric layers, too."""
    tensors, numbers = FORMATS[name].write(64, 128, torch.Generator().manual_seed(0))
    tensors["weight_zero_point"] = torch.zeros(shape, dtype=torch.int32)
    scheme = read_format("quark", FORMATS[name].config, torch.float32)
    weight = scheme.read_weight(_OneLayer(tensors), LinearPart("x", 64, Shard(0, 0, 64)), 128)
    assert isinstance(weight, QuantizedWeight)
    assert weight.offsets is None
    torch.testing.assert_close(sharding.dequantized(weight, torch.float32), numbers)


def uneven_groups(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """GPTQ whose first groups have 24 and 40 inputs."""
    tensors, _ = FORMATS["gptq-4"].write(out, size, generator)
    codes = (tensors["qweight"].unsqueeze(1) >> torch.arange(0, 32, 4).view(1, -1, 1)).flatten(0, 1) & 15
    groups = torch.arange(size) // 32
    groups[24:32] = 1
    tensors["g_idx"] = groups.int()
    return tensors, ((codes - 8) * tensors["scales"].float()[groups]).t()


_INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_BYTES = {"dtype": "int8"}
_DYNAMIC = {"_type": "Int8DynamicActivationInt8WeightConfig", "_data": {}, "_version": 2}


@pytest.mark.parametrize(
    ("name", "config", "has_byte_inputs"),
    [
        ("ct-int8", {}, False),
        ("ct-int8", {"config_groups": {"0": {"weights": _INT8, "input_activations": _INT8}}}, True),
        ("ct-int8-zeros", {"config_groups": {"0": {"weights": _INT8, "input_activations": _INT8}}}, True),
        (
            "ct-int8",
            {"config_groups": {"0": {"weights": _INT8, "input_activations": _INT8}, "1": {"weights": _INT8}}},
            False,
        ),
        ("quark-int8", {}, False),
        ("quark-int8", {"global_quant_config": {"weight": _BYTES, "input_tensors": _BYTES}}, True),
        ("torchao-int8", {}, False),
        ("torchao-int8", {"quant_type": {"default": _DYNAMIC}}, True),
    ],
)
def test_checkpoints_say_whether_activations_have_8_bits(
    name: str, config: dict[str, Any], has_byte_inputs: bool, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    form = FORMATS[name]
    packed, _ = write(checkpoint("llama"), tmp_path, form._replace(config=form.config | config))
    context = model_context(read_spec(packed))
    part = LinearPart("model.layers.0.mlp.gate_proj", 96, Shard(0, 0, 96))
    with contextlib.closing(context.weights):
        weight = context.scheme.read_weight(context.weights, part, 64)
    assert isinstance(weight, QuantizedWeight)
    assert weight.has_byte_inputs == has_byte_inputs


def test_a_layout_that_is_not_read_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Numbers of eight bits without their scales would be wrong ones."""
    packed, _ = write(checkpoint("llama"), tmp_path, FORMATS["fp8-block"]._replace(config=FORMATS["awq"].config))
    with pytest.raises(ModelLoadError, match=r"q_proj.weight holds float8_e4m3fn, in none of the ways that are read"):
        load_model(read_spec(packed))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"_weight_qdata": torch.zeros(64, 8, dtype=torch.int32)}, r"q_proj: torchao has its codes as int32 \[64, 8\]"),
    ],
)
def test_what_is_not_read_of_torchao_is_refused(
    tensors: dict[str, Tensor], message: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    form = Format(
        stored_torchao.FORMATS["torchao-int4"].config,
        lambda out, size, _: ({name: each.clone() for name, each in tensors.items()}, torch.zeros(out, size)),
    )
    packed, _ = write(checkpoint("llama"), tmp_path, form)
    with pytest.raises(ModelLoadError, match=message):
        load_model(read_spec(packed))

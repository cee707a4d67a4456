"""Formats that are made at load by kind of layer and by name (`--quantization-config`)."""

import contextlib
import fnmatch
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from quire.core.config.model import ModelConfig
from quire.core.config.quantization import QuantizationConfig, QuantizationName
from quire.core.errors import ModelLoadError
from quire.executor.memory.dry_build import dry_build
from quire.executor.weights.quantization.per_layer import PerLayer
from quire.executor.weights.quantization.scheme import LinearPart, LinearScheme
from quire.executor.weights.quantization.schemes import choose_scheme
from quire.executor.weights.readers import TensorSource
from quire.frontend.launch.keywords import read_keywords
from quire.ops.linear import LinearWeight
from quire.ops.quantized import QuantizedWeight
from tests.checkpoints import Family
from tests.executor.paged_driver import Checkpoints, model_context, read_spec

HEAD = "lm_head"


def asked(base: QuantizationName | None, **config: Any) -> QuantizationConfig:
    model: ModelConfig = read_keywords({"quantization": base, "quantization_config": config}).model
    assert model.quantization_config is not None
    return model.quantization_config.over(base)


class Recorded:
    """See `LinearScheme`: another one, with the form of each weight by the name of its layer, or its experts."""

    def __init__(self, scheme: LinearScheme) -> None:
        self.found: dict[str, set[str]] = {}
        self.read_rows, self.read_dequantized, self._scheme = scheme.read_rows, scheme.read_dequantized, scheme

    def read_weight(self, source: TensorSource, part: LinearPart, in_features: int) -> LinearWeight:
        return self._put(part.mixture or part.name, self._scheme.read_weight(source, part, in_features))

    def for_head(self, rows: LinearWeight, part: LinearPart) -> LinearWeight:
        return self._put(HEAD, self._scheme.for_head(rows, part))

    def _put(self, name: str, weight: LinearWeight) -> LinearWeight:
        kind = "plain"
        if isinstance(weight, QuantizedWeight):
            kind = "int8" if weight.codes.dtype == torch.int8 else "int4" if weight.table is not None else "fp8"
        self.found.setdefault(name.removeprefix("model.layers."), set()).add(kind)
        return weight


def forms(
    checkpoint: Checkpoints, family: Family, config: QuantizationConfig, implementation: Any = "auto", **sizes: Any
) -> dict[str, str]:
    """What the layers become, by name."""
    spec = msgspec.structs.replace(read_spec(checkpoint(family, **sizes)), implementation=implementation)
    context = model_context(spec, quantization=config)
    recorded = Recorded(context.scheme)
    with contextlib.closing(context.weights), torch.inference_mode():
        dry_build(spec, replace(context, scheme=recorded))
    assert all(len(kinds) == 1 for kinds in recorded.found.values())
    return {name: next(iter(kinds)) for name, kinds in recorded.found.items()}


@pytest.mark.parametrize(
    ("family", "implementation", "experts"),
    [
        ("qwen3_moe", "auto", "0.mlp.experts"),
        ("gpt_oss", "auto", "0.mlp.experts"),
        ("granite_moe", "auto", "0.block_sparse_moe.experts"),
        ("mixtral", "transformers", "0.mlp.experts"),
    ],
)
def test_experts_and_other_layers_have_formats_of_their_own(
    family: Family, implementation: str, experts: str, checkpoint: Checkpoints
) -> None:
    def found(config: QuantizationConfig) -> tuple[str, str]:
        kinds = forms(checkpoint, family, config, implementation)
        return kinds["0.self_attn.q_proj"], kinds[experts]

    assert found(asked(None, linear="fp8_per_channel", moe={"weight": "int8"})) == ("fp8", "int8")
    assert found(asked(None, moe="fp8")) == ("plain", "fp8")
    assert found(asked("int8", linear={"weight": None, "activation": None})) == ("plain", "int8")
    assert found(asked("int8", ignore=[experts.removeprefix("0.")])) == ("int8", "plain")
    assert found(asked(None, targets={"re:.*experts$": "int8"})) == ("plain", "int8")


def test_layers_are_named_by_names_parts_and_patterns(checkpoint: Checkpoints) -> None:
    names = [f"{layer}.{name}_proj" for layer in (0, 1) for name in ("self_attn.q", "self_attn.o", "mlp.down")]

    def plain(*ignore: str) -> list[str]:
        found = forms(checkpoint, "llama", asked("int8", ignore=list(ignore)))
        return [name for name in (*names, HEAD) if found[name] == "plain"]

    assert plain() == []
    assert plain("model.layers.1.self_attn.o_proj") == ["1.self_attn.o_proj"]
    assert plain("o_proj", HEAD) == ["0.self_attn.o_proj", "1.self_attn.o_proj", HEAD]
    assert plain(r"re:.*\.0\..*[qo]_proj") == ["0.self_attn.q_proj", "0.self_attn.o_proj"]
    assert plain(r"re:(?i)MODEL\.LAYERS\.0\..*[qo]_proj") == ["0.self_attn.q_proj", "0.self_attn.o_proj"]
    assert plain("model.layers.1.*.[qo]_proj") == ["1.self_attn.q_proj", "1.self_attn.o_proj"]
    assert plain("self_attn.o_proj", r"re:.*\.0\..*o_proj", HEAD) == ["0.self_attn.o_proj", "1.self_attn.o_proj", HEAD]
    found = forms(checkpoint, "phi3", asked("int8", ignore=["model.layers.0.self_attn.qkv_proj"], targets={}))
    assert (found["0.self_attn.q_proj"], found["1.self_attn.q_proj"]) == ("plain", "int8"), "as it is stored"


def test_targets_give_each_pattern_a_format(checkpoint: Checkpoints) -> None:
    found = forms(checkpoint, "llama", asked("online", targets={"down_proj": "fp8", "self_attn": "int4"}))
    assert [found[f"1.{name}"] for name in ("mlp.down_proj", "mlp.up_proj", "self_attn.k_proj")] == [
        *("fp8", "plain", "int4")
    ]
    assert found[HEAD] == "plain"


def test_a_tied_head_is_ignored_by_its_own_name(checkpoint: Checkpoints) -> None:
    assert forms(checkpoint, "qwen3", asked("int8", ignore=["lm_head"]), tie=True)[HEAD] == "plain"


def test_patterns_for_no_layer_are_named(checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    spec = read_spec(checkpoint("llama"))
    context = model_context(spec, quantization=asked("int8", ignore=["o_proj", "attention.o"]))
    with contextlib.closing(context.weights), torch.inference_mode():
        dry_build(spec, context)
    assert isinstance(context.scheme, PerLayer)
    context.scheme.log_unquantized()
    [said] = [record.getMessage() for record in caplog.records]
    assert said.endswith("no linear layer and no experts are called attention.o")


def test_layers_to_which_two_patterns_give_different_formats_are_refused(checkpoint: Checkpoints) -> None:
    with pytest.raises(ModelLoadError, match=r"q_proj and re:\.\*q_.* are both for the layer model\.layers\.0\."):
        forms(checkpoint, "llama", asked(None, targets={"q_proj": "int8", "re:.*q_": "fp8"}))


def test_patterns_are_compiled_once(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    translate = fnmatch.translate

    def translate_and_note(name: str) -> str:
        compiled.append(name)
        return translate(name)

    monkeypatch.setattr(fnmatch, "translate", translate_and_note)
    forms(checkpoint, "llama", asked("int8", ignore=["*.o_proj", "k_proj"]))
    assert sorted(compiled) == ["*.o_proj", "k_proj"]


def test_a_quantized_checkpoint_is_refused(checkpoint: Checkpoints) -> None:
    spec = read_spec(checkpoint("llama"), quantization_config={"quant_method": "gptq"})
    with pytest.raises(ModelLoadError, match=r"is quantized \(gptq\), and --quantization-config is for weights of 16"):
        choose_scheme(spec, asked("int8", ignore=["o_proj"]))

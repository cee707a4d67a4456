"""The memory of a model, counted before it is loaded, against loaded models."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec.structs import asdict
from msgspec.structs import replace as replace_fields

from quire import ops
from quire.core.config.load import LoadConfig
from quire.core.config.model import ModelConfig
from quire.core.config.quantization import Quantization
from quire.core.config.resolved import ModelSpec, SchedulerLimits
from quire.executor.memory.dry_build import dry_build, held_bytes
from quire.executor.memory.plan import longest_row_bytes, workspace_bytes
from quire.executor.memory.rank_memory import RankMemory
from quire.executor.models.architectures import ARCHITECTURES
from quire.executor.models.base import Model
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.weights.packing import PackAtLoad
from quire.frontend.checkpoint.model_spec import read_model_spec
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from tests.checkpoints import FAMILIES, Family
from tests.executor.doubles import make_config
from tests.executor.models import test_hybrid_models
from tests.executor.models.test_deepseek_moe import make_deepseek_moe
from tests.executor.models.tiny_encoder_decoders import FAMILIES as ENCODER_DECODERS
from tests.executor.models.tiny_encoders import ENCODERS, T5
from tests.executor.models.tiny_models import write_checkpoint
from tests.executor.paged_driver import Checkpoints, load_model, model_context, read_spec

DUMMY = LoadConfig(load_format="dummy")
TINY: dict[str, tuple[str, Callable[[Path, str], object]]] = {
    "cpmant": ("CpmAntForCausalLM", write_checkpoint),
    "deepseek": ("DeepseekForCausalLM", lambda folder, _: make_deepseek_moe(folder)),
    "deepseek_v4": ("DeepseekV4ForCausalLM", write_checkpoint),
    "exaone": ("ExaoneForCausalLM", write_checkpoint),
    "sarvam_moe": ("SarvamMoEForCausalLM", write_checkpoint),
    "xlm": ("XLMWithLMHeadModel", write_checkpoint),
}
"""Families with a way of their own to make a checkpoint: type → (architecture, the way)."""


def dry_model(
    spec: ModelSpec,
    group: ParallelGroup | None = None,
    *,
    is_plain: bool = False,
    quantization: Quantization | None = None,
) -> Model:
    """`is_plain`: for the backend that packs nothing."""
    context = model_context(spec, group=group, load=DUMMY, quantization=quantization)
    if is_plain:
        eager = EagerBackend(PlainLinear())
        context = replace(context, ops=eager, packing=PackAtLoad(eager))
    with contextlib.closing(context.weights), torch.inference_mode():
        return dry_build(spec, context)


def test_every_architecture_is_tried() -> None:
    """Here, or where the checkpoints of recurrent models and of encoders are made; some have several names."""
    tried = {architecture for _, architecture in FAMILIES.values()}
    tried |= {architecture for architecture, _ in TINY.values()}
    tried |= {architecture for _, architecture, _ in test_hybrid_models.VARIANTS.values()}
    tried |= {f"{stem}Model" for _, stem, _ in ENCODERS.values()}
    tried |= {architecture for _, architecture, _ in ENCODER_DECODERS.values()}
    tried |= {f"{stem}EncoderModel" for _, stem, _ in T5.values()} | {"JinaBertModel"}
    tried |= {"InternLM2ForCausalLM", "NVEmbedModel"}  # tests/executor/models/test_hub_decoders.py
    tried |= {"JinaForRanking"}  # tests/frontend/pooling/test_lists.py
    tried |= {"CLIPModel", "SiglipModel", "Siglip2Model"}  # tests/test_two_encoders.py
    tried |= {"VisionEncoderDecoderModel"}  # tests/test_image_decoders.py
    tried |= {"WhisperForConditionalGeneration"}  # tests/executor/models/test_whisper.py
    assert {ARCHITECTURES[architecture] for architecture in tried} == set(ARCHITECTURES.values())


CASES: list[list[tuple[bool, int, str, Quantization | None]]] = [
    [(False, 1, "float32", None), (True, 2, "bfloat16", "int8")],
    [(False, 2, "bfloat16", None), (True, 1, "float32", "int8")],
    [(False, 1, "bfloat16", "int8"), (True, 2, "float32", None)],
    [(False, 2, "float32", "int8"), (True, 1, "bfloat16", None)],
]
"""Families take them in turns: each meets every value, and each two values meet in some family."""


@pytest.mark.parametrize(
    ("family", "tie", "num_ranks", "dtype", "quantization"),
    [(family, *case) for number, family in enumerate(FAMILIES) for case in CASES[number % len(CASES)]],
)
def test_bytes_are_those_of_the_loaded_model(
    family: Family,
    tie: bool,
    num_ranks: int,
    dtype: str,
    quantization: Quantization | None,
    checkpoint: Checkpoints,
) -> None:
    spec = read_spec(checkpoint(family, tie=tie, vocab_size=301, num_hidden_layers=6), dtype=dtype)
    for rank in range(num_ranks):
        group = ParallelGroup(rank, num_ranks)
        counted = held_bytes(dry_model(spec, group, quantization=quantization))
        loaded = load_model(spec, group=group, load=DUMMY, quantization=quantization)
        assert counted == pytest.approx(held_bytes(loaded), rel=0.02)


@pytest.mark.turns(4)
@pytest.mark.parametrize("model_type", TINY)
def test_bytes_of_tiny_models_are_those_of_the_loaded_ones(model_type: str, tmp_path: Path) -> None:
    architecture, make = TINY[model_type]
    make(tmp_path, model_type)
    spec = read_model_spec(tmp_path, ModelConfig(model=str(tmp_path), dtype="float32"))
    for rank in range(2):
        group = ParallelGroup(rank, 2)
        model = load_model(spec, group=group, load=DUMMY)
        assert (type(model).__module__.removeprefix("quire.executor.models."), type(model).__name__) == ARCHITECTURES[
            architecture
        ]
        assert held_bytes(dry_model(spec, group)) == pytest.approx(held_bytes(model), rel=0.02)


def test_bytes_are_those_of_the_files(checkpoint: Checkpoints) -> None:
    folder = checkpoint("llama", dtype="bfloat16")
    spec = read_spec(folder, dtype="bfloat16")
    size = (folder / "model.safetensors").stat().st_size
    assert held_bytes(dry_model(spec, is_plain=True)) == pytest.approx(size, rel=0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tied_embeddings_count_once_where_the_head_has_rows(dtype: str, checkpoint: Checkpoints) -> None:
    """Of a head in a layout of oneDNN's no rows are taken."""
    spec = read_spec(checkpoint("llama", tie=True), dtype=dtype)
    backend = ops.bind("cpu")
    weight = torch.zeros(spec.vocab_size, spec.hidden_size, dtype=getattr(torch, dtype))
    twice = 0 if backend.has_rows(backend.pack_linear(weight)) else weight.nbytes
    plain = held_bytes(dry_model(spec, is_plain=True))
    assert held_bytes(dry_model(spec)) == pytest.approx(plain + twice, rel=0.01)


def test_int8_halves_the_weights_of_a_large_model() -> None:
    spec = llama(80, 8192, 28672, 64, 8)
    plain, small = (held_bytes(dry_model(spec, quantization=quantization)) for quantization in (None, "int8"))
    embedding = spec.vocab_size * spec.hidden_size * 2  # which stays in bfloat16
    assert small - embedding == pytest.approx((plain - embedding) / 2, rel=0.005)


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("unquantized.Unquantized()", 141e9),
        ("online.ONLINE['int8']", 71.6e9),
        ("formats.read_format('gptq', {'bits': 4, 'sym': False}, torch.bfloat16)", 42.7e9),
    ],
)
def test_a_dry_build_takes_neither_memory_nor_the_compiler(scheme: str, expected: float) -> None:
    """141 GB of weights; torch's compiler, which some operations on the meta device import, would take seconds."""
    script = f"""
import json, sys, torch
from quire.core.config.resolved import ModelSpec
from quire.executor.layers.context import ModelContext
from quire.executor.memory.dry_build import dry_build, held_bytes
from quire.executor.parallel.groups import ParallelGroup
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from quire.executor.weights.packing import PackAtLoad
from quire.executor.weights.quantization.formats import by_name as formats
from quire.executor.weights.quantization import online, unquantized
scheme = {scheme}
before = set(sys.modules)
spec = ModelSpec(**{asdict(llama(80, 8192, 28672, 64, 8))})
ops = EagerBackend(PlainLinear())
context = ModelContext(
    ops=ops, packing=PackAtLoad(ops), group=ParallelGroup(), dtype=torch.bfloat16, device=torch.device("cpu"),
    weights=None, scheme=scheme, layers=range(80), max_model_len=8192,
)
counted = held_bytes(dry_build(spec, context))
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]  # not that of the parent
print(json.dumps([counted, int(peak)]))
assert "torch._dynamo.convert_frame" not in set(sys.modules) - before
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counted, peak_kilobytes = json.loads(done.stdout)
    assert counted == pytest.approx(expected, rel=0.01)
    assert peak_kilobytes < 2_000_000


def test_a_dry_build_of_no_family_imports_the_compiler(checkpoint: Checkpoints) -> None:
    specs = [asdict(read_spec(checkpoint(family))) for family in FAMILIES]
    script = f"""
import sys, torch
from quire.core.config.resolved import ModelSpec
from quire.executor.layers.context import ModelContext
from quire.executor.memory.dry_build import dry_build
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.weights.packing import PackAtLoad
from quire.executor.weights.quantization.unquantized import Unquantized
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
ops = EagerBackend(PlainLinear())
for spec in [ModelSpec(**fields) for fields in {specs}]:
    dry_build(spec, ModelContext(
        ops=ops, packing=PackAtLoad(ops), group=ParallelGroup(), dtype=torch.float32, device=torch.device("cpu"),
        weights=None, scheme=Unquantized(), layers=range(spec.num_layers), max_model_len=128,
    ))
    assert "torch._dynamo" not in sys.modules, spec.architecture
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def llama(num_layers: int, hidden_size: int, intermediate_size: int, num_heads: int, num_kv_heads: int) -> ModelSpec:
    """A model without a checkpoint, in bfloat16."""
    return ModelSpec(
        path="", name="shape", architecture="LlamaForCausalLM", dtype="bfloat16", vocab_size=128_256,
        num_layers=num_layers, num_attention_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=hidden_size // num_heads, hidden_size=hidden_size, max_position_embeddings=8192, eos_token_ids=[],
        hf_config={"intermediate_size": intermediate_size, "max_position_embeddings": 8192}, config_json={},
    )  # fmt: skip


def test_plain_torch_on_an_accelerator_takes_larger_groups_of_rows() -> None:
    """Which a card of 8 GB has no room for beside the share that is planned with."""
    model, config = dry_model(spec := llama(3, 128, 512, 8, 2)), make_config()
    config = replace_fields(config, spec=spec)
    here, there = (
        RankMemory.of(config, [model], 0, 0, ops.bind(device), torch.device(device)).needs.workspace_bytes
        for device in ("cpu", "cuda")
    )
    scores, keys_and_values = 128 << 20, 64 << 20
    assert there - here > 2 * scores + keys_and_values


def test_workspace_is_what_a_layer_makes_of_the_largest_step() -> None:
    spec, limits = llama(3, 128, 512, 8, 2), SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=100)
    per_token = 2 * (4 * 128 + 3 * 512 + 16 * (3 * 8 + 2 * 2))
    rest = 4 * 8 * 128_256 * 4
    assert workspace_bytes(spec, dry_model(spec), limits, 0) == 100 * per_token + rest
    with_drafts = workspace_bytes(spec, dry_model(spec), limits, 0, checks_drafts=True)
    assert with_drafts == 100 * per_token + rest * 64 // 8  # as many rows as the scheduler gives drafts
    of_a_rank = 2 * (4 * 128 + 3 * 256 + 16 * (3 * 4 + 2 * 1))
    assert workspace_bytes(spec, dry_model(spec, ParallelGroup(1, 2)), limits, 7) == 100 * of_a_rank + rest + 7
    for size, group in ((2 * 64 * 2 * 16 * 2, ParallelGroup()), (2 * 64 * 1 * 16 * 2, ParallelGroup(1, 2))):
        assert longest_row_bytes(spec, dry_model(spec, group), 64) == size

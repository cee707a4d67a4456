"""Packed weights: a start that maps them gives the checkpoint's outputs to the bit, and wrong files are refused."""

import json
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from quire import LLM, SamplingParams
from quire.core.config.load import LoadConfig
from quire.core.errors import ModelLoadError, QuireError
from quire.executor.backends import bind
from quire.executor.inspection.load_plan import plan_load
from quire.executor.inspection.pack_writer import pack_model
from quire.executor.memory.dry_build import _tensors
from quire.executor.weights import packed_state
from quire.executor.weights.aligned_file import ALIGNMENT, writing
from quire.executor.weights.packed_state import MANIFEST, file_name, open_packed
from quire.frontend.cli.main import QUIRE
from quire.ops.cpu.fallbacks import Fallbacks
from quire.ops.cpu.onednn import OneDnnLinear
from quire.ops.eager.backend import EagerBackend
from tests.executor.inspection.starts import PROMPTS, config_of, outputs
from tests.executor.paged_driver import Checkpoints
from tests.executor.step.test_model_runner import engine_config, start_worker
from tests.executor.weights.stored_formats import FORMATS
from tests.executor.weights.test_quantized_checkpoints import write
from tests.gguf_files import make_gguf

torch.set_num_threads(1)
TOKENIZED = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
OPTIONS = {"max_num_seqs": 4, "max_model_len": 128, "kv_cache_memory_bytes": 50_000_000}


def pack(source: Path, folder: Path, *flags: str) -> Path:
    assert QUIRE.run("quire", ["pack", str(source), "--output", str(folder), *flags]) == 0
    return folder


def served(folder: Path, size: int = 1, **options: Any) -> list[Any]:
    """Tokens and the log-probabilities of the likeliest ones, with all their digits."""
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True)
    with LLM(str(folder), tensor_parallel_size=size, **OPTIONS, **options) as llm:
        sequences = [output.outputs[0] for output in llm.generate(TOKENIZED, params)]
    return [(each.token_ids, [{i: p.logprob for i, p in step.items()} for step in each.logprobs]) for each in sequences]


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"dtype": "bfloat16"}),
        ("qwen3", {"quantization": "int4"}),  # its head and its embedding are one tensor
        ("mixtral", {"quantization": "int4"}),
        ("gpt2", {"dtype": "float16"}),
        ("deepseek_v3", {}),
        ("qwen2", {"model_impl": "transformers"}),
    ],
)
def test_outputs_are_those_of_the_checkpoint(
    family: Any, options: dict[str, str], checkpoint: Checkpoints, tmp_path: Path
) -> None:
    source, folder = checkpoint(family, tie=family == "qwen3"), tmp_path / "packed"
    pack_model(config_of(source, **options), folder)
    own = {name: value for name, value in options.items() if name != "quantization"}
    assert outputs(folder, **own) == outputs(source, **options)


def test_every_rank_maps_its_own_file(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("mixtral", tie=True)
    folder = pack(source, tmp_path / "packed", "-tp", "2", "--quantization", "int8")
    assert served(folder, 2) == served(source, 2, quantization="int8")


def test_a_quantized_checkpoint_is_packed_as_it_is(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source, _ = write(checkpoint("qwen3"), tmp_path, FORMATS["gptq-order"])
    pack_model(config_of(source), tmp_path / "mapped")
    assert outputs(tmp_path / "mapped") == outputs(source)


def test_a_gguf_file_is_packed_as_it_is(checkpoint: Checkpoints, tmp_path: Path, gguf_cache: Path) -> None:
    file = tmp_path / "model.gguf"
    kinds = {"attn_v": "Q8_0", "attn": "Q4_0", "ffn": "Q8_0"}  # values are a product of their own
    make_gguf(checkpoint("llama"), file, "llama", kinds)
    folder, expected = pack(file, tmp_path / "mapped"), served(file)
    file.unlink()
    assert served(folder) == expected


@pytest.fixture(scope="module")
def packed(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with int4 weights, packed for one rank."""
    source = checkpoint("qwen3", tie=True)
    return pack(source, tmp_path_factory.mktemp("packed") / "model", "--quantization", "int4")


def copy_with(packed: Path, folder: Path, **changes: object) -> Path:
    """The packed model with another manifest."""
    shutil.copytree(packed, folder)
    manifest = json.loads((folder / MANIFEST).read_bytes())
    (folder / MANIFEST).write_text(json.dumps(manifest | changes))
    return folder


def test_a_start_packs_nothing_and_maps_the_file(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pack_linear", "pack_gated_linear"):
        monkeypatch.setattr(type(bind("cpu")), name, lambda *_: pytest.fail("a weight was packed"))
    worker = start_worker(engine_config(packed))
    path = packed / file_name(0)
    ranges = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if path.name in line
    ]
    weights = [tensor for tensor in _tensors(worker.get_model(), set()) if tensor.numel() >= 64 * 64]
    assert len(weights) > 4
    assert all(any(start <= tensor.data_ptr() < end for start, end in ranges) for tensor in weights)


def test_tensors_begin_at_cache_lines_and_other_programs_read_them(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3), "b": torch.randn(5, 7).bfloat16(), "c": torch.zeros(0), "d": torch.tensor(2.5)}
    path = tmp_path / "file.safetensors"
    with writing(path) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        assert writer.finish({"note": "text"}) == path.stat().st_size
    assert list(tmp_path.iterdir()) == [path]
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"note": "text"}
        for name, tensor in tensors.items():
            read = file.get_tensor(name)
            assert read.dtype == tensor.dtype
            assert torch.equal(read, tensor)
            assert read.data_ptr() % ALIGNMENT == 0


def test_a_packed_weight_is_in_memory_until_it_is_written(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    kind = type(bind("cpu"))

    def watch(name: str) -> None:
        pack_one = getattr(kind, name)

        def watched(*args: Any) -> Any:
            assert [each for ref in alive if (each := ref()) is not None] == []
            packed = pack_one(*args)
            alive.extend(weakref.ref(tensor) for tensor in _tensors(packed, set()))
            return packed

        monkeypatch.setattr(kind, name, watched)

    for name in ("pack_linear", "pack_gated_linear", "pack_experts"):
        watch(name)
    config = engine_config(checkpoint("mixtral"), quantization="int8")
    pack_model(config, tmp_path / "packed")
    assert len(alive) > 8


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"code": "0" * 20}, "was packed by another version of Quire"),
        ({"layout": "avx9"}, "was packed for a processor with avx9; this one has"),
        ({"tensor_parallel_size": 2}, "was packed for 2 ranks: start with --tensor-parallel-size 2"),
        ({"dtype": "bfloat16"}, "was packed with --dtype bfloat16: start with the same"),
        ({"model": ""}, "with another config.json, or with other --hf-overrides or --model-impl"),
        ({"dtype": 5}, "Cannot read .*packed.json.*Pack the model again"),
    ],
)
def test_files_for_something_else_are_refused(
    packed: Path, tmp_path: Path, changes: dict[str, object], text: str
) -> None:
    config = engine_config(copy_with(packed, tmp_path / "other", **changes))
    with pytest.raises(ModelLoadError, match=text):
        open_packed(config, 0, bind("cpu"))


def test_the_refusal_names_the_command_that_packs_again(packed: Path, checkpoint: Checkpoints, tmp_path: Path) -> None:
    config = engine_config(copy_with(packed, tmp_path / "other", code=""))
    source = checkpoint("qwen3", tie=True)
    with pytest.raises(ModelLoadError, match=f"quire pack {source} --output FOLDER --quantization int4$"):
        open_packed(config, 0, bind("cpu"))


def test_another_quantization_is_refused(packed: Path) -> None:
    with pytest.raises(ModelLoadError, match="was packed with --quantization int4: start without the option"):
        open_packed(engine_config(packed, quantization="int8"), 0, bind("cpu"))


def test_an_engine_refuses_files_of_another_level(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(QuireError, match="was packed for a processor with avx9; this one has"):
        served(copy_with(packed, tmp_path / "other", layout="avx9"))


def test_a_process_without_kernels_refuses_what_was_packed_for_them(packed: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"was packed for a processor with .*; this one has oneDNN"):
        open_packed(engine_config(packed), 0, EagerBackend(OneDnnLinear(Fallbacks())))


@pytest.mark.parametrize("kept", [4, 3000, -1])
def test_a_file_that_is_cut_short_is_refused(packed: Path, tmp_path: Path, kept: int) -> None:
    folder = copy_with(packed, tmp_path / "short")
    path = folder / file_name(0)
    os.truncate(path, kept if kept > 0 else path.stat().st_size - 64)
    with pytest.raises(ModelLoadError, match=r"packed-rank-0.safetensors is corrupt or cut short"):
        open_packed(engine_config(folder), 0, bind("cpu"))


def test_a_file_that_lacks_a_rank_is_refused(packed: Path, tmp_path: Path) -> None:
    folder = copy_with(packed, tmp_path / "lacking")
    (folder / file_name(0)).unlink()
    with pytest.raises(ModelLoadError, match=r"lacks packed-rank-0.safetensors. Copy all of its files"):
        open_packed(engine_config(folder), 0, bind("cpu"))


def test_a_folder_with_files_and_a_packed_one_are_refused(
    packed: Path, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ModelLoadError, match="holds files already; name a new folder with --output"):
        pack_model(config_of(checkpoint("llama")), tmp_path)
    with pytest.raises(ModelLoadError, match=r"--output: cannot make the folder .*mine.txt: it is a file. Name"):
        pack_model(config_of(checkpoint("llama")), tmp_path / "mine.txt")
    with pytest.raises(ModelLoadError, match=r"--output: cannot make the folder .*: Not a directory. Name another"):
        pack_model(config_of(checkpoint("llama")), tmp_path / "mine.txt" / "packed")
    with pytest.raises(ModelLoadError, match="is packed already"):
        pack_model(config_of(packed), tmp_path / "again")


def test_timelines_name_the_layers_of_a_packed_model(packed: Path, tmp_path: Path) -> None:
    profiler = {"profiler": "timeline", "torch_profiler_dir": str(tmp_path)}
    with LLM(str(packed), **OPTIONS, profiler_config=profiler) as llm:
        llm.start_profile()
        llm.generate(TOKENIZED, SamplingParams(max_tokens=2))
        llm.stop_profile()
    names = {event["name"] for path in tmp_path.glob("*.json") for event in json.loads(path.read_text())["traceEvents"]}
    assert len([name for name in names if name.startswith("linear 64x")]) >= 2


def test_the_plan_of_a_packed_model_counts_its_file(packed: Path) -> None:
    plan = plan_load(engine_config(packed), None)
    assert plan.ranks[0].weights_bytes == (packed / file_name(0)).stat().st_size
    assert plan.quantization == "int4"
    plain = plan_load(engine_config(packed, load=LoadConfig(load_format="dummy")), None)
    assert plan.num_parameters == plain.num_parameters


def test_a_start_from_dummy_weights_reads_no_packed_file(packed: Path) -> None:
    assert packed_state.is_packed(packed)
    config = engine_config(packed, load=LoadConfig(load_format="dummy"))
    assert open_packed(config, 0, bind("cpu")) is None

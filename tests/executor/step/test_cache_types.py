"""A worker whose keys and values are kept in few bits, driven by the real scheduler."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from quire import LLM, SamplingParams
from quire.core.config.cache import CacheConfig, KVCacheDtype
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.layer_kv import LatentKV, LayerKV
from quire.executor.memory.kv_dtypes import layer_dtypes
from quire.ops import bind
from tests.executor.doubles import make_config
from tests.executor.paged_driver import Checkpoints
from tests.executor.step import test_sameness as sameness
from tests.executor.step.test_model_runner import prompt_of, request, tokens_of
from tests.executor.step.test_sameness import Served

torch.set_num_threads(1)


def start(folder: Path, name: str, *skipped: str) -> Served:
    return sameness.start(
        folder,
        cache=CacheConfig(
            num_gpu_blocks_override=600, kv_cache_dtype=name, kv_cache_dtype_skip_layers=list(skipped)  # type: ignore[arg-type]
        ),
    )  # fmt: skip


@pytest.mark.parametrize(("dtype", "calls"), [(torch.bfloat16, 1), (torch.int8, 2)])
def test_plain_latents_are_stored_at_once(dtype: torch.dtype, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ops, kv, stored = bind("cuda"), LatentKV((24, 16)), []
    store_rows = ops.latent.store_rows
    monkeypatch.setattr(ops.latent, "store_rows", lambda *args: stored.append(store_rows(*args)))
    x, slots = torch.randn(3, 40).bfloat16().float(), torch.tensor([5, 1, 6])
    pages = torch.zeros(kv.cache_shape(ops, 2, 4, dtype), dtype=dtype)
    kv.store(ops, x, pages, slots)
    assert len(stored) == calls
    torch.testing.assert_close(kv.read(pages, slots, torch.float32), x, rtol=0, atol=0 if calls == 1 else 0.02)


def test_pages_take_the_bytes_of_codes_and_scales(checkpoint: Checkpoints) -> None:
    def page_bytes(name: str, *skipped: str) -> int:
        return start(checkpoint("llama", head_dim=64), name, *skipped).ready.kv_groups[0].page_bytes

    plain = page_bytes("auto")  # float32
    assert page_bytes("bfloat16") * 2 == plain
    assert page_bytes("int8") == page_bytes("fp8_e5m2") == plain * (64 + 4) // (64 * 4)
    assert page_bytes("int4") == plain * (32 + 4) // (64 * 4)
    assert page_bytes("int8", "0") == plain // 2 + plain // 2 * (64 + 4) // (64 * 4)


def test_skipped_layers_keep_the_type_of_the_model(checkpoint: Checkpoints) -> None:
    folder = checkpoint("gemma3", sliding_window=8, num_hidden_layers=6, tie=True)
    served = start(folder, "int8", "sliding_window", "5")
    runner = served.worker._runner
    assert runner is not None
    windows = [group.window is not None for group in served.ready.kv_groups for _ in group.layers]
    assert any(windows)
    dtypes = [cache.pages.dtype for cache in runner._forward._caches]
    assert dtypes == [torch.float32] * 6
    assert len(tokens_of(served.generate([request("a", prompt_of(1, 30))]))["a"]) == 24


@pytest.mark.parametrize("layer", ["2", "-1", "window"])
def test_a_layer_that_is_not_there_cannot_be_skipped(checkpoint: Checkpoints, layer: str) -> None:
    with pytest.raises(ModelLoadError, match=f"--kv-cache-dtype-skip-layers {layer}: give the number .* 0 to 1, or sl"):
        start(checkpoint("qwen3"), "int8", layer)


def test_latents_take_the_bytes_of_codes_and_two_scales(checkpoint: Checkpoints) -> None:
    def page_bytes(name: str) -> int:
        return start(checkpoint("deepseek_v2"), name).ready.kv_groups[0].page_bytes

    plain = page_bytes("auto")  # float32: 24 numbers and 12 that are rotated
    assert page_bytes("int8") == page_bytes("fp8") == plain * (24 + 4 + 12 + 4) // (36 * 4)
    assert page_bytes("int4") == plain * (12 + 4 + 6 + 4) // (36 * 4)


def test_latents_of_four_bits_are_of_an_even_size(checkpoint: Checkpoints) -> None:
    with pytest.raises(ModelLoadError, match=r"--kv-cache-dtype: .* latents of an even size, got 25; use one of eight"):
        start(checkpoint("deepseek_v2", kv_lora_rank=25), "int4")


def test_two_workers_give_the_tokens_of_one(checkpoint: Checkpoints) -> None:
    prompts = [prompt_of(i, 20 + 9 * i) for i in range(4)]
    requests = [request(str(i), prompt, max_tokens=16) for i, prompt in enumerate(prompts)]
    whole = tokens_of(start(checkpoint("qwen3"), "int8").generate(requests))
    options: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 22}
    options |= {"tensor_parallel_size": 2, "kv_cache_dtype": "int8", "skip_tokenizer_init": True}
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    with LLM(str(checkpoint("qwen3")), **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == list(whole.values())


FP8_SCHEME = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}
INT8_SCHEME = {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}


@pytest.mark.parametrize(
    ("config", "name", "expected"),
    [
        ({"quant_method": "compressed-tensors", **FP8_SCHEME}, "auto", torch.float8_e4m3fn),
        ({"quant_method": "compressed-tensors", **INT8_SCHEME}, "auto", torch.int8),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, "auto", torch.float32),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "auto", torch.float8_e4m3fn),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "auto", torch.float32),
        ({"quant_method": "modelopt", **FP8_SCHEME}, "auto", torch.float8_e4m3fn),
        ({"quant_method": "modelopt", "kv_cache_scheme": "fp8"}, "auto", torch.float8_e4m3fn),
        ({"quant_method": "modelopt", **FP8_SCHEME}, "bfloat16", torch.bfloat16),
        ({"quant_method": "quark", **FP8_SCHEME}, "auto", torch.float32),
    ],
)
def test_a_checkpoint_names_the_type(config: dict[str, Any], name: KVCacheDtype, expected: torch.dtype) -> None:
    plain = make_config()
    engine = replace(
        plain,
        spec=replace(plain.spec, hf_config={"quantization_config": config}),
        cache=CacheConfig(kv_cache_dtype=name),
    )
    exact = torch.float32 if name == "auto" else expected  # which takes no codes
    layers = [LayerKV(2, 16), LatentKV((64, 16)), LatentKV((64,), can_be_quantized=False)]
    assert layer_dtypes(engine, layers) == [expected, expected, exact]

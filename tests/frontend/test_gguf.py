"""GGUF files in whole engines: tokens are those of a checkpoint that holds the same numbers."""

from pathlib import Path

import httpx
import pytest

from quire import LLM, SamplingParams
from quire.core.config.engine_args import EngineArgs
from quire.executor.memory.dry_build import held_bytes
from quire.frontend.launch.inspection import plan_load
from quire.frontend.text.tokenizer import Tokenizer
from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model, read_spec
from tests.gguf_files import make_gguf
from tests.servers import ServerProcess

PROMPT = "The quick brown fox"
NUM_TOKENS = 12


@pytest.fixture
def files(checkpoint: Checkpoints, tmp_path: Path, gguf_cache: Path) -> tuple[Path, list[int], list[int]]:
    """(a GGUF file of mixed types, the prompt's ids, the ids of the answer to it)."""
    kinds = {"attn_q": "Q4_0", "attn_k": "Q4_0", "attn_v": "Q8_0", "attn_output": "Q5_1", "ffn": "Q4_0"}
    source = checkpoint("qwen3", intermediate_size=192)
    same = make_gguf(source, tmp_path / "tiny.gguf", "qwen3", kinds)
    prompt = Tokenizer.from_folder(source).encode(PROMPT)
    [answer] = PagedDriver(load_model(read_spec(same)), 1, 64).greedy([prompt], NUM_TOKENS)
    return tmp_path / "tiny.gguf", prompt, answer


def test_two_ranks_have_the_numbers_of_the_file(files: tuple[Path, list[int], list[int]]) -> None:
    """Which is asked for by the name of its format, in a folder that has other weights, too."""
    path, prompt, answer = files
    (path.parent / "model.safetensors").touch()
    llm = LLM(
        str(path.parent),
        quantization="gguf",
        load_format="gguf",
        dtype="float32",
        tensor_parallel_size=2,
        max_model_len=128,
        num_gpu_blocks_override=32,
    )
    try:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        [output] = llm.generate(PROMPT, params, use_tqdm=False)
    finally:
        llm.shutdown()
    assert list(output.prompt_token_ids or []) == prompt
    assert list(output.outputs[0].token_ids) == answer


def test_a_file_is_served_by_its_path(files: tuple[Path, list[int], list[int]], tmp_path: Path) -> None:
    path, _, answer = files
    server = ServerProcess(
        tmp_path, str(path), "--dtype", "float32", "--max-model-len", "128", "--num-gpu-blocks-override", "32"
    ).wait_until_ready()
    try:
        body = {
            "prompt": PROMPT,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        completion = httpx.post(f"{server.base_url}/v1/completions", json=body).json()
        messages = [{"role": "user", "content": "Hi"}]
        chat = httpx.post(f"{server.base_url}/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
    finally:
        server.stop()
    assert completion["choices"][0]["token_ids"] == answer
    assert completion["model"] == str(path)
    assert chat.status_code == 200


def test_a_plan_counts_the_bytes_of_the_blocks(files: tuple[Path, list[int], list[int]]) -> None:
    config, plan = plan_load(EngineArgs.from_flat(model=str(files[0]), dtype="float32"))
    assert plan.ranks[0].weights_bytes == pytest.approx(held_bytes(load_model(config.spec)), abs=1024)  # tables

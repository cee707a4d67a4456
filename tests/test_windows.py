"""Long requests in a real engine, with a model whose layers have windows, five in six: pages and tokens."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from quire.core.wire.protocol import EngineReady, FinishReason, SchedulerStats
from quire.frontend.launch.keywords import read_keywords
from quire.frontend.launch.setup import EngineSetup
from tests.checkpoints import VOCAB_SIZE
from tests.core.engine.null_engine import Stream, client_of

BLOCK_SIZE = 16
WINDOW = 64
NUM_TOKENS = 4096
MODEL = {"num_hidden_layers": 12, "sliding_window": WINDOW, "max_position_embeddings": 8192, "hidden_size": 32}


def test_a_long_request_holds_a_quarter_of_the_pages(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("gemma3", **MODEL)
    prompt = [(17 * i * i + i) % (VOCAB_SIZE - 3) + 3 for i in range(NUM_TOKENS)]
    stats: list[SchedulerStats] = []

    async def generate() -> tuple[EngineReady, list[int]]:
        options = {"device": "cpu", "max_num_batched_tokens": 256, "num_gpu_blocks_override": 1000}
        setup = EngineSetup.from_args(read_keywords({"model": str(folder), "block_size": BLOCK_SIZE, **options}), "llm")
        async with client_of(setup.launchers[0], on_stats=stats.append) as client:
            ready = await client.start()
            stream = Stream(client, "long", prompt, 60)
            assert await stream.finish_reason() in (FinishReason.LENGTH, FinishReason.STOP)
            return ready, stream.token_ids

    ready, token_ids = asyncio.run(generate())
    assert [(group.window, len(group.layers)) for group in ready.kv_groups] == [(None, 2), *[(WINDOW, 2)] * 5]

    most_pages = max(round(each.kv_cache_usage * ready.num_pages) for each in stats)
    with_full_caches = len(ready.kv_groups) * (NUM_TOKENS // BLOCK_SIZE)
    assert NUM_TOKENS // BLOCK_SIZE < most_pages <= with_full_caches / 4

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + token_ids]), logits_to_keep=len(token_ids) + 1).logits[0, :-1]
    assert token_ids == logits.argmax(dim=-1).tolist()
    assert len(set(token_ids)) > 8, "a degenerate output proves little"

"""Families with multi-head latent attention against Transformers, and the latent cache in the memory of a worker."""

from typing import Any

import pytest
import torch

from tests.executor.models.test_models import expected_logprobs, prompts
from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model, read_spec

torch.set_num_threads(1)

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 1.0,
}  # fmt: skip

YOUTU = {"pad_token_id": None}  # Transformers clears the padding token's embedding when it loads this family

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "youtu": ("youtu", YOUTU),
    "youtu-tied": ("youtu", {**YOUTU, "tie": True}),
    "youtu-biases": ("youtu", {**YOUTU, "attention_bias": True}),
    "youtu-direct-queries": ("youtu", {**YOUTU, "q_lora_rank": None}),
    "youtu-halves": ("youtu", {**YOUTU, "rope_interleave": False}),
    "youtu-yarn": ("youtu", {**YOUTU, "rope": YARN}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_log_probabilities_and_greedy_tokens_are_those_of_transformers(variant: str, checkpoint: Checkpoints) -> None:
    family, options = VARIANTS[variant]
    folder = checkpoint(family, **options)
    spec = read_spec(folder)
    model = load_model(spec)
    token_ids = prompts(1, spec.vocab_size)[0] + list(range(5, 70))

    # In chunks, the last tokens one by one, beside another request.
    driver = PagedDriver(model, 2, 200)
    got = []
    position = 0
    for size in [16, 1, 30, 20, *[1] * len(token_ids)]:
        part = token_ids[position : position + size]
        if part:
            got.append(driver.step({1: [7, 8, 9, 10], 0: part} if position % 3 == 0 else {0: part})[0])
        position += size
    expected = expected_logprobs(folder, token_ids)
    torch.testing.assert_close(torch.cat(got).log_softmax(dim=-1), expected, atol=1e-4, rtol=0)

    # One pass checks that each output is the likeliest token after those before it: by induction, greedy search.
    prompt = token_ids[:20]
    output = PagedDriver(model, 1, 100).greedy([prompt], 64)[0]
    likeliest = expected_logprobs(folder, prompt + output)[len(prompt) - 1 : -1].argmax(dim=-1)
    assert output == likeliest.tolist()
    assert len(set(output)) > 8, "a degenerate output proves little"

"""Spans of a prompt whose tokens see each other, in models that know nothing of them, against Transformers' masks."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model, read_spec

torch.set_num_threads(1)

TOKENS = torch.randint(3, 300, (60,), generator=torch.Generator().manual_seed(4)).tolist()
SPANS = [(3, 20), (22, 30), (30, 41)]
WINDOW = 6


def expected_logprobs(folder: Path, window: int | None, spans: list[tuple[int, int]]) -> Tensor:
    """With a mask of the whole sequence: causal, in windows, and all of a span for its tokens."""
    query, key = torch.arange(len(TOKENS)).unsqueeze(1), torch.arange(len(TOKENS))
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    for begin, end in spans:
        seen |= (begin <= query) & (query < end) & (begin <= key) & (key < end)
    mask = torch.zeros(1, 1, *seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([TOKENS]), attention_mask=mask).logits[0].log_softmax(dim=-1)


@pytest.mark.parametrize(("family", "window"), [("llama", None), ("mistral", WINDOW)])
def test_tokens_of_a_span_see_each_other(family: str, window: int | None, checkpoint: Checkpoints) -> None:
    """In one step with others, or in chunks that end before spans or behind them; outputs follow one by one."""
    folder = checkpoint(family, **({} if window is None else {"sliding_window": window}))
    expected, causal = (expected_logprobs(folder, window, spans) for spans in (SPANS, []))
    assert (expected - causal).abs().max() > 0.01, "spans must make a difference"
    model = load_model(read_spec(folder))
    for ends in ([50, 51, 60], [2, 20, 30, 46, 60], [20, 41, 42, 60]):
        driver = PagedDriver(model, 2, 64, block_size=4)
        driver.prefix_spans[0] = SPANS
        got = []
        for begin, end in zip([0, *ends], ends, strict=False):
            got.append(driver.step({1: [7, 8, 9], 0: TOKENS[begin:end]})[0])
        torch.testing.assert_close(torch.cat(got).log_softmax(dim=-1), expected, atol=1e-4, rtol=0)

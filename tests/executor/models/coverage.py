"""Compares a checkpoint in one of our implementations with Transformers."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.core.config.model import ModelConfig, ModelImplementation
from quire.executor.models.base import Model
from quire.frontend.checkpoint.model_spec import read_model_spec
from tests.executor.models.tiny_models import VOCAB_SIZE, Reference
from tests.executor.paged_driver import PagedDriver, load_model

NUM_TOKENS = 75
TOLERANCE = 1e-4
_CHUNKS = (8, 1, 19, 3, 30, *[1] * NUM_TOKENS)
_PREFIX = 8  # tokens, two pages


class Agreement(NamedTuple):
    """How an implementation differs from Transformers.

    Attributes:
        difference: the largest of log-probabilities, at any position.
        same_tokens: whether each greedy token is the likeliest of Transformers.
    """

    difference: float
    same_tokens: bool

    @property
    def holds(self) -> bool:
        """Whether the implementation computes the same."""
        return self.difference < TOLERANCE and self.same_tokens


def measure(folder: Path, reference: Reference, implementation: ModelImplementation) -> Agreement:
    """Feeds a prompt in chunks of odd sizes, beside another request, and after a prefix that another one computed.

    A prompt whose tokens see each other is fed whole.

    Raises:
        ModelLoadError: the implementation does not take the checkpoint.
    """
    spec = read_model_spec(folder, ModelConfig(model=str(folder), model_impl=implementation, dtype="float32"))
    model = load_model(spec)
    token_ids = torch.randint(3, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = reference.logprobs(token_ids)
    driver = PagedDriver(model, 2, 128, block_size=4)
    if any(layer.sees_prompt for layer in model.kv_layers):
        return _measure_whole(driver, reference, token_ids, expected)
    got, position = [], 0
    for size in _CHUNKS:
        part = token_ids[position : position + size]
        if part:
            feed = {1: [7, 8, 9], 0: part} if position % 3 == 0 else {0: part}
            got.append(driver.step(feed)[0])
        position += size
    differences = [difference(torch.cat(got), expected)]
    if not model.state_layers:
        differences.append(difference(_after_a_hit(model, token_ids[:40]), expected[_PREFIX:40]))
    prompt = token_ids[:20]
    output = PagedDriver(model, 1, 64, block_size=4).greedy([prompt], 16)[0]
    likeliest = reference.logprobs(prompt + output)[len(prompt) - 1 : -1].argmax(dim=-1)
    return Agreement(max(differences), output == likeliest.tolist())


def _measure_whole(driver: PagedDriver, reference: Reference, prompt: list[int], expected: Tensor) -> Agreement:
    """The output is compared with the library's own search, because a longer prompt gives other log-probabilities."""
    likeliest, after = reference.greedy(prompt, 16)
    got, output = [driver.step({0: prompt, 1: [7, 8, 9]})[0]], []
    for _ in range(15):
        output.append(int(got[-1][-1].argmax()))
        got.append(driver.step({0: output[-1:]})[0])
    output.append(int(got[-1].argmax()))
    return Agreement(difference(torch.cat(got), torch.cat((expected, after[1:]))), output == likeliest)


def difference(logits: Tensor, expected: Tensor) -> float:
    """The largest difference of log-probabilities; infinite where there are none."""
    found = (logits.log_softmax(-1)[:, : expected.shape[1]] - expected).abs().max().item()
    return float("inf") if np.isnan(found) else found


def _after_a_hit(model: Model, token_ids: list[int]) -> Tensor:
    """Logits after the first tokens, whose pages another request computed, as after a hit of the prefix cache."""
    driver = PagedDriver(model, 2, 128, block_size=4)
    driver.step({0: token_ids[:_PREFIX]})
    for tables in driver.block_tables:
        tables[1, : _PREFIX // 4] = tables[0, : _PREFIX // 4]
    driver.tokens[1] = token_ids[:_PREFIX]
    return driver.step({1: token_ids[_PREFIX:]})[1]

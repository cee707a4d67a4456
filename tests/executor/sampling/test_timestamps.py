"""The rules of timestamps, against Transformers' processor of logits, on random outputs."""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from quire.core.wire.output_rules import OutputRules, TimestampRules
from quire.core.wire.protocol import NewSlot
from quire.core.wire.sampling_params import SamplingParams
from quire.executor.sampling.sampling_feature import SampleBatch
from quire.executor.sampling.timestamps import Timestamps
from quire.executor.step.request_table import RequestTable

VOCAB, END, NOT_USED = 40, 20, 24
FIRST = NOT_USED + 1
PROMPT = [END + 1, END + 2]


def outputs() -> list[list[int]]:
    """Outputs that obey the rules, of all lengths, and some that do not."""
    random = np.random.default_rng(0)
    found: list[list[int]] = [[], [FIRST], [FIRST, FIRST + 2], [3], [FIRST, 1, FIRST + 4]]
    found.append([*found[-1], FIRST + 4])
    for size in range(1, 12):
        text, stamps = random.integers(0, END, size), np.sort(random.integers(FIRST, VOCAB, size))
        found.append(np.where(random.random(size) < 0.4, stamps, text).tolist())
    return found


@pytest.mark.parametrize("latest", [None, 5])
def test_masks_are_those_of_transformers(latest: int | None) -> None:
    config = GenerationConfig(eos_token_id=END, bos_token_id=END)
    config.no_timestamps_token_id = NOT_USED
    config.max_initial_timestamp_index = latest
    library = WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT))
    rules = TimestampRules(FIRST, END, NOT_USED, None if latest is None else FIRST + latest)
    rows = outputs()
    feature, table = Timestamps(len(rows)), RequestTable(len(rows), 64, 16, torch.device("cpu"))
    for slot, output in enumerate(rows):
        tokens = [*PROMPT, *output]
        request = NewSlot(slot, tokens, len(PROMPT), [[slot]], SamplingParams(), rules=OutputRules(timestamps=rules))
        assert feature.admit(request)
        table.admit(request)
    for seed, scale in ((1, 1.0), (2, 8.0)):
        torch.manual_seed(seed)
        logits = torch.randn(len(rows), VOCAB) * scale
        expected = torch.cat(
            [
                library(torch.tensor([[*PROMPT, *output]]), row.unsqueeze(0).clone())
                for output, row in zip(rows, logits, strict=True)
            ]
        )
        slots = np.arange(len(rows))
        batch = SampleBatch(slots, np.array([len(PROMPT) + len(output) for output in rows]), table)
        assert feature.used(batch).all()
        feature.apply(logits, slots, batch)
        torch.testing.assert_close(logits, expected)


def test_a_request_without_rules_is_left_alone() -> None:
    feature, table = Timestamps(1), RequestTable(1, 64, 16, torch.device("cpu"))
    assert not feature.admit(NewSlot(0, PROMPT, 2, [[0]], SamplingParams(), rules=OutputRules([3])))
    assert not feature.used(SampleBatch(np.array([0]), np.array([2]), table)).any()

"""CPM-Ant: prompts that see all of themselves, after learned tokens of the model's own."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.core.config.model import ModelConfig
from quire.core.config.resolved import SchedulerLimits
from quire.core.errors import ModelLoadError
from quire.executor.memory.dry_build import dry_build
from quire.executor.memory.plan import workspace_bytes
from quire.executor.models.base import Model
from quire.frontend.checkpoint.model_spec import read_model_spec
from tests.executor.models.tiny_models import Reference, write_checkpoint
from tests.executor.paged_driver import PagedDriver, load_model, model_context

torch.set_num_threads(1)

NUM_OUTPUT = 12
PROMPTS = [[(37 * place * place + 11 * place) % 317 + 3 for place in range(size)] for size in (45, 1, 7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cpmant")
    write_checkpoint(folder, "cpmant")
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(read_model_spec(folder, ModelConfig(model=str(folder), dtype="float32")))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[list[int], Tensor]]:
    """Of each prompt, with the library's cache: greedy tokens, and log-probabilities after all but the last."""
    reference, found = Reference(folder), []
    for prompt in PROMPTS:
        output, after = reference.greedy(prompt, NUM_OUTPUT)
        found.append((output, torch.cat((reference.logprobs(prompt), after[1:]))))
    return found


def test_the_memory_plan_counts_a_soft_prompt_for_each_sequence(model: Model, folder: Path) -> None:
    """Steps may begin with many prompts of one token."""
    spec = read_model_spec(folder, ModelConfig(model=str(folder), dtype="float32"))
    limits = [SchedulerLimits(max_num_seqs=number, max_num_batched_tokens=50) for number in (1, 41, 60)]
    one, many, most = (workspace_bytes(spec, model, each, 0) for each in limits)
    a_sequence = 32 * 4 * (4 * spec.hidden_size + model.activation_size) + 4 * 4 * spec.vocab_size
    assert (many - one, most - many) == (40 * a_sequence, 9 * a_sequence)


def logprobs_of(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts).log_softmax(-1)


def test_prompt_and_output_have_the_log_probabilities_of_transformers(
    model: Model, expected: list[tuple[list[int], Tensor]]
) -> None:
    """Requests begin in the same step and while others go on; logits are wanted of all tokens, and of the last ones."""
    for only_last in (False, True):
        driver = PagedDriver(model, len(PROMPTS), 64, block_size=4)
        feed, parts = {0: PROMPTS[0], 1: PROMPTS[1]}, {row: [] for row in range(len(PROMPTS))}
        for turn in range(NUM_OUTPUT + 3):
            if turn == 3:
                feed[2] = PROMPTS[2]
            for row, logits in driver.step(feed, only_last=only_last).items():
                parts[row].append(logits)
                output = expected[row][0]
                feed[row] = output[len(parts[row]) - 1 : len(parts[row])]
            feed = {row: tokens for row, tokens in feed.items() if tokens and len(parts[row]) < NUM_OUTPUT}
        for row, (_, logprobs) in enumerate(expected):
            wanted = logprobs[len(PROMPTS[row]) - 1 :] if only_last else logprobs
            torch.testing.assert_close(logprobs_of(parts[row]), wanted, atol=1e-4, rtol=0)


def test_output_that_is_computed_again_is_no_part_of_the_prompt(
    model: Model, expected: list[tuple[list[int], Tensor]]
) -> None:
    """As after a preemption or a crash: in one step with the prompt, and in chunks behind it."""
    driver = PagedDriver(model, 2, 64, block_size=4)
    prompt, (output, logprobs) = PROMPTS[0], expected[0]
    driver.prompt_lens |= {0: len(prompt), 1: len(prompt)}
    tokens = [*prompt, *output[:-1]]
    whole = driver.step({0: tokens})[0]
    parts = [driver.step({1: tokens[:48]})[1], driver.step({1: tokens[48:]})[1]]
    for got in ([whole], parts):
        torch.testing.assert_close(logprobs_of(got), logprobs, atol=1e-4, rtol=0)


def test_it_has_no_pipeline_stages(folder: Path) -> None:
    spec = read_model_spec(folder, ModelConfig(model=str(folder), dtype="float32"))
    with pytest.raises(ModelLoadError, match=r"CpmAnt.* cannot be divided into pipeline stages; use --tensor-parallel"):
        dry_build(spec, model_context(spec, layers=range(1)))

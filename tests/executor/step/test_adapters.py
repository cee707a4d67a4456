"""Low-rank adapters (LoRA) through the place that a step fills, against Transformers with merged weights.

Adapters are loaded onto a real worker. Requests of one batch have different ones or none, in steps that run the
ordinary way and from recordings.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire.core.config.cache import CacheConfig
from quire.core.errors import ModelLoadError
from quire.core.wire.protocol import EngineRequest, StepPlan, StepResult
from quire.core.wire.rank import Layout, Rank
from quire.core.wire.row_outputs import PromptLogprobs
from quire.executor.layers.adapters import AdapterLimits, AdapterWeight
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.step.launched_step import LaunchedStep
from quire.executor.worker import Worker
from quire.ops.cpu import launches
from quire.ops.cpu.libraries import load_kernels
from quire.ops.triton.graphs import RULES
from tests.executor.pretend_device import PretendDevice
from tests.executor.step.test_accelerated_steps import Again, PaddedBackend, device  # noqa: F401
from tests.executor.step.test_model_runner import NUM_BLOCKS, engine_config, generate, prompt_of, request, tokens_of
from tests.executor.step.test_recorded_steps import bf16_config
from tests.executor.thread_group import on_every_rank

LIMITS = AdapterLimits(num_adapters=3, max_rank=6)
RANK, SCALE = 4, 2.0
TARGETS = [
    ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"],
    ["self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"],
    ["mlp.up_proj", "lm_head"],
]
"""Of each adapter; the layers' in both layers of the model."""

Weights = dict[str, AdapterWeight]


def lora(model: PreTrainedModel, number: int) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each layer that the adapter changes, as PEFT stores them."""
    generator = torch.Generator().manual_seed(number)
    names = [
        name
        for target in TARGETS[number]
        for name in ([target] if target == "lm_head" else [f"model.layers.{layer}.{target}" for layer in (0, 1)])
    ]
    weights = {}
    for name in names:
        num_outputs, num_inputs = model.get_submodule(name).weight.shape
        a, b = torch.randn(RANK, num_inputs, generator=generator), torch.randn(num_outputs, RANK, generator=generator)
        weights[name] = a / num_inputs**0.5, b / 4
    return weights


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3", tie=False)


@pytest.fixture(scope="module")
def loras(folder: Path) -> list[dict[str, tuple[Tensor, Tensor]]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [lora(model, number) for number in range(3)]


def merged(folder: Path, weights: dict[str, tuple[Tensor, Tensor]]) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, (a, b) in weights.items():
            model.get_submodule(name).weight += SCALE * b @ a
    return model


class AdaptedWorker:
    """A worker with all adapters, whose plans name the adapter of each request by its prompt."""

    def __init__(self, worker: Worker, loras: list[dict[str, tuple[Tensor, Tensor]]]) -> None:
        self.worker = worker
        self.adapter_of: dict[tuple[int, ...], int] = {}
        assert worker.adapters is not None
        for number, weights in enumerate(loras):
            worker.adapters.load(number, {name: AdapterWeight(a, SCALE * b) for name, (a, b) in weights.items()})

    def launch(self, plan: StepPlan) -> LaunchedStep:
        for new in plan.admitted:
            new.adapter = self.adapter_of[tuple(new.token_ids[: new.num_prompt_tokens])]
        return self.worker.launch(plan)

    def collect(self, step: LaunchedStep) -> StepResult:
        return self.worker.collect(step)

    def generate(self, requests: list[EngineRequest], adapters: list[int], **options: Any) -> dict[str, list[int]]:
        for each, adapter in zip(requests, adapters, strict=True):
            self.adapter_of[tuple(each.prompt_token_ids)] = adapter
        worker: Any = self
        # The prefix cache does not know adapters.
        return tokens_of(generate(worker, requests, enable_prefix_caching=False, **options))


def start(config: Any, group: ParallelGroup | None = None) -> Worker:
    group = group or ParallelGroup()
    worker = Worker(config, Rank(tensor=group.rank), group, adapter_limits=LIMITS)
    ready = worker.load()
    worker.allocate(ready.num_pages, ready.max_model_len)
    return worker


def requests_of(num_tokens: int = 24) -> tuple[list[EngineRequest], list[int]]:
    adapters = [0, -1, 1, 2, 0, 1, -1]
    lengths = [1, 16, 40, 7, 33, 5, 60]
    names = [f"r{index}" for index in range(len(adapters))]
    prompts = [prompt_of(index, length) for index, length in enumerate(lengths)]
    return [request(name, each, max_tokens=num_tokens) for name, each in zip(names, prompts, strict=True)], adapters


@pytest.fixture(scope="module")
def expected(folder: Path, loras: list[dict[str, tuple[Tensor, Tensor]]]) -> dict[str, list[int]]:
    """Transformers' greedy tokens, each request by the model with its adapter's weights."""
    models = [*(merged(folder, weights) for weights in loras), merged(folder, {})]  # the last one has the number -1
    tokens = {}
    for each, adapter in zip(*requests_of(), strict=True):
        prompt = torch.tensor([each.prompt_token_ids])
        with torch.inference_mode():
            output = models[adapter].generate(
                prompt, max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None
            )
        tokens[each.sequences[0].request_id] = output[0, prompt.shape[1] :].tolist()
    return tokens


@pytest.fixture(scope="module")
def adapted(folder: Path, loras: list[dict[str, tuple[Tensor, Tensor]]]) -> AdaptedWorker:
    return AdaptedWorker(start(engine_config(folder)), loras)


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 16, "depth": 1}, {"num_pages": 16, "depth": 3}], ids=str
)
def test_tokens_are_those_of_transformers_with_merged_weights(
    adapted: AdaptedWorker, expected: dict[str, list[int]], options: dict[str, Any]
) -> None:
    """In a batch of all adapters, in chunks of prompts, and after preemption."""
    requests, adapters = requests_of()
    assert adapted.generate(requests, adapters, **options) == expected


def test_the_adapters_change_tokens(adapted: AdaptedWorker, expected: dict[str, list[int]]) -> None:
    """The test above would prove little otherwise."""
    requests, adapters = requests_of()
    plain = adapted.generate(requests, [-1] * len(requests))
    for each, adapter in zip(requests, adapters, strict=True):
        name = each.sequences[0].request_id
        assert (plain[name] == expected[name]) == (adapter < 0)


def test_two_ranks_have_their_parts_of_the_weights(
    folder: Path, loras: list[dict[str, tuple[Tensor, Tensor]]], expected: dict[str, list[int]]
) -> None:
    def job(group: ParallelGroup) -> dict[str, list[int]]:
        worker = AdaptedWorker(start(engine_config(folder, layout=Layout(tensor=2)), group), loras)
        return worker.generate(*requests_of())

    assert on_every_rank(2, job) == [expected, expected]


def test_prompts_are_scored_with_their_adapters(
    adapted: AdaptedWorker, folder: Path, loras: list[dict[str, tuple[Tensor, Tensor]]]
) -> None:
    """The head sees slices of the prompt's tokens, and its adapter is among them."""
    prompts = [prompt_of(50, 20), prompt_of(51, 20)]
    requests = [request(name, each, max_tokens=1, prompt_logprobs=0) for name, each in zip("ab", prompts, strict=True)]
    for prompt, adapter in zip(prompts, (2, -1), strict=True):
        adapted.adapter_of[tuple(prompt)] = adapter
    worker: Any = adapted
    deltas = generate(worker, requests, enable_prefix_caching=False)
    for name, prompt, weights in zip("ab", prompts, (loras[2], {}), strict=True):
        with torch.inference_mode():
            logits = merged(folder, weights)(torch.tensor([prompt])).logits[0, :-1]
        parts = [delta.output for delta in deltas[name] if isinstance(delta.output, PromptLogprobs)]
        scores = [entry.logprobs[0] for part in parts for entry in part.positions]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(scores), wanted, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def recorded(folder: Path, loras: list[dict[str, tuple[Tensor, Tensor]]]) -> AdaptedWorker:
    if load_kernels() is None:
        pytest.skip("plain torch cannot be recorded")
    return AdaptedWorker(start(bf16_config(folder)), loras)


def test_recorded_steps_read_the_current_adapters(
    recorded: AdaptedWorker,
    launched: list[int],
    folder: Path,
    loras: list[dict[str, tuple[Tensor, Tensor]]],
) -> None:
    """Rows change their adapters from round to round; recordings of the first round serve all."""
    rounds = [[0, 1, 2, -1], [2, 2, 0, 1], [-1, 0, -1, -1], [-1, -1, -1, -1]]
    requests = [request(f"r{index}", prompt_of(index, 9 + index), max_tokens=12) for index in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.executor.step.decode_inputs.MAX_ROWS", 0)
        plain = AdaptedWorker(start(bf16_config(folder)), loras)
        wanted = [plain.generate(requests, adapters) for adapters in rounds]
    assert not launched
    assert len({str(tokens) for tokens in wanted}) == len(rounds)
    for _ in range(2):
        launched.clear()
        assert [recorded.generate(requests, adapters) for adapters in rounds] == wanted
    assert len(launched) == 4 * 11, "all but the prompts' steps"
    assert len(set(launched)) == 2, "steps with adapters are other lists of launches than steps without"
    assert max(launched[-11:]) < min(launched[:33]), "and a step of rows without adapters has no launch for them"


def test_a_recorded_step_reads_weights_that_are_loaded_later(
    recorded: AdaptedWorker, loras: list[dict[str, tuple[Tensor, Tensor]]]
) -> None:
    place = recorded.worker.adapters
    assert place is not None
    one = [request("a", prompt_of(3, 12), max_tokens=12)]
    first, second = (recorded.generate(one, [adapter]) for adapter in (0, 1))
    assert first != second
    version = place.version
    place.load(0, {name: AdapterWeight(a, SCALE * b) for name, (a, b) in loras[1].items()})
    assert place.version == version
    assert recorded.generate(one, [0]) == second
    place.unload(0)
    assert recorded.generate(one, [0]) == recorded.generate(one, [-1])
    place.load(0, {name: AdapterWeight(a, SCALE * b) for name, (a, b) in loras[0].items()})
    assert recorded.generate(one, [0]) == first


def test_recordings_made_before_a_layer_had_adapters_are_not_used(
    folder: Path, loras: list[dict[str, tuple[Tensor, Tensor]]]
) -> None:
    if load_kernels() is None:
        pytest.skip("plain torch cannot be recorded")
    worker = AdaptedWorker(start(bf16_config(folder)), [])
    one = [request("a", prompt_of(3, 12), max_tokens=12)]
    results = []
    for number in (0, 1):
        assert worker.worker.adapters is not None
        worker.worker.adapters.load(0, {name: AdapterWeight(a, SCALE * b) for name, (a, b) in loras[number].items()})
        results.append([worker.generate(one, [0]) for _ in range(2)])
    assert results[0][0] == results[0][1]
    assert results[1][0] == results[1][1] != results[0][0]


def test_a_backend_that_records_no_adapters_still_records_other_steps(
    folder: Path,
    loras: list[dict[str, tuple[Tensor, Tensor]]],
    launched: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if load_kernels() is None:
        pytest.skip("plain torch cannot be recorded")
    bind = launches.Launcher.bind

    def bind_all_but_one(self: launches.Launcher, call: Any) -> Callable[..., int]:
        return (lambda *_: 1) if call.part == "low_rank" else bind(self, call)

    monkeypatch.setattr(launches.Launcher, "bind", bind_all_but_one)
    worker = AdaptedWorker(start(bf16_config(folder)), loras)
    one = [request("a", prompt_of(3, 12), max_tokens=12)]
    for _ in range(2):
        launched.clear()
        worker.generate(one, [0])
        assert not launched
    worker.generate(one, [-1])
    launched.clear()
    worker.generate(one, [-1])
    assert launched


def test_padded_steps_of_an_accelerator_have_the_same_tokens(
    folder: Path,
    loras: list[dict[str, tuple[Tensor, Tensor]]],
    expected: dict[str, list[int]],
    device: PretendDevice,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of padding have no adapter, and the host reads nothing from the device."""
    monkeypatch.setattr(PaddedBackend, "recording_rules", RULES._replace(interval=1))
    config = engine_config(folder, device="cuda", cache=CacheConfig(num_gpu_blocks_override=NUM_BLOCKS))
    worker = AdaptedWorker(start(config), loras)
    for _ in range(2):
        assert worker.generate(*requests_of()) == expected
    assert Again.count


def test_the_memory_plan_counts_the_adapters(folder: Path) -> None:
    plain, with_adapters = (
        Worker(engine_config(folder), Rank(), ParallelGroup(), adapter_limits=limits).load().weights_bytes
        for limits in (None, LIMITS)
    )
    spec = engine_config(folder).spec
    hidden, inner, vocab = spec.hidden_size, spec.hf_config["intermediate_size"], spec.vocab_size
    queries, keys = spec.num_attention_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    # Inputs and outputs of each layer's weights: q, k and v have the same inputs, but an A each.
    layer = (3 * hidden + queries + 2 * keys) + (queries + hidden) + (2 * hidden + 2 * inner) + (inner + hidden)
    sizes = spec.num_layers * layer + 2 * (hidden + vocab)  # of the head, and of the embedding
    ranks = (4 * spec.num_layers + 2) * 8  # of each adapter in each product
    outputs = spec.num_layers * (queries + 2 * keys + hidden + 2 * inner + hidden) + vocab + hidden
    factors = 2 * 4 * outputs  # and shifts
    assert with_adapters - plain == LIMITS.num_adapters * (LIMITS.max_rank * sizes * 4 + ranks + factors)


def test_weights_that_are_no_numbers_are_refused(adapted: AdaptedWorker) -> None:
    """The tokens of such an adapter would be NaN, as those of a broken device are."""
    place = adapted.worker.adapters
    assert place is not None
    name = "model.layers.0.mlp.down_proj"
    [base] = [base for layer in place.layers for base in layer.bases if base.part.name == name]
    a, b = torch.zeros(4, base.in_features), torch.zeros(base.part.out_features, 4)
    for bad in (torch.nan, torch.inf, 1e39):
        wrong = b.double().fill_(bad)
        with pytest.raises(ModelLoadError, match=rf"weights for {name} are NaN or infinite, or become so in float32"):
            place.prepare({name: AdapterWeight(a, wrong)})
    with pytest.raises(ModelLoadError, match="or become so in float16"):
        place.prepare({name: AdapterWeight(a, b + 70_000)}, torch.float16)


def test_an_adapter_that_does_not_fit_is_refused_with_the_layers_name(adapted: AdaptedWorker) -> None:
    place = adapted.worker.adapters
    assert place is not None
    weight = AdapterWeight(torch.zeros(4, 64), torch.zeros(64, 4))
    with pytest.raises(ModelLoadError, match=r"weights for model\.norm, which take no adapters"):
        place.load(0, {"model.norm": weight})
    name = "model.layers.0.mlp.down_proj"
    for a, b in ((torch.zeros(4, 5), torch.zeros(64, 4)), (torch.zeros(7, 128), torch.zeros(64, 7))):
        with pytest.raises(ModelLoadError, match=rf"{name} are .* ranks are at most 6"):
            place.load(0, {name: AdapterWeight(a, b)})

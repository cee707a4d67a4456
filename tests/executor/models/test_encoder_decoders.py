"""Models with an encoder and a decoder, by real workers and the real scheduler, against Transformers."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.core.config.cache import CacheConfig
from quire.core.config.resolved import EngineConfig
from quire.core.wire.encoder_input import EncoderInput
from quire.core.wire.protocol import EngineRequest, RequestDelta, SequenceStart
from quire.core.wire.rank import Layout, Rank
from quire.core.wire.row_outputs import PromptLogprobs
from quire.core.wire.sampling_params import SamplingParams
from quire.executor.memory.dry_build import dry_build, held_bytes
from quire.executor.models.registry import is_native
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.worker import Worker
from quire.ops.cpu.native import NativeBackend
from tests.core.scheduling.fake_worker import resumed_after
from tests.executor.models.tiny_encoder_decoders import (
    FAMILIES,
    START,
    reference_logprobs,
    reference_tokens,
    write_encoder_decoder,
)
from tests.executor.paged_driver import load_model, model_context, read_spec
from tests.executor.step.test_model_runner import engine_config, generate, tokens_of
from tests.executor.thread_group import ThreadGroup

torch.set_num_threads(1)

NUM_PAGES = 400
NUM_TOKENS = 12
INPUTS = [[(37 * place * place + 11 * place + size) % 180 + 3 for place in range(size)] for size in (40, 1, 7, 90, 17)]


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    spec = read_spec(folder)
    cache = CacheConfig(num_gpu_blocks_override=NUM_PAGES)
    return engine_config(folder, spec=spec, max_model_len=spec.max_position_embeddings, cache=cache, **changes)


class Engine:
    """A worker of a checkpoint, and the scheduler's view of its KV groups."""

    def __init__(self, config: EngineConfig, rank: Rank = Rank(), group: ParallelGroup | None = None) -> None:
        self.config = config
        self.worker = Worker(config, rank, group or ParallelGroup())
        self.ready = self.worker.load()
        self.worker.allocate(self.ready.num_pages, self.ready.max_model_len)

    def run(self, requests: list[EngineRequest], **options: Any) -> dict[str, list[RequestDelta]]:
        options = {"num_pages": NUM_PAGES, "max_model_len": self.config.max_model_len, **options}
        return generate(self.worker, requests, kv_groups=self.ready.kv_groups, **options)


def request(name: str, encoder: list[int], decoder: list[int] | None = None, **sampling: Any) -> EngineRequest:
    options = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **sampling}
    start = [START] if decoder is None else decoder
    return EngineRequest([SequenceStart(name, 0)], start, SamplingParams(**options), encoder=EncoderInput(encoder))


def requests() -> list[EngineRequest]:
    return [request(str(number), each) for number, each in enumerate(INPUTS)]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_logprobs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Of greedy outputs and of scored prompts, computed together."""
    reference = write_encoder_decoder(tmp_path, name)
    engine = Engine(config_of(tmp_path))
    assert is_native(engine.worker.get_model())
    decoder = [START, *INPUTS[0][:30]]
    scored = request("scored", INPUTS[4], decoder, prompt_logprobs=0, max_tokens=1)
    deltas = engine.run([*(request(str(i), each, logprobs=0) for i, each in enumerate(INPUTS)), scored])
    outputs = tokens_of(deltas)
    assert len({tuple(output) for output in outputs.values()}) > 1, "outputs must depend on inputs to prove anything"
    for number, encoder in enumerate(INPUTS):
        output = outputs[str(number)]
        assert output == reference_tokens(reference, encoder, NUM_TOKENS)
        expected = reference_logprobs(reference, encoder, [START, *output[:-1]])
        for place, delta in enumerate(deltas[str(number)]):
            assert delta.logprobs is not None
            assert delta.logprobs[0].logprobs[0] == pytest.approx(expected[place, output[place]].item(), abs=1e-4)
    expected = reference_logprobs(reference, INPUTS[4], decoder)
    parts = [delta.output for delta in deltas["scored"] if isinstance(delta.output, PromptLogprobs)]
    rows = {part.start + place: row for part in parts for place, row in enumerate(part.positions)}
    assert sorted(rows) == list(range(1, len(decoder)))
    for position, row in rows.items():
        assert row.logprobs[0] == pytest.approx(expected[position - 1, decoder[position]].item(), abs=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_memory_is_counted_before_it_is_loaded(name: str, tmp_path: Path) -> None:
    write_encoder_decoder(tmp_path, name)
    spec = read_spec(tmp_path)
    context = model_context(spec)
    with contextlib.closing(context.weights), torch.inference_mode():
        dry = dry_build(spec, context)
    model = load_model(spec)
    assert held_bytes(dry) == held_bytes(model)
    assert list(dry.kv_layers) == list(model.kv_layers)


@pytest.fixture(scope="module", params=["bart", "t5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_encoder_decoder(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(config_of(folder))


@pytest.fixture(scope="module")
def expected(engine: Engine) -> dict[str, list[int]]:
    """Each request on its own, one step at a time, without a prefix cache."""
    tokens: dict[str, list[int]] = {}
    for one in requests():
        tokens |= tokens_of(engine.run([one], depth=1, enable_prefix_caching=False))
    return tokens


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 92},
        {"long_prefill_token_threshold": 3},
        {"enable_chunked_prefill": False},
        {"num_pages": 30, "depth": 1},
        {"depth": 3},
    ],
    ids=str,
)
def test_the_same_tokens_however_requests_are_planned(
    engine: Engine, expected: dict[str, list[int]], limits: dict[str, Any]
) -> None:
    assert tokens_of(engine.run(requests(), **limits)) == expected


def test_recorded_steps_give_the_same_tokens(folder: Path, engine: Engine, expected: dict[str, list[int]]) -> None:
    assert tokens_of(engine.run(requests())) == expected
    recorded: Any = engine.worker._runner
    if isinstance(engine.worker._ops, NativeBackend):
        assert any(recorded._recorded_steps._seen.values())
    assert tokens_of(Engine(config_of(folder, enforce_eager=True)).run(requests())) == expected


def test_a_long_prompt_of_the_decoder_is_computed_in_chunks(engine: Engine) -> None:
    """Longer than the encoder's input, too, which is cut into rows of its length."""
    prompt = [START, *INPUTS[3][:70]]
    for encoder in INPUTS:
        one = [request("a", encoder, prompt)]
        whole = tokens_of(engine.run(one, enable_prefix_caching=False))
        for chunk in (1, 9):
            chunked = engine.run(one, long_prefill_token_threshold=chunk, enable_prefix_caching=False)
            assert tokens_of(chunked) == whole


def test_a_preempted_request_is_encoded_again(engine: Engine, expected: dict[str, list[int]]) -> None:
    """So few pages that requests give up theirs, and the encoder's with them."""
    requests = [request(f"{name}-{copy}", INPUTS[name], max_tokens=60) for name in (0, 2, 4) for copy in range(2)]
    plenty = tokens_of(engine.run(requests))
    few = engine.run(requests, num_pages=24)
    assert max(delta.num_preemptions for deltas in few.values() for delta in deltas) > 0
    assert tokens_of(few) == plenty
    for name in (0, 2, 4):
        assert plenty[f"{name}-1"][:NUM_TOKENS] == expected[str(name)]


def test_a_request_goes_on_after_the_tokens_of_another_engine(engine: Engine, expected: dict[str, list[int]]) -> None:
    for name, tokens in expected.items():
        [one] = [each for each in requests() if each.sequences[0].request_id == name]
        assert tokens_of(engine.run([resumed_after(tokens[:5], one)])) == {name: tokens[5:]}


def test_ranks_together_give_the_tokens_of_one(folder: Path, expected: dict[str, list[int]]) -> None:
    config = config_of(folder, layout=Layout(tensor=2), executor="mp")
    groups = ThreadGroup.all_of(2)

    def run(number: int) -> dict[str, list[int]]:
        torch.set_num_threads(1)
        return tokens_of(Engine(config, Rank(tensor=number), groups[number]).run(requests()))

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, range(2))) == [expected, expected]

"""Whisper, by real workers and the real scheduler, against Transformers."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.core.wire.output_rules import OutputRules, TimestampRules
from quire.core.wire.protocol import EngineRequest, SequenceStart
from quire.core.wire.rank import Layout, Rank
from quire.core.wire.sampling_params import SamplingParams
from quire.executor.memory.dry_build import dry_build, held_bytes
from quire.executor.models.registry import is_native
from quire.executor.parallel.groups import ParallelGroup
from tests.core.scheduling.fake_worker import resumed_after
from tests.executor.models.test_encoder_decoders import Engine, config_of
from tests.executor.paged_driver import load_model, model_context, read_spec
from tests.executor.step.test_model_runner import tokens_of
from tests.executor.thread_group import ThreadGroup
from tests.tiny_whisper import (
    END,
    FIRST_STAMP,
    GENERATION,
    ID,
    NO_TIMESTAMPS,
    SUPPRESSED,
    encoder_input,
    prompt_ids,
    reference_logprobs,
    reference_tokens,
    sound,
    write_whisper,
)

torch.set_num_threads(1)

NUM_TOKENS = 20
SOUNDS = [sound(0), sound(1, 0.2), sound(2, 1.0), sound(3, 0.05)]
PLAIN = prompt_ids("en", "transcribe", "notimestamps")
TIMED = prompt_ids("de", "transcribe")
NEVER_FIRST = GENERATION["begin_suppress_tokens"]
LATEST = FIRST_STAMP + GENERATION["max_initial_timestamp_index"]
RULES = TimestampRules(FIRST_STAMP, END, NO_TIMESTAMPS, LATEST)


def request(number: int, prompt: list[int] = PLAIN, name: str | None = None, **sampling: Any) -> EngineRequest:
    options = {"temperature": 0.0, "max_tokens": NUM_TOKENS, **sampling}
    params = SamplingParams(**options, bad_words_token_ids=[[each] for each in SUPPRESSED])
    rules = OutputRules(NEVER_FIRST, timestamps=None if NO_TIMESTAMPS in prompt else RULES)
    start = [SequenceStart(name or str(number), 0)]
    return EngineRequest(start, prompt, params, encoder=encoder_input(SOUNDS[number]), rules=rules)


def requests(prompt: list[int] = PLAIN) -> list[EngineRequest]:
    return [request(number, prompt) for number in range(len(SOUNDS))]


def without_end(tokens: list[int]) -> list[int]:
    return tokens[:-1] if tokens[-1:] == [END] else tokens


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("whisper")
    return folder, write_whisper(folder)


@pytest.fixture(scope="module")
def engine(made: tuple[Path, Any]) -> Engine:
    return Engine(config_of(made[0]))


@pytest.fixture(scope="module")
def expected(engine: Engine) -> dict[str, list[int]]:
    """Each request on its own, one step at a time, without a prefix cache."""
    tokens: dict[str, list[int]] = {}
    for one in requests():
        tokens |= tokens_of(engine.run([one], depth=1, enable_prefix_caching=False))
    return tokens


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_mel_bins": 128},  # of the third generation
        {"decoder_layers": 1, "activation_function": "relu", "scale_embedding": True},  # fewer, as distilled ones have
    ],
    ids=str,
)
def test_logprobs_are_those_of_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    reference = write_whisper(tmp_path, **settings)
    engine, channels = Engine(config_of(tmp_path)), reference.config.num_mel_bins
    assert is_native(engine.worker.get_model())
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True)
    deltas = engine.run(
        [
            EngineRequest([SequenceStart(str(i), 0)], PLAIN, params, encoder=encoder_input(each, channels))
            for i, each in enumerate(SOUNDS)
        ]
    )
    outputs = tokens_of(deltas)
    assert len({tuple(output) for output in outputs.values()}) > 1, "outputs must depend on inputs to prove anything"
    for number, samples in enumerate(SOUNDS):
        output = outputs[str(number)]
        expected = reference_logprobs(reference, samples, [*PLAIN, *output[:-1]])[len(PLAIN) - 1 :]
        assert output == expected.argmax(-1).tolist()
        for place, delta in enumerate(deltas[str(number)]):
            assert delta.logprobs is not None
            assert delta.logprobs[0].logprobs[0] == pytest.approx(expected[place, output[place]].item(), abs=1e-4)


def test_tokens_are_those_of_generate(made: tuple[Path, Any], engine: Engine) -> None:
    outputs = tokens_of(engine.run(requests()))
    for number, samples in enumerate(SOUNDS):
        wanted = reference_tokens(made[1], samples, NUM_TOKENS, language="en", task="transcribe")
        assert without_end(outputs[str(number)]) == wanted


def test_timestamps_are_those_of_generate(made: tuple[Path, Any], engine: Engine) -> None:
    outputs = tokens_of(engine.run(requests(TIMED)))
    for number, samples in enumerate(SOUNDS):
        wanted = reference_tokens(made[1], samples, NUM_TOKENS, language="de", task="transcribe", timestamps=True)
        assert without_end(outputs[str(number)]) == wanted
    assert any(token >= FIRST_STAMP for token in outputs["0"])
    assert all(output[0] in range(FIRST_STAMP, LATEST + 1) for output in outputs.values())


def test_memory_is_counted_before_it_is_loaded(made: tuple[Path, Any]) -> None:
    spec = read_spec(made[0])
    context = model_context(spec)
    with contextlib.closing(context.weights), torch.inference_mode():
        dry = dry_build(spec, context)
    model = load_model(spec)
    assert held_bytes(dry) == held_bytes(model)
    assert list(dry.kv_layers) == list(model.kv_layers)


@pytest.mark.parametrize(
    "limits",
    [{}, {"enable_prefix_caching": False}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 52}, {"depth": 3}],
    ids=str,
)
def test_the_same_tokens_however_requests_are_planned(
    engine: Engine, expected: dict[str, list[int]], limits: dict[str, Any]
) -> None:
    assert tokens_of(engine.run(requests(), **limits)) == expected
    timed = tokens_of(engine.run(requests(TIMED), **limits))
    assert timed == tokens_of(engine.run(requests(TIMED), depth=1))


def test_a_preempted_request_is_encoded_again(engine: Engine) -> None:
    """So few pages that requests give up theirs, and the encoder's with them."""
    many = [
        request(number, TIMED, f"{number}-{copy}", max_tokens=50, ignore_eos=True)
        for number in (0, 2)
        for copy in range(2)
    ]
    plenty = tokens_of(engine.run(many))
    few = engine.run(many, num_pages=14)
    assert max(delta.num_preemptions for deltas in few.values() for delta in deltas) > 0
    assert tokens_of(few) == plenty


def test_a_request_goes_on_after_the_tokens_of_another_engine(engine: Engine) -> None:
    """Its timestamps too, which follow from those before."""
    for one in requests(TIMED):
        name = one.sequences[0].request_id
        tokens = tokens_of(engine.run([one]))[name]
        if len(tokens) > 5:
            assert tokens_of(engine.run([resumed_after(tokens[:5], one)])) == {name: tokens[5:]}


def test_equal_sounds_are_encoded_once(engine: Engine) -> None:
    encoded: list[int] = []
    encode = engine.worker.get_model().encode  # type: ignore[attr-defined]

    def counted(content: Any, step: Any) -> None:
        encoded.append(len(content))
        encode(content, step)

    engine.worker.get_model().encode = counted  # type: ignore[attr-defined]
    try:
        engine.run([request(0, name="a"), request(1), request(0, TIMED, "b"), request(0, name="c")], depth=1)
    finally:
        del engine.worker.get_model().encode  # type: ignore[attr-defined]
    assert sum(encoded) == 2


def test_ranks_together_give_the_tokens_of_one(made: tuple[Path, Any], expected: dict[str, list[int]]) -> None:
    config = config_of(made[0], layout=Layout(tensor=2), executor="mp")
    groups: list[ParallelGroup] = list(ThreadGroup.all_of(2))

    def run(number: int) -> dict[str, list[int]]:
        torch.set_num_threads(1)
        return tokens_of(Engine(config, Rank(tensor=number), groups[number]).run(requests()))

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, range(2))) == [expected, expected]


def test_the_end_and_silence_are_special_tokens() -> None:
    """The tokenizer of the tests is like Whisper's own: silence comes right before the token without timestamps."""
    assert ID["<|nospeech|>"] + 1 == NO_TIMESTAMPS == FIRST_STAMP - 1

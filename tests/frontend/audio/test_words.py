"""Times of words: those of Transformers on the same tiny Whisper."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from transformers import PreTrainedModel
from transformers.models.whisper.generation_whisper import _dynamic_time_warping
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from quire import AsyncLLM
from quire.core.errors import ParameterError
from quire.frontend.audio.schema import TranscriptionRequest
from quire.frontend.audio.service import SpeechToText
from quire.frontend.audio.words import _characters, _joined, _words, warped
from quire.frontend.chat.conversation import Conversations
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.media.sounds.clips import clip_starts
from tests.servers import ServerProcess
from tests.test_resilience import kill_engine
from tests.tiny_whisper import END, FIRST_STAMP, RATE, as_read, reference_times, sound, tokenizer, wav, write_whisper

NUM_TOKENS = 14
GREEDY = {"temperature": "0", "max_completion_tokens": str(NUM_TOKENS), "response_format": "verbose_json"}


class _Tokenizer:
    """What Transformers' functions ask a tokenizer."""

    eos_token_id = END

    def decode(self, tokens: list[int], **_: Any) -> str:
        return str(tokenizer().decode(tokens))


@pytest.mark.parametrize("seed", range(4))
def test_the_path_is_that_of_transformers(seed: int) -> None:
    """With many equal costs, too."""
    draw = np.random.default_rng(seed)
    for shape in ((1, 1), (1, 9), (9, 1), (7, 30), (30, 7)):
        for costs in (draw.standard_normal(shape), draw.integers(0, 3, shape).astype(float)):
            expected = _dynamic_time_warping(costs)
            for ours, theirs in zip(warped(costs), expected, strict=True):
                assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize(
    "text", [" Hello, world! It's (well) done.", ' ¿Qué? "Sí", dijo.', " 한국어 and ünïcode… ", "x", " 3.5 - 4 %"]
)
@pytest.mark.parametrize("language", ["english", "japanese"])
def test_words_are_those_of_transformers(text: str, language: str) -> None:
    token_ids = tokenizer().encode(text).ids
    expected = _combine_tokens_into_words(_Tokenizer(), token_ids, language)
    characters = _characters(token_ids, _Tokenizer().decode)
    found = _joined(_words(characters) if language == "english" else characters)
    assert [text for text, _ in found] == expected[0]
    assert [own for _, own in found] == expected[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("words")


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    model = write_whisper(folder)
    model.set_attn_implementation("eager")  # whose weights can be read
    return model


@pytest.fixture(scope="module", params=[1, 2], ids=lambda size: f"tp{size}")
def server(reference: PreTrainedModel, folder: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """Steps of 60 tokens: the tokens of several clips, which are read once more for their times, come in chunks."""
    arguments = (
        str(folder), "--num-gpu-blocks-override", "200", "--dtype", "float32", "--max-num-seqs", "8",
        "--max-num-batched-tokens", "60", "--tensor-parallel-size", str(request.param), "--device", "cpu",
    )  # fmt: skip
    process = ServerProcess(folder, *arguments)
    try:
        yield process.wait_until_ready()
    finally:
        process.stop()


def transcribed(server: ServerProcess, samples: np.ndarray, **fields: Any) -> httpx.Response:
    return httpx.post(
        f"{server.base_url}/v1/audio/transcriptions",
        files={"file": ("a.wav", wav(samples))},
        data={**GREEDY, **fields},
        timeout=60,
    )


def expected_words(
    model: PreTrainedModel, samples: np.ndarray, language: str, start_seconds: float = 0.0
) -> list[tuple[str, Any, Any]]:
    """Words of a clip, segment by segment, as the library's pipeline makes them of tokens with times."""
    tokens, times = reference_times(model, samples, NUM_TOKENS, language=language, task="transcribe")
    found, own = [], []
    for at, token in enumerate([*tokens, END]):
        if token < END:
            own.append(at)
            continue
        texts, _, places = _combine_tokens_into_words(
            _Tokenizer(), [tokens[each] for each in own], "japanese" if language == "ja" else "english"
        )
        for text, indices in zip(texts, places, strict=True):
            first, last = own[indices[0]], own[indices[-1]]
            start = times[first - 1] if first else 0.0
            if text.strip():
                seconds = (pytest.approx(start_seconds + each, abs=5e-3) for each in (start, times[last]))
                found.append((text.strip(), *seconds))
        own = []
    assert any(token >= FIRST_STAMP for token in tokens)
    return found


@pytest.mark.parametrize("language", ["en", "ja"])
def test_times_are_those_of_transformers(server: ServerProcess, reference: PreTrainedModel, language: str) -> None:
    ends = set()
    for number, seconds in ((0, 0.7), (3, 0.93), (5, 0.41)):
        samples = sound(number, seconds)
        answer = transcribed(server, samples, language=language, **{"timestamp_granularities[]": ["word", "segment"]})
        assert answer.status_code == 200, answer.text
        words = answer.json()["words"]
        found = [(each["word"], each["start"], each["end"]) for each in words]
        assert found == expected_words(reference, as_read(samples), language)
        assert answer.json()["segments"]
        ends |= {each["end"] for each in words}
    assert len(ends) > 3, "the times must differ to prove anything"


def test_words_alone_and_of_several_clips(server: ServerProcess, reference: PreTrainedModel) -> None:
    """Times count from the beginning of the sound."""
    samples = sound(5, 5.3)
    answer = transcribed(server, samples, language="en", **{"timestamp_granularities[]": "word"}).json()
    assert answer["segments"] is None
    read, expected = as_read(samples), []
    starts = clip_starts(read, RATE, RATE)
    for start, end in zip(starts, [*starts[1:], len(read)], strict=True):
        expected += expected_words(reference, read[start:end], "en", start / RATE)
    assert len(starts) > 5
    assert [(each["word"], each["start"], each["end"]) for each in answer["words"]] == expected


def test_times_outlast_a_crash(server: ServerProcess) -> None:
    """Of a sound with many clips, whose texts are written and aligned side by side."""
    samples = sound(7, 20.0)
    fields: dict[str, Any] = {"language": "en", "timestamp_granularities[]": "word", "max_completion_tokens": "40"}
    undisturbed = transcribed(server, samples, **fields).json()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(transcribed, server, samples, **fields)
        time.sleep(0.3)
        kill_engine(server)
        assert answer.result().json() == undisturbed
    assert undisturbed["words"]


@pytest.mark.parametrize("heads", [None, [[0, 1], [2, 0]]], ids=["none", "of another model"])
def test_a_checkpoint_without_alignment_heads_is_told(tmp_path: Path, heads: list[list[int]] | None) -> None:
    write_whisper(tmp_path, generation={"alignment_heads": heads})
    request = TranscriptionRequest(response_format="verbose_json", timestamp_granularities=["word"])

    async def check() -> None:
        engine = AsyncLLM.from_engine_args(model=str(tmp_path), num_gpu_blocks_override=100, device="cpu")
        service = SpeechToText(engine, Conversations(engine, ServerConfig()))
        with pytest.raises(ParameterError, match="alignment_heads"):
            service.check(request)
        await engine.aclose()

    asyncio.run(check())

"""/v1/audio/transcriptions and /v1/audio/translations, by a server of a tiny Whisper, against Transformers."""

import asyncio
import io
import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from transformers import PreTrainedModel

from quire import LLM, AsyncLLM, SamplingParams
from quire.core.errors import ParameterError
from quire.frontend.media.sounds.clips import clip_starts
from tests.commands import quire
from tests.servers import ServerProcess
from tests.tiny_whisper import (
    FIRST_STAMP,
    ID,
    LANGUAGES,
    RATE,
    as_read,
    prompt_ids,
    reference_logprobs,
    reference_tokens,
    sound,
    tokenizer,
    wav,
    write_whisper,
)

OPTIONS: dict[str, Any] = {"num_gpu_blocks_override": 200, "max_num_seqs": 8, "device": "cpu"}
LONG = sound(5, 2.6)
NUM_TOKENS = 12
GREEDY = {"temperature": 0, "max_completion_tokens": NUM_TOKENS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whisper")


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return write_whisper(folder)


@pytest.fixture(scope="module")
def server(reference: PreTrainedModel, folder: Path) -> Iterator[ServerProcess]:
    arguments = [str(folder), "--served-model-name", "ears", "--num-gpu-blocks-override", "200", "--dtype", "float32"]
    process = ServerProcess(folder, *arguments, "--max-num-seqs", "8", env={"QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB": "0.25"})
    try:
        yield process.wait_until_ready()
    finally:
        process.stop()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)


def post(server: ServerProcess, data: bytes | None, route: str = "transcriptions", **fields: Any) -> httpx.Response:
    files = None if data is None else {"file": ("a.wav", data)}
    return httpx.post(f"{server.base_url}/v1/audio/{route}", files=files, data=fields, timeout=60)


def clips_of(samples: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(first sample, samples) of each clip that is heard of a WAV file."""
    read = as_read(samples)
    starts = clip_starts(read, RATE, RATE)
    return [(start, read[start:end]) for start, end in zip(starts, [*starts[1:], len(read)], strict=True)]


def text_of(tokens: list[int]) -> str:
    return str(tokenizer().decode([each for each in tokens if each < FIRST_STAMP])).strip()


def expected_text(model: PreTrainedModel, samples: np.ndarray, task: str = "transcribe", language: str = "en") -> str:
    texts = [
        text_of(reference_tokens(model, clip, NUM_TOKENS, language=language, task=task))
        for _, clip in clips_of(samples)
    ]
    return " ".join(text for text in texts if text)


# ------------------------------------------------------------------------------------------------------------ Python


@pytest.fixture(scope="module")
def llm(reference: PreTrainedModel, folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", **OPTIONS) as llm:
        yield llm


def test_prompts_with_a_sound(llm: LLM, reference: PreTrainedModel) -> None:
    """In vLLM's forms; a prompt without the start gets it."""
    timed = "<|startoftranscript|><|en|><|transcribe|>"
    plain = f"{timed}<|notimestamps|>"
    audio, in_a_list = {"audio": (sound(), RATE)}, {"audio": [(sound(), RATE)]}
    ids = prompt_ids("en", "transcribe", "notimestamps")
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    forms: list[Any] = [
        {"prompt": plain, "multi_modal_data": audio},
        {"prompt_token_ids": ids, "multi_modal_data": in_a_list},
        {"encoder_prompt": {"prompt": "", "multi_modal_data": audio}, "decoder_prompt": plain},
        {"prompt": "<|en|><|transcribe|><|notimestamps|>", "multi_modal_data": audio},
    ]

    def tokens_of(output: Any) -> list[int]:
        return [each for each in output.outputs[0].token_ids if each != ID["<|endoftext|>"]]

    wanted = reference_tokens(reference, sound(), NUM_TOKENS, language="en", task="transcribe")
    for output in llm.generate(forms, greedy):
        assert output.prompt_token_ids == ids
        assert tokens_of(output) == wanted
    [output] = llm.generate([{"prompt": timed, "multi_modal_data": audio}], greedy)
    stamped = reference_tokens(reference, sound(), NUM_TOKENS, language="en", task="transcribe", timestamps=True)
    assert tokens_of(output) == stamped


def test_prompts_that_are_refused(llm: LLM) -> None:
    audio = {"audio": (sound(), RATE)}
    wrong: dict[str, Any] = {
        "no sound": {"prompt": "hello"},
        "holds 'image'": {"prompt": "", "multi_modal_data": {"audio": (sound(), RATE), "image": 1}},
        "hears 1 s": {"prompt": "", "multi_modal_data": {"audio": (sound(seconds=1.5), RATE)}},
        "reads no text": {"encoder_prompt": {"prompt": "a", "multi_modal_data": audio}, "decoder_prompt": ""},
        "belongs to encoder_prompt": {
            "encoder_prompt": {"prompt": "", "multi_modal_data": audio},
            "decoder_prompt": {"prompt": "", "multi_modal_data": audio},
        },
    }
    for reason, prompt in wrong.items():
        with pytest.raises(ParameterError, match=reason):
            llm.generate([prompt])


# ------------------------------------------------------------------------------------------------------------- HTTP


def test_a_sound_becomes_text(client: openai.OpenAI, reference: PreTrainedModel) -> None:
    """By OpenAI's client; a long one clip by clip."""
    for samples in (sound(), LONG):
        found = client.audio.transcriptions.create(
            file=("a.wav", wav(samples)), model="ears", language="en", temperature=0,
            extra_body={"max_completion_tokens": NUM_TOKENS},
        )  # fmt: skip
        assert found.text == expected_text(reference, samples)
        assert found.usage is not None
        assert (found.usage.type, found.usage.seconds) == ("duration", math.ceil(len(samples) / RATE))


def test_a_translation_has_its_own_task(client: openai.OpenAI, reference: PreTrainedModel) -> None:
    found = client.audio.translations.create(
        file=("a.wav", wav(LONG)), model="ears", temperature=0,
        extra_body={"max_completion_tokens": NUM_TOKENS, "language": "de", "to_language": "en"},
    )  # fmt: skip
    assert found.text == expected_text(reference, LONG, "translate", "de")


def test_the_language_is_heard(server: ServerProcess, reference: PreTrainedModel) -> None:
    """The likeliest of the model's after the start, of the first clip."""
    row = reference_logprobs(reference, clips_of(LONG)[0][1], prompt_ids())[-1]
    language = max(LANGUAGES, key=lambda code: row[ID[f"<|{code}|>"]].item())
    found = post(server, wav(LONG), response_format="verbose_json", **GREEDY).json()
    assert found["language"] == language
    named = post(server, wav(LONG), language=language, **GREEDY).json()
    assert post(server, wav(LONG), **GREEDY).json() == named


def test_segments_have_exact_times(client: openai.OpenAI, reference: PreTrainedModel) -> None:
    """Those of the library's own timestamps, from where the clip begins."""
    found: Any = client.audio.transcriptions.create(
        file=("a.wav", wav(LONG)), model="ears", language="en", temperature=0, response_format="verbose_json",
        timestamp_granularities=["segment"], extra_body={"max_completion_tokens": NUM_TOKENS},
    )  # fmt: skip
    assert found.duration == pytest.approx(len(LONG) / RATE)
    assert [segment.id for segment in found.segments] == list(range(len(found.segments)))
    by_clip: dict[int, list[Any]] = {}
    for segment in found.segments:
        by_clip.setdefault(segment.seek, []).append(segment)
    for start, clip in clips_of(LONG):
        options: dict[str, Any] = {"language": "en", "task": "transcribe", "timestamps": True}
        tokens = reference_tokens(reference, clip, NUM_TOKENS, **options)
        segments = by_clip.pop(round(start / RATE * 100), [])
        assert "".join(segment.text for segment in segments).strip() == text_of(tokens)
        assert all(
            start / RATE - 0.001 <= each.start <= each.end <= (start + len(clip)) / RATE + 0.001 for each in segments
        )
        if segments:
            first = (tokens[0] - FIRST_STAMP) * 0.02 + start / RATE
            assert segments[0].start == pytest.approx(first, abs=1e-3)
            silence = reference_logprobs(reference, clip, prompt_ids())[-1, ID["<|nospeech|>"]].exp().item()
            assert segments[0].no_speech_prob == pytest.approx(silence, rel=1e-3)
    assert not by_clip


def test_subtitles_and_text(server: ServerProcess, client: openai.OpenAI, reference: PreTrainedModel) -> None:
    fields = {"language": "en", **GREEDY}
    segments = post(server, wav(LONG), response_format="verbose_json", **fields).json()["segments"]
    srt = post(server, wav(LONG), response_format="srt", **fields)
    assert srt.headers["content-type"].startswith("application/x-subrip")
    cues = srt.text.strip("\n").split("\n\n")
    assert len(cues) == len(segments)
    assert cues[0].split("\n")[:2] == [
        "1",
        f"00:00:0{segments[0]['start']:.3f} --> 00:00:0{segments[0]['end']:.3f}".replace(".", ","),
    ]
    vtt = post(server, wav(LONG), response_format="vtt", **fields)
    assert vtt.text.startswith("WEBVTT\n\n00:00:0")
    assert vtt.headers["content-type"].startswith("text/vtt")
    text = client.audio.transcriptions.create(
        file=("a.wav", wav(LONG)), model="ears", language="en", temperature=0, response_format="text",
        extra_body={"max_completion_tokens": NUM_TOKENS},
    )  # fmt: skip
    assert text == expected_text(reference, LONG) + "\n"


def test_a_stream_is_the_whole_answer(server: ServerProcess, client: openai.OpenAI, reference: PreTrainedModel) -> None:
    """OpenAI's client reads its events, and vLLM's clients read theirs of the same."""
    wanted = expected_text(reference, LONG)
    stream = client.audio.transcriptions.create(
        file=("a.wav", wav(LONG)), model="ears", language="en", stream=True, temperature=0,
        extra_body={"max_completion_tokens": NUM_TOKENS},
    )  # fmt: skip
    events = list(stream)
    assert "".join(event.delta for event in events if event.type == "transcript.text.delta") == wanted
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == wanted
    answer = post(server, wav(LONG), language="en", stream="true", stream_include_usage="true", **GREEDY)
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"transcription.chunk"}
    assert "".join(choice["delta"]["content"] for chunk in chunks for choice in chunk["choices"]) == wanted
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert sum(reason is not None for reason in reasons) == len(clips_of(LONG))
    usage = chunks[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens"] == 4 * len(clips_of(LONG))


def test_a_prompt_goes_before(server: ServerProcess, reference: PreTrainedModel) -> None:
    before = [ID["<|startofprev|>"], *tokenizer().encode(" names").ids]
    prompt = [*before, *prompt_ids("en", "transcribe", "notimestamps")]
    row = reference_logprobs(reference, clips_of(sound())[0][1], prompt)[-1].clone()
    row[[ID["!"], ID["Ġ"], ID["<|endoftext|>"], *range(ID["<|translate|>"], ID["<|startofprev|>"] + 1)]] = -math.inf
    row[ID["<|startoftranscript|>"]] = -math.inf
    fields: dict[str, Any] = {"language": "en", "temperature": 0, "max_completion_tokens": 1, "prompt": "names"}
    assert post(server, wav(sound()), **fields).json()["text"] == text_of([int(row.argmax())])


def test_a_text_that_looks_wrong_is_written_at_higher_temperatures(server: ServerProcess) -> None:
    """A random model finds all its texts unlikely, so the last temperature is left; a seed makes it the same again."""
    fields: dict[str, Any] = {
        "language": "en",
        "seed": 7,
        "response_format": "verbose_json",
        "max_completion_tokens": 20,
    }
    once, again = (post(server, wav(sound()), **fields).json() for _ in range(2))
    assert once == again
    assert {segment["temperature"] for segment in once["segments"]} == {1.0}
    asked = post(server, wav(sound()), **{**fields, "temperature": 0.3}).json()
    assert {segment["temperature"] for segment in asked["segments"]} == {0.3}


def test_beams(server: ServerProcess, reference: PreTrainedModel) -> None:
    fields: dict[str, Any] = {"language": "en", "use_beam_search": "true", "max_completion_tokens": 4}
    one = post(server, wav(sound()), n=1, **fields)
    assert one.status_code == 200
    assert one.json()["text"] == text_of(
        reference_tokens(reference, clips_of(sound())[0][1], 4, language="en", task="transcribe")
    )
    assert post(server, wav(sound()), n=4, **fields).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"language": "xx"}, "language", "not one of the model's"),
        ({"response_format": "diarized_json"}, "response_format", "speakers"),
        ({"response_format": "yaml"}, "response_format", "srt"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities", "verbose_json"),
        ({"response_format": "srt", "stream": "true"}, "stream", "whole"),
        ({"stream_include_usage": "true"}, "stream_include_usage", "stream=true"),
        ({"to_language": "de", "language": "en"}, "to_language", "refused"),
        ({"temperature": "hot"}, "temperature", ""),
        ({"temperature": "-1"}, "temperature", ""),
        ({"n": "2"}, "n", "use_beam_search"),
        ({"hotwords": "Quire"}, "hotwords", "prompt"),
        ({"max_completion_tokens": "0"}, "max_completion_tokens", "at least 1"),
        ({"watermarking": "true"}, "watermarking", "watermark"),
        ({"vllm_xargs": "{"}, "vllm_xargs", "JSON"),
        ({"timeout": "-1"}, "timeout", ""),
    ],
    ids=str,
)
def test_fields_that_are_refused(server: ServerProcess, fields: dict[str, Any], param: str, reason: str) -> None:
    answer = post(server, wav(sound()), **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert reason in error["message"]


def test_files_that_are_refused(server: ServerProcess) -> None:
    whole = wav(sound(seconds=1.0))
    for data, reason in [
        (b"", "is empty"),
        (b"junk" * 99, "no sound file"),
        (whole[:20_000], "cut off"),
        (bytes(2**19), "MAX_AUDIO_CLIP_FILESIZE_MB"),
    ]:
        answer = post(server, data)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "file"
        assert reason in answer.json()["error"]["message"]
    missing = httpx.post(f"{server.base_url}/v1/audio/transcriptions", files={"language": (None, "en")})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "file")
    twice = httpx.post(
        f"{server.base_url}/v1/audio/transcriptions", files=[("file", ("a", whole)), ("file", ("b", whole))]
    )
    assert (twice.status_code, twice.json()["error"]["param"]) == (400, "file")
    as_json = httpx.post(f"{server.base_url}/v1/audio/transcriptions", json={"file": "a"})
    assert as_json.status_code == 415
    torn = httpx.post(
        f"{server.base_url}/v1/audio/transcriptions",
        content=b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc',
        headers={"Content-Type": "multipart/form-data; boundary=x"},
    )
    assert torn.status_code == 400
    assert "no valid form" in torn.json()["error"]["message"]


def test_other_models_and_unknown_fields(server: ServerProcess) -> None:
    assert post(server, wav(sound()), model="other").status_code == 404
    answer = post(server, wav(sound()), language="en", colour="red", **GREEDY)
    assert answer.status_code == 200
    assert answer.headers["x-quire-ignored-fields"] == "colour"


def test_sounds_of_several_formats(server: ServerProcess, reference: PreTrainedModel) -> None:
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, sound(), RATE, format="FLAC", subtype="PCM_16")
    answer = post(server, file.getvalue(), language="en", **GREEDY)
    assert answer.json()["text"] == post(server, wav(sound()), language="en", **GREEDY).json()["text"]


def test_a_load_of_sounds_is_measured(server: ServerProcess, tmp_path: Path) -> None:
    """The sounds' own transcripts have no word errors, and a wrong word is one."""
    for number, samples in enumerate((sound(), LONG)):
        (tmp_path / f"{number}.wav").write_bytes(wav(samples))
        text = post(server, wav(samples), language="en", **GREEDY).json()["text"]
        (tmp_path / f"{number}.txt").write_text(text)
    load = (
        "bench", "serve", "--base-url", server.base_url, "--backend", "openai-audio", "--dataset-name", "custom_audio",
        "--dataset-path", str(tmp_path), "--num-prompts", "3", "--custom-output-len", str(NUM_TOKENS), "--temperature",
        "0", "--extra-body", '{"language": "en"}', "--disable-tqdm", "--output-json", str(tmp_path / "figures.json"),
        "--disable-shuffle",
    )  # fmt: skip
    done = quire(*load)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["completed"], figures["word_error_rate"]) == (3, 0.0)
    assert figures["total_audio_seconds"] == pytest.approx((2 * len(sound()) + len(LONG)) / RATE)
    assert figures["rtfx"] == pytest.approx(figures["total_audio_seconds"] / figures["duration"])
    assert figures["total_input_tokens"] == 4 * (2 + len(clips_of(LONG)))
    assert "Word error rate (%)" in done.stdout
    with (tmp_path / "0.txt").open("a") as file:
        file.write(" wrong")
    assert quire(*load).returncode == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["word_error_rate"] == pytest.approx(2 / figures["num_reference_words"])
    refused = quire("bench", "serve", "--base-url", server.base_url, "--backend", "openai-audio", "--num-prompts", "1")
    assert refused.returncode != 0
    assert "--dataset-name custom_audio" in refused.stderr


def test_sounds_go_on_after_a_crash(reference: PreTrainedModel, folder: Path) -> None:
    """The next engine encodes a sound again."""
    greedy = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)

    async def run(*, is_disturbed: bool) -> list[list[int]]:
        engine = AsyncLLM.from_engine_args(model=str(folder), dtype="float32", **OPTIONS)
        killed = asyncio.Event()
        try:
            await engine.start()

            async def stream(number: int) -> list[int]:
                prompt: Any = {
                    "prompt_token_ids": prompt_ids("en", "transcribe", "notimestamps"),
                    "multi_modal_data": {"audio": (sound(number), RATE)},
                }
                async for output in engine.generate(prompt, greedy, str(number)):
                    if is_disturbed and not killed.is_set() and len(output.outputs[0].token_ids) > 2:
                        killed.set()
                        os.kill(engine.client.engine_pids[0] or 0, signal.SIGKILL)
                return list(output.outputs[0].token_ids)

            found = await asyncio.gather(*map(stream, range(4)))
            assert engine.client.status().engine.restarts == int(is_disturbed)
            return found
        finally:
            await engine.aclose()

    undisturbed = asyncio.run(run(is_disturbed=False))
    assert asyncio.run(run(is_disturbed=True)) == undisturbed
    assert len({tuple(tokens) for tokens in undisturbed}) > 1, "the sounds must differ to prove anything"
    wanted = reference_tokens(reference, sound(0), NUM_TOKENS, language="en", task="transcribe")
    assert undisturbed[0][: len(wanted)] == wanted

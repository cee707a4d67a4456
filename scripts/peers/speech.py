"""Text of a minute of speech by several engines: seconds of sound a second, of one file and of eight at once.

    python scripts/peers/speech.py make MODELS
    python scripts/peers/speech.py compare MODELS/whisper-tiny-shape --engines quire:bfloat16 quire:bfloat16:int8 \
        --peers ctranslate2:int8 transformers:float32 --peer-python VENV/bin/python

`make` writes two checkpoints of random weights, of the shapes of Whisper tiny and small, and speech.wav, which
espeak-ng speaks (apt-get install espeak-ng). It needs this environment's transformers. Each engine of `compare` runs in
a process of its own, in turn. After a colon: the dtype, the format of weights that Quire makes, and the bits of its
activations; CTranslate2, which faster-whisper runs on, has one for all. The peers' environment has ctranslate2,
faster-whisper, soundfile and transformers with torch, of versions that fit each other. Times begin with samples: each
engine makes its own spectrograms. Outputs are greedy and of full length.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import turns  # beside this file

RATE, CLIP_SECONDS, NUM_CLIPS, NUM_FILES, NUM_TOKENS = 16_000, 30, 2, 8, 100
ONE, MANY = "one file", f"{NUM_FILES} files at once"
START = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
END = "<|endoftext|>"
SPEECH = (
    "The quick brown fox jumps over the lazy dog, while seven wise owls watch from a very old tree. Nobody knows how "
    "long they sat there, or what they thought of it. "
)

Write = Callable[[list[Any]], list[int]]
"""Maps clips, each [num_samples] float32, to the lengths of their texts in tokens."""

SHAPES: dict[str, dict[str, int]] = {
    "whisper-tiny-shape": {"d_model": 384, "layers": 4, "heads": 6},
    "whisper-small-shape": {"d_model": 768, "layers": 12, "heads": 12},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="Write the checkpoints and the sound.")
    make.add_argument("models", type=Path, help="The folder for them.")
    compare = commands.add_parser("compare", help="Measure engines in turn.")
    compare.add_argument("model", type=Path, help="Folder of a checkpoint, beside speech.wav.")
    turns.add_options(compare)
    args = parser.parse_args()
    if args.command == "make":
        args.models.mkdir(parents=True, exist_ok=True)
        _speak(args.models / "speech.wav")
        for name, shape in SHAPES.items():
            _make(args.models / name, **shape)
    elif args.measure:
        print(json.dumps(_measure(args.model, _start(args.measure, args.model))))
    else:
        _compare(args)


def _compare(args: argparse.Namespace) -> None:
    found = turns.run(args, [__file__, "compare", str(args.model)])
    print(f"| {args.model.name}, seconds of sound/s | {ONE} | {MANY} |\n|---|---|---|")
    for name, runs in found.items():
        print(
            f"| {name} | "
            + " | ".join(f"{statistics.median(run[work] for run in runs):.1f}" for work in (ONE, MANY))
            + " |"
        )


def _measure(model: Path, write: Write) -> dict[str, float]:
    """Returns the best rates of three, after a file that is not counted. All sounds differ."""
    import numpy as np
    import soundfile

    speech, rate = soundfile.read(model.parent / "speech.wav", dtype="float32")
    assert rate == RATE
    size, shift = RATE * CLIP_SECONDS, 0

    def clips(num_files: int) -> list[Any]:
        nonlocal shift
        found = []
        for _ in range(num_files):
            shift += 977
            sound = np.roll(speech, shift)
            found += [np.ascontiguousarray(sound[number * size : (number + 1) * size]) for number in range(NUM_CLIPS)]
        return found

    def rate_of(num_files: int) -> float:
        batch = clips(num_files)
        started = time.perf_counter()
        lengths = write(batch)
        seconds = time.perf_counter() - started
        if lengths != [NUM_TOKENS] * len(batch):
            raise SystemExit(f"texts of {lengths} tokens instead of {NUM_TOKENS}")
        return num_files * NUM_CLIPS * CLIP_SECONDS / seconds

    write(clips(1))
    return {ONE: max(rate_of(1) for _ in range(3)), MANY: max(rate_of(NUM_FILES) for _ in range(3))}


def _start(name: str, model: Path) -> Write:
    engine, *settings = name.split(":")
    return ENGINES[engine](model, *settings)


def _quire(model: Path, dtype: str = "auto", quantization: str | None = None, bits: str = "") -> Write:
    from quire import LLM, SamplingParams

    if bits:
        os.environ["QUIRE_CPU_ACTIVATION_BITS"] = bits
    llm = LLM(str(model), dtype=dtype, quantization=quantization, max_num_seqs=NUM_FILES * NUM_CLIPS)
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    prompt = _ids(model, START)

    def write(clips: list[Any]) -> list[int]:
        prompts: list[Any] = [
            {"prompt_token_ids": prompt, "multi_modal_data": {"audio": (clip, RATE)}} for clip in clips
        ]
        return [len(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling, use_tqdm=False)]

    return write


def _transformers(model: Path, dtype: str = "float32") -> Write:
    import torch
    from transformers import GenerationMixin, WhisperFeatureExtractor, WhisperForConditionalGeneration

    loaded = WhisperForConditionalGeneration.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    extract, prompt = WhisperFeatureExtractor.from_pretrained(model), _ids(model, START)

    def write(clips: list[Any]) -> list[int]:
        with torch.inference_mode():
            features = extract(clips, sampling_rate=RATE, return_tensors="pt")["input_features"]
            found = GenerationMixin.generate(  # that of Whisper would seek for timestamps
                loaded, features.to(loaded.dtype), decoder_input_ids=torch.tensor([prompt] * len(clips)),
                do_sample=False, num_beams=1, min_new_tokens=NUM_TOKENS, max_new_tokens=NUM_TOKENS,
            )  # fmt: skip
        return [len(row) - len(prompt) for row in found]

    return write


def _ctranslate2(model: Path, compute_type: str = "float32") -> Write:
    import ctranslate2
    import numpy as np
    from faster_whisper.feature_extractor import FeatureExtractor

    with tempfile.TemporaryDirectory() as folder:
        ctranslate2.converters.TransformersConverter(str(model)).convert(folder, force=True)
        whisper = ctranslate2.models.Whisper(folder, device="cpu", compute_type=compute_type)
    extract, prompt, [end] = FeatureExtractor(), _ids(model, START), _ids(model, [END])

    def write(clips: list[Any]) -> list[int]:
        features = np.stack([np.ascontiguousarray(extract(clip)[:, : CLIP_SECONDS * 100]) for clip in clips])
        found = whisper.generate(
            ctranslate2.StorageView.from_array(features),
            [prompt] * len(clips),
            beam_size=1,
            max_length=2 * NUM_TOKENS,
            suppress_tokens=[end],
            suppress_blank=False,
        )  # fmt: skip: half of max_length is for the text
        return [len(each.sequences_ids[0]) for each in found]

    return write


ENGINES: dict[str, Callable[..., Write]] = {
    "quire": _quire,
    "transformers": _transformers,
    "ctranslate2": _ctranslate2,
}


def _ids(model: Path, tokens: Sequence[str]) -> list[int]:
    added = json.loads((model / "tokenizer.json").read_text())["added_tokens"]
    known = {each["content"]: each["id"] for each in added}
    return [known[token] for token in tokens]


def _speak(path: Path) -> None:
    """Writes a minute of speech at `RATE`."""
    import numpy as np
    import soundfile
    import soxr

    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.wav"
        subprocess.run(["espeak-ng", "-w", str(raw), SPEECH * 12], check=True)
        samples, rate = soundfile.read(raw, dtype="float32")
    sound = np.resize(soxr.resample(samples, rate, RATE), RATE * CLIP_SECONDS * NUM_CLIPS)
    soundfile.write(path, sound, RATE)


def _make(folder: Path, *, d_model: int, layers: int, heads: int) -> None:
    """Writes a checkpoint of random weights, with Whisper's own special tokens among words without a meaning."""
    import torch
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [f"w{number}" for number in range(50_257 - len(alphabet))]
    languages = [f"<|{code}|>" for code in transformers.models.whisper.tokenization_whisper.LANGUAGES][:99]
    special = [
        END, START[0], *languages, "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>",
        "<|nospeech|>", "<|notimestamps|>", *(f"<|{number * 0.02:.2f}|>" for number in range(1501)),
    ]  # fmt: skip
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    ids = {token: len(words) + place for place, token in enumerate(special)}
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=len(words) + len(special), d_model=d_model, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=4 * d_model,
        decoder_ffn_dim=4 * d_model, decoder_start_token_id=ids[START[0]], bos_token_id=ids[END],
        eos_token_id=ids[END], pad_token_id=ids[END], suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    facts = {
        "is_multilingual": True, "no_timestamps_token_id": ids[START[-1]],
        "lang_to_id": {language: ids[language] for language in languages},
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("translate", "transcribe")},
        "alignment_heads": [[layers - 1, 0]],
    }  # fmt: skip
    for name, value in facts.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END, unk_token=END
    ).save_pretrained(folder)
    transformers.WhisperFeatureExtractor().save_pretrained(folder)


if __name__ == "__main__":
    main()

"""`--dataset-name custom_audio`: sound files, and what is said in them.

`--dataset-path` is a JSONL file of `{"audio": path, "text": what is said, "prompt": a question}`, or a folder of sound
files, each with a `.txt` file of the same name beside it. Texts and prompts may be left out. A path in a JSONL file
counts from the file's own folder.
"""

import argparse
from pathlib import Path

import numpy as np
from msgspec import Struct

from quire.core.errors import ConfigError
from quire.frontend.bench.datasets.lines import read_lines
from quire.frontend.bench.datasets.request import BenchRequest, Sound, Vocabulary
from quire.frontend.media.errors import MediaError
from quire.frontend.media.sounds.files import read_file

_SUFFIXES = frozenset({".wav", ".flac", ".ogg", ".opus", ".mp3", ".m4a", ".mp4", ".webm", ".aiff", ".aif"})
_RATE = 16_000
_LONGEST_SECONDS = 24 * 3600.0


class _Line(Struct):
    audio: str
    text: str | None = None
    prompt: str = "Transcribe this audio."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds vLLM's flags for sounds."""
    group = parser.add_argument_group("custom_audio dataset")
    for name, default, text in (("min", 0.0, "Shorter"), ("max", float("inf"), "Longer")):
        group.add_argument(
            f"--asr-{name}-audio-len-sec",
            type=float,
            default=default,
            help=f"{text} sounds are left out, in seconds (default: %(default)s).",
        )


class SoundDataset:
    """The dataset of sound files. Their output is as long as the model makes it, `--custom-output-len` at most."""

    def __init__(self, args: argparse.Namespace) -> None:
        if not args.dataset_path:
            raise ConfigError("--dataset-name custom_audio needs --dataset-path FILE.jsonl, or a folder of sounds.")
        if args.input_len is not None:
            raise ConfigError("--input-len: sounds have the lengths they have; leave it out.")
        self._path = Path(args.dataset_path)
        self._output_len = args.output_len if args.output_len is not None else args.custom_output_len
        if self._output_len < 1:
            raise ConfigError(f"--custom-output-len must be at least 1 for sounds, got {self._output_len}.")
        self._seconds = (args.asr_min_audio_len_sec, args.asr_max_audio_len_sec)
        self._shuffle = not args.disable_shuffle
        self._oversample = not args.no_oversample

    def requests(self, num_prompts: int, vocabulary: Vocabulary, seed: int) -> list[BenchRequest]:
        """The first sounds. Repeats them if there are too few, unless `--no-oversample` is given."""
        lines = self._folder() if self._path.is_dir() else self._file()
        if self._shuffle:
            lines = [lines[index] for index in np.random.default_rng(seed).permutation(len(lines))]
        requests: list[BenchRequest] = []
        for line in lines:
            if len(requests) == num_prompts:
                break
            sound = self._read(line)
            if self._seconds[0] <= sound.num_seconds <= self._seconds[1]:
                requests.append(BenchRequest([], self._output_len, line.prompt, sound=sound))
        if not requests:
            raise ConfigError(f"--dataset-path {self._path} holds no sound of the wanted length.")
        if self._oversample:
            requests = [requests[index % len(requests)] for index in range(num_prompts)]
        return requests

    def _read(self, line: _Line) -> Sound:
        path = Path(line.audio)
        try:
            data = path.read_bytes()
            num_seconds = len(read_file(data, _RATE, _LONGEST_SECONDS)) / _RATE
        except OSError as error:
            raise ConfigError(f"--dataset-path {self._path}: {path}: {error.strerror}.") from None
        except MediaError as error:
            raise ConfigError(f"--dataset-path {self._path}: {path} {error}.") from None
        return Sound(path.name, data, num_seconds, line.text)

    def _folder(self) -> list[_Line]:
        paths = sorted(path for path in self._path.iterdir() if path.suffix.lower() in _SUFFIXES)
        if not paths:
            raise ConfigError(f"--dataset-path {self._path} holds no sound file.")
        lines = []
        for path in paths:
            text = path.with_suffix(".txt")
            lines.append(_Line(str(path), text.read_text() if text.is_file() else None))
        return lines

    def _file(self) -> list[_Line]:
        lines = read_lines(self._path, _Line, "sound")
        for line in lines:
            line.audio = str(self._path.parent / line.audio)
        return lines

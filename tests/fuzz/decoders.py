"""What decodes bytes of others, each as a function that takes any bytes and raises only what nobody expects.

They need no fixture, so that a fuzzer with knowledge of the code's branches can drive them: `scripts/fuzz --guided`.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from quire.core.engine.undecodable_requests import ids_in_unreadable
from quire.core.errors import ConfigError, ParameterError
from quire.core.wire.protocol import EngineInput, EngineOutput, WorkerInput, WorkerOutput
from quire.executor.weights.tensor_files import SafetensorsFile
from quire.frontend.anthropic.schema import MessagesRequest
from quire.frontend.batch.batch_server import BatchRequest
from quire.frontend.batch.lines import digest_of, read_custom_id
from quire.frontend.checkpoint.gguf.header import read_header
from quire.frontend.http.json_request import BodyReader, decode_body
from quire.frontend.keys.key_file import read_key_file
from quire.frontend.media.errors import MediaError
from quire.frontend.media.helper_process import MALFORMED
from quire.frontend.media.images.decoding import read_image
from quire.frontend.media.sounds.files import read_file
from quire.frontend.openai.responses.schema import ResponsesRequest
from quire.frontend.openai.schema import ChatRequest, CompletionRequest
from tests.fuzz.media_files import image_files, sound_files

_FILE = Path(tempfile.gettempdir()) / f"quire-fuzz-{os.getpid()}"
_MESSAGES = [msgspec.msgpack.Decoder(kind) for kind in (EngineInput, EngineOutput, WorkerInput, WorkerOutput)]
_READER = BodyReader(strict=False)


@contextlib.contextmanager
def _file(data: bytes) -> Iterator[Path]:
    _FILE.write_bytes(data)
    try:
        yield _FILE
    finally:
        _FILE.unlink()


def bodies(data: bytes) -> None:
    """Bodies of HTTP requests."""
    for kind in (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest):
        with contextlib.suppress(ParameterError):
            _READER.read(data, kind)


def frames(data: bytes) -> None:
    """Messages between processes, over ZeroMQ and in rings."""
    assert all(isinstance(each, str) for each in ids_in_unreadable(data))
    for decoder in _MESSAGES:
        with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError):  # as the receivers do
            decoder.decode(data)


def batch_lines(data: bytes) -> None:
    """Lines of a batch."""
    for line in data.splitlines():
        digest_of(line)
        custom_id = read_custom_id(line)
        assert custom_id is None or isinstance(custom_id, str)
        with contextlib.suppress(ParameterError):
            decode_body(line, BatchRequest)


def gguf(data: bytes) -> None:
    """Headers of GGUF files."""
    with _file(data) as path, contextlib.suppress(ConfigError):
        for info in read_header(path).tensors.values():
            assert info.offset <= len(data)


def safetensors(data: bytes) -> None:
    """Headers of safetensors files."""
    with _file(data) as path, contextlib.suppress(ConfigError):
        file = SafetensorsFile(path)
        for name in file.names:
            assert file.read(name, None).shape == file.shape(name)


def key_files(data: bytes) -> None:
    """Files of API keys."""
    with _file(data) as path, contextlib.suppress(ConfigError):
        assert read_key_file(str(path))


def images(data: bytes) -> None:
    """Files of images."""
    with contextlib.suppress(MediaError, *MALFORMED):  # as a helper does
        assert read_image(data, None, 100_000).mode == "RGB"


def sounds(data: bytes) -> None:
    """Files of sounds."""
    with contextlib.suppress(MediaError, *MALFORMED):
        assert abs(read_file(data, 16_000, 5.0)).max() <= 2.0**32


DECODERS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each for each in (bodies, frames, batch_lines, gguf, safetensors, key_files)
}
LIBRARIES: dict[str, Callable[[bytes], None]] = {each.__name__: each for each in (images, sounds)}
"""Decoders by libraries in C, which could end the process: `test_media.py` asks helpers, as servers do."""
SEEDS: dict[str, list[bytes]] = {
    "images": image_files(),
    "sounds": sound_files(),
    "bodies": [b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}', b'{"prompt": [1]}'],
    "frames": [msgspec.msgpack.encode(["add", [["x", 1, []]], [1], ["greedy"]]), b"\x92\xa5abort\x91\xa1x"],
    "batch_lines": [b'{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a"}}\n{}\n'],
    "gguf": [b"GGUF" + (3).to_bytes(4, "little") + bytes(16)],
    "safetensors": [
        (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}      ' + bytes(4)
    ],
    "key_files": [b'[{"name": "a", "key": "b"}]', b'{"name": "a", "hash": "sha256:' + b"0" * 64 + b'"}\n'],
}
"""Good inputs, from which a fuzzer begins."""

"""Headers of GGUF files: what the format's own package wrote, or an error that names the file."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import ConfigError
from quire.frontend.checkpoint.gguf.header import read_header
from tests.fuzz.examples import fuzzed, mutated


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_string("general.name", "a name")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ü"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5, 2.5])
    writer.add_tensor("token_embd.weight", np.ones((3, 4), dtype=np.float32))
    writer.add_tensor("output.weight", np.ones((3, 32), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def check(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        header = read_header(path)
    except ConfigError as error:
        if str(path) not in str(error):
            raise
        return
    for info in header.tensors.values():
        assert 0 <= info.offset <= len(data)


def test_the_good_one_is_read(good: bytes, tmp_path: Path) -> None:
    (tmp_path / "good.gguf").write_bytes(good)
    header = read_header(tmp_path / "good.gguf")
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "b", "ü"]
    assert {name: info.shape for name, info in header.tensors.items()} == {
        "token_embd.weight": (3, 4),
        "output.weight": (3, 32),
    }


def test_headers(good: bytes, tmp_path: Path) -> None:
    """With changed bytes anywhere, and with lengths and counts of any size."""
    path = tmp_path / "x.gguf"
    places = range(4, len(good) - 200, 4)

    @st.composite
    def with_number(draw: st.DrawFn) -> bytes:
        at, number = draw(st.sampled_from(places)), draw(st.integers(0, 2**64 - 1) | st.sampled_from([0, 2**24, 2**63]))
        return good[:at] + struct.pack("<Q", number) + good[at + 8 :]

    @fuzzed(120)
    @given(st.one_of(mutated(good), with_number(), st.integers(0, len(good)).map(lambda end: good[:end])))
    def run(data: bytes) -> None:
        check(path, data)

    run()

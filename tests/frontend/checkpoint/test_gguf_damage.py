"""Damaged headers of GGUF files: the whole file's model, or an error that names the file and says what is wrong."""

import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from quire.core.config.load import LoadConfig
from quire.core.config.model import ModelConfig
from quire.core.errors import ConfigError
from quire.frontend.checkpoint.model_source import find_model, read_model_spec
from quire.frontend.text.tokenizer import Tokenizer
from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model
from tests.gguf_files import gguf, make_gguf

torch.set_num_threads(1)

TOKENS = [5, 9, 200, 17, 33, 4, 250, 61]
STRING, ARRAY = 8, 9
FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
ALIGNMENT, WIDE = 32, 4096

ODD_NUMBERS = (0, 1, 5, 40, 2**31, 2**32 - 1, 2**62, 2**64 - 1)
ODD_VALUES: list[tuple[int, Any]] = [
    (STRING, b""), (STRING, b"x"), (STRING, b"\xff\xfe"), (4, 0), (4, 7), (4, 2**31 - 1), (4, 2**32 - 1), (5, -1),
    (10, 2**63), (6, float("nan")), (6, float("inf")), (6, -1.5), (7, True), (ARRAY, (4, [])), (ARRAY, (4, [2, 1])),
    (ARRAY, (STRING, [b"a", b""])), (ARRAY, (6, [float("nan")] * 3)), (ARRAY, (ARRAY, [(4, [1]), (4, [])])),
]  # fmt: skip

ANY = ("llama.context_length", "tokenizer.chat_template", "tokenizer.ggml.eos_token_id")
"""Fields that may have another value, which nothing tells."""
OF_TOKENIZERS = ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type",
                 "tokenizer.ggml.merges")  # fmt: skip
"""Fields without which the file has another tokenizer, or none, so that the user is asked for one."""
FRACTIONS = ("llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon")


class Stored(NamedTuple):
    """A file in parts. A value is (type, value), that of an array a list with the type of its members."""

    metadata: dict[bytes, tuple[int, Any]]
    tensors: list[tuple[bytes, list[int], int, int]]
    data: bytes

    def written(self, alignment: int = ALIGNMENT) -> bytes:
        header = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.metadata))
        header += b"".join(text(name) + struct.pack("<I", kind) + packed(kind, value) for name, (kind, value) in
                           self.metadata.items())  # fmt: skip
        for name, dims, kind, offset in self.tensors:
            header += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        return header + bytes(-len(header) % alignment) + self.data


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def packed(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return text(value)
    if kind == ARRAY and isinstance(value[1], bytes):
        return struct.pack("<IQ", value[0], len(value[1])) + value[1]
    if kind == ARRAY:
        return struct.pack("<IQ", value[0], len(value[1])) + b"".join(packed(value[0], each) for each in value[1])
    return struct.pack("<" + FORMS[kind], value)


class Cursor:
    """Takes a header apart.

    Attributes:
        numbers: (offset, bytes) of what says lengths, counts and types.
    """

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 8
        self.numbers = [(4, 4)]
        num_tensors, num_fields = self.number("Q"), self.number("Q")
        metadata = {self.text(): self.value(self.number("I")) for _ in range(num_fields)}
        tensors = [self.tensor() for _ in range(num_tensors)]
        self.stored = Stored(metadata, tensors, raw[self.at + -self.at % ALIGNMENT :])

    def number(self, form: str, is_value: bool = False) -> Any:
        size = struct.calcsize("<" + form)
        if not is_value:
            self.numbers.append((self.at, size))
        self.at += size
        return struct.unpack_from("<" + form, self.raw, self.at - size)[0]

    def text(self) -> bytes:
        length = self.number("Q")
        self.at += length
        return self.raw[self.at - length : self.at]

    def value(self, kind: int) -> tuple[int, Any]:
        if kind == STRING:
            return kind, self.text()
        if kind == ARRAY:
            member, count = self.number("I"), self.number("Q")
            return kind, (member, [self.value(member)[1] for _ in range(count)])
        return kind, self.number(FORMS[kind], is_value=True)

    def tensor(self) -> tuple[bytes, list[int], int, int]:
        name, num_dims = self.text(), self.number("I")
        return name, [self.number("Q") for _ in range(num_dims)], self.number("I"), self.number("Q")


class Served(NamedTuple):
    facts: dict[str, Any]
    token_ids: list[int] | None
    logits: torch.Tensor


def serve(path: Path) -> Served | str:
    """What the file is served as; or the message of the error."""
    try:
        folder = find_model(ModelConfig(model=str(path)), LoadConfig())
        spec = read_model_spec(folder, ModelConfig(model=str(path), dtype="float32"))
        has_tokenizer = (folder / "tokenizer.json").is_file()
        token_ids = Tokenizer.from_folder(folder).encode("Hello, the quick 12") if has_tokenizer else None
        logits = PagedDriver(load_model(spec), 1, 32).step({0: TOKENS})[0]
    except ConfigError as error:
        return str(error)
    finally:
        shutil.rmtree(path.parent / "cache" / "gguf", ignore_errors=True)
    facts = {name: getattr(spec, name) for name in ("num_layers", "head_dim", "vocab_size", "eos_token_ids")}
    return Served(facts, token_ids, logits)


class File(NamedTuple):
    path: Path
    raw: bytes
    whole: Served

    def check(self, what: object, raw: bytes, but_for: tuple[str, ...] = ()) -> bool:
        """Whether `raw` is served, which is then as the whole file is, but for the named fields of `Served`."""
        self.path.unlink()  # writing over a file waits for the disk
        self.path.write_bytes(raw)
        found = serve(self.path)
        if isinstance(found, str):
            assert self.path.name in found, what
            assert len(found) > len(str(self.path)) + 20, what
            return False
        assert "logits" in but_for or torch.equal(found.logits, self.whole.logits), f"other numbers with {what}"
        assert "facts" in but_for or found.facts == self.whole.facts, what
        assert "token_ids" in but_for or found.token_ids == self.whole.token_ids, what
        return True


@pytest.fixture
def file(checkpoint: Checkpoints, tmp_path: Path, gguf_cache: Path) -> File:
    path = tmp_path / "tiny.gguf"
    make_gguf(checkpoint("llama"), path, "llama", "Q8_0")
    whole = serve(path)
    assert isinstance(whole, Served)
    return File(path, path.read_bytes(), whole)


def test_damaged_counts_lengths_and_types(file: File) -> None:
    cursor = Cursor(file.raw)
    assert cursor.stored.written() == file.raw
    # Tokens and merges are all alike: a few of them are enough.
    strings = [place for place in cursor.numbers if place[1] == 8]
    few = {*cursor.numbers[:60], *cursor.numbers[-150:], *strings[::25]}
    type_of_last = cursor.numbers[-2]
    for at, size in sorted(few):
        but_for = ("token_ids", "facts", *(["logits"] if (at, size) == type_of_last else ()))  # see `changes`
        for number in ODD_NUMBERS:
            odd = (number % 2 ** (8 * size)).to_bytes(size, "little")
            if odd != file.raw[at : at + size]:
                file.check((at, number), file.raw[:at] + odd + file.raw[at + size :], but_for)


def test_a_header_that_ends_anywhere(file: File) -> None:
    cursor = Cursor(file.raw)
    for at, _ in cursor.numbers[::3]:
        assert not file.check(f"the first {at} bytes", file.raw[:at])
    for at in (0, 1, 4, cursor.at, len(file.raw) - 256, len(file.raw) - 1):
        assert not file.check(f"the first {at} bytes", file.raw[:at])


@pytest.mark.parametrize("behind", [b"\0", bytes(ALIGNMENT), bytes(5000), b"GGUF signed" * 100])
def test_bytes_behind_the_last_tensor_are_nobodys(file: File, behind: bytes) -> None:
    assert file.check(f"{len(behind)} bytes more", file.raw + behind)


def test_padding_behind_the_last_tensor_may_be_missing(file: File) -> None:
    """With another alignment: tensors of these files end at multiples of 32."""
    stored = Cursor(file.raw).stored
    tensors, data = [], b""
    for (name, dims, kind, offset), following in zip(stored.tensors, [*stored.tensors[1:], None], strict=True):
        data += bytes(-len(data) % WIDE)
        tensors.append((name, dims, kind, len(data)))
        data += stored.data[offset : None if following is None else following[3]]
    metadata = stored.metadata | {b"general.alignment": (4, WIDE)}
    raw = stored._replace(metadata=metadata, tensors=tensors, data=data).written(WIDE)
    assert len(raw) % WIDE
    for what, each in {"no padding": raw, "padding": raw + bytes(-len(raw) % WIDE)}.items():
        assert file.check(what, each)
    assert not file.check("one byte less", raw[:-1])


def test_fields_of_other_values(file: File) -> None:
    stored = Cursor(file.raw).stored
    for key, (kind, value) in stored.metadata.items():
        name = key.decode()
        but_for = ("token_ids", "facts") if name in (*ANY, *OF_TOKENIZERS) else ()
        without = {other: each for other, each in stored.metadata.items() if other != key}
        is_served = file.check(f"no {name}", stored._replace(metadata=without).written(), but_for)
        assert is_served == (name not in REQUIRED), f"no {name}"
        for odd in ODD_VALUES:
            metadata = stored.metadata | {key: odd}
            if odd != (kind, value):
                file.check((name, odd), stored._replace(metadata=metadata).written(), but_for)
    for name, odd in MORE:
        metadata = stored.metadata | {name.encode(): odd}
        assert not file.check((name, odd), stored._replace(metadata=metadata).written()), (name, odd)


REQUIRED = (
    "general.architecture", "llama.context_length", "llama.embedding_length", "llama.block_count",
    "llama.feed_forward_length", "llama.attention.head_count", "llama.attention.head_count_kv",
    "llama.attention.layer_norm_rms_epsilon",
)  # fmt: skip
MORE: list[tuple[str, tuple[int, Any]]] = [
    ("general.alignment", (4, 0)), ("general.alignment", (4, 3)), ("general.alignment", (6, float("nan"))),
    ("llama.rope.dimension_count", (4, 2**31 - 1)), ("llama.rope.dimension_count", (4, 5)),
    ("llama.rope.scaling.type", (4, 1)), ("llama.rope.scaling.type", (STRING, b"longrope")),
    ("llama.rope.scaling.factor", (6, float("nan"))), ("llama.expert_count", (4, 2**31 - 1)),
    ("llama.nextn_predict_layers", (4, 2)),
    ("llama.block_count", (4, 1)), ("tokenizer.ggml.bos_token_id", (4, 5000)),
    ("tokenizer.chat_template.tools", (4, 1)), ("general.sampling.temp", (STRING, b"hot")),
    ("tokenizer.ggml.tokens", (ARRAY, (STRING, [b"%d" % number for number in range(400)]))),
    ("zeros", (ARRAY, (0, bytes((1 << 24) + 1)))),
]  # fmt: skip


def changes(tensors: list[tuple[bytes, list[int], int, int]], index: int) -> Iterator[tuple[str, Any]]:
    """Damages to one tensor of a header. Nothing tells that the last one has a type of fewer bytes."""
    name, dims, kind, offset = tensors[index]
    other = tensors[index - 1]
    yield "under another's name", (other[0], dims, kind, offset)
    yield "under a name that no model has", (name.replace(b"weight", b"weighs"), dims, kind, offset)
    yield "of a layer that is not there", (b"blk.9.attn_q.weight", dims, kind, offset)
    yield "where another is", (name, dims, kind, other[3])
    for odd in ([], [0], [2**64 - 1] * 2, [2**32] * 4, [1] * 5, [*dims, 1], dims[::-1], [*dims[:-1], dims[-1] - 1]):
        if odd != dims:
            yield f"of {odd}", (name, odd, kind, offset)
    for odd in sorted({*map(int, gguf.GGMLQuantizationType), 99} - {kind}):
        yield f"of type {odd}", (name, dims, odd, offset)
    for odd in (offset + 1, offset + ALIGNMENT, 2**63, 2**64 - 1):
        yield f"at {odd}", (name, dims, kind, odd)


def test_damaged_tensors(file: File) -> None:
    stored = Cursor(file.raw).stored
    assert stored.tensors[0][0] == b"output.weight"
    for index in (0, 1, 2, 3, len(stored.tensors) - 1):
        others = stored.tensors[:index] + stored.tensors[index + 1 :]
        variants: dict[str, list[Any]] = {
            what: [*stored.tensors[:index], change, *stored.tensors[index + 1 :]]
            for what, change in changes(stored.tensors, index)
        }
        variants |= {"lost": others, "there twice": [*stored.tensors, stored.tensors[index]]}
        for what, tensors in variants.items():
            raw = stored._replace(tensors=tensors).written()
            if index == len(stored.tensors) - 1 and what.startswith("of type"):
                file.check((index, what), raw, ("logits",))
            else:
                assert not file.check((index, what), raw), (index, what)


def test_random_damage(file: File) -> None:
    """Texts of tokens may be others. Spared are fractions, all of whose values are right, and the type in `changes`."""
    cursor, generator = Cursor(file.raw), random.Random(0)
    spared = {
        file.raw.index(name.encode()) + len(name) + each for name in FRACTIONS for each in range(8)
    }  # type and number
    spared |= set(range(cursor.numbers[-2][0], cursor.numbers[-1][0]))
    places = [at for at in range(cursor.at) if at not in spared]
    for _ in range(400):
        damaged = bytearray(file.raw)
        at = generator.choice(places)
        damaged[at] ^= 1 << generator.randrange(8)
        file.check(f"byte {at} as {damaged[at]}", bytes(damaged), ("token_ids", "facts"))


def test_folders_and_parts(file: File) -> None:
    (folder := file.path.with_name("other.gguf")).mkdir()
    with pytest.raises(ConfigError, match=r"other\.gguf"):
        read_model_spec(find_model(ModelConfig(model=str(folder)), LoadConfig()), ModelConfig(model=str(folder)))
    for number in (1, 2, 4):
        file.path.with_name(f"part-0000{number}-of-00003.gguf").touch()
    with pytest.raises(ConfigError, match=r"has 3 of the 3 parts of part: .*lacks part 3"):
        find_model(ModelConfig(model=str(file.path.with_name("part-00001-of-00003.gguf"))), LoadConfig())

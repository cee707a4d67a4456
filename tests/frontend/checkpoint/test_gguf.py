"""GGUF files as checkpoints: which files a name stands for, what their metadata become, how damage is reported."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from quire.core.config.load import LoadConfig
from quire.core.config.model import ModelConfig
from quire.core.errors import ConfigError
from quire.executor.layers.positions.rotary import rotary_frequencies
from quire.frontend.checkpoint import gguf as gguf_room
from quire.frontend.checkpoint.gguf.config import make_config
from quire.frontend.checkpoint.gguf.fields import Fields
from quire.frontend.checkpoint.gguf.files import choose
from quire.frontend.checkpoint.gguf.gemma import gemma3
from quire.frontend.checkpoint.gguf.header import TensorInfo
from quire.frontend.checkpoint.gguf.rotation import make_rope
from quire.frontend.checkpoint.gguf.tokenizer import make_generation_config, make_tokenizer, make_tokenizer_config
from quire.frontend.checkpoint.model_source import find_model, read_model_spec
from quire.frontend.text.tokenizer import Tokenizer as ServedTokenizer
from tests.checkpoints import CHAT_TEMPLATE
from tests.executor.paged_driver import Checkpoints
from tests.gguf_files import gguf, make_gguf
from tests.limits import small_files

TEXTS = [
    "Hello, world!", "the  quick brown fox, 1234567 times", "你好，世界 привет ñandú", "👩‍👩‍👧 🙂🙂 é\u0301 WE'LL",
    "def f(x):\n\treturn x  + 1\n\n\n\tend", "<|im_start|>user\nHi<|im_end|>", " a\u200b\ufeff", "",
]  # fmt: skip


@pytest.fixture
def path(checkpoint: Checkpoints, tmp_path: Path, gguf_cache: Path) -> Path:
    make_gguf(checkpoint("llama"), tmp_path / "tiny-Q8_0.gguf", "llama", "Q8_0")
    return tmp_path / "tiny-Q8_0.gguf"


def find(name: object, load_format: Any = "auto") -> Path:
    return find_model(ModelConfig(model=str(name)), LoadConfig(load_format=load_format))


def test_the_folder_says_what_the_checkpoint_said(path: Path, checkpoint: Checkpoints) -> None:
    folder, source = find(path), checkpoint("llama")
    spec, original = (read_model_spec(each, ModelConfig(model="tiny", dtype="float32")) for each in (folder, source))
    fields = set(spec.__struct_fields__) - {"path", "tokenizer_path", "hf_config", "config_json", "eos_token_ids"}
    assert {name: getattr(spec, name) for name in fields} == {name: getattr(original, name) for name in fields}
    assert spec.eos_token_ids == [0, 2]  # llama.cpp ends at <|endoftext|>, too
    assert read_model_spec(folder, ModelConfig(model="tiny")).dtype == "bfloat16"
    made, known = ServedTokenizer.from_folder(folder), ServedTokenizer.from_folder(source)
    assert [made.encode(text) for text in TEXTS] == [known.encode(text) for text in TEXTS]
    assert made.special_token_ids == known.special_token_ids
    assert (made.eos_token_id, made.chat_templates) == (known.eos_token_id, {"default": CHAT_TEMPLATE})


def test_a_folder_is_made_once_for_each_version_of_a_file(path: Path) -> None:
    folder = find(path)
    written = (folder / "config.json").stat().st_mtime_ns
    assert find(path) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    path.touch()
    assert find(path) != folder


def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    with pytest.raises(ConfigError, match=r"there is no file 'tiny-Q8_1.gguf'. Did you mean 'tiny-Q8_0.gguf'\?"):
        find("tiny-Q8_1.gguf")
    with pytest.raises(ConfigError, match=r"there is no file '/nowhere/a.gguf'. '/nowhere' does not exist either"):
        find("/nowhere/a.gguf")


def test_names_that_stand_for_a_gguf_file(path: Path, checkpoint: Checkpoints) -> None:
    folder = find(path)
    assert find(path.parent) == folder
    assert find(path.parent, "dummy") == folder  # as `quire plan` asks
    (path.parent / "adapter_model.safetensors").touch()
    (path.parent / "mmproj-tiny-f16.gguf").touch()
    assert find(f"{path.parent}:q8_0") == folder
    (path.parent / "tiny-Q4_0.gguf").touch()
    with pytest.raises(ConfigError, match=r"several GGUF files: tiny-Q4_0, tiny-Q8_0"):
        find(path.parent)
    (path.parent / "model.safetensors").touch()
    assert find(path.parent) == path.parent  # other weights come first
    assert find(f"{path.parent}:Q8_0", "gguf") == folder
    with pytest.raises(ConfigError, match=r"no GGUF file for 'Q5_K': tiny-Q4_0, tiny-Q8_0"):
        find(f"{path.parent}:Q5_K")
    with pytest.raises(ConfigError, match=r"there is no file"):
        find(path.parent / "other.gguf")
    with pytest.raises(ConfigError, match=r"is a GGUF file: drop --load-format pt"):
        find(path, "pt")


def test_a_link_to_a_file_is_known_by_its_own_name(path: Path, tmp_path: Path) -> None:
    """As in the hub's cache."""
    blob = path.rename(tmp_path / "0123abcd")
    path.symlink_to(blob)
    assert find(path).name.startswith(path.stem)


def test_parts_of_a_split_model(tmp_path: Path) -> None:
    names = [f"Q4_K_M/big-Q4_K_M-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    assert choose(["big-Q4_K_S.gguf", *reversed(names), "README.md"], "Q4_K_M", "org/big") == names
    with pytest.raises(ConfigError, match=r"org/big has 2 of the 3 parts of big-Q4_K_M"):
        choose(names[1:], None, "org/big")
    for name in names:
        (tmp_path / Path(name).name).touch()
    assert [part.name for part in gguf_room.parts_of(tmp_path / Path(names[1]).name)] == [Path(n).name for n in names]


def test_a_split_model_is_read_from_all_parts(path: Path, checkpoint: Checkpoints, tmp_path: Path) -> None:
    """The parts are the whole file twice: later parts have no metadata that are read, and their tensors count."""
    parts = [tmp_path / f"split-0000{part}-of-00002.gguf" for part in (1, 2)]
    for part in parts:
        part.write_bytes(path.read_bytes())
    table = json.loads((find(parts[0]) / "gguf.json").read_bytes())
    assert table["files"] == [str(part) for part in parts]
    assert {tensor[2] for tensor in table["tensors"].values()} == {1}


def test_a_repository_is_asked_for_the_files_of_one_model(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ["README.md", path.name, "tiny-Q4_K_M.gguf", "mmproj-tiny-Q8_0.gguf"]
    asked: list[list[str]] = []

    def download(repository: str, *, allow_patterns: list[str], **options: Any) -> str:
        asked.append(allow_patterns)
        return str(path.parent)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *_, **options: listed)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    folder = find(path)
    assert find("some/tiny:Q8_0") == folder
    assert asked == [[path.name]]
    with pytest.raises(ConfigError, match=r"some/tiny has several GGUF files: tiny-Q4_K_M, tiny-Q8_0. Name one as"):
        find("some/tiny", "gguf")
    listed.remove("tiny-Q4_K_M.gguf")
    assert find("some/tiny", "gguf") == folder
    assert find("some/tiny") == folder  # there are no other weights
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert find("some/tiny:q8_0") == folder


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
LONG = [1.0 + 0.5 * index for index in range(8)]


@pytest.mark.parametrize(
    ("architecture", "rope", "metadata", "factors"),
    [
        ("llama", {"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3}, {}, {"rope_freqs.weight": None}),
        ("qwen2", {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}, {"type": "linear", "factor": 4.0}, {}),
        (
            "qwen2",
            {"rope_type": "yarn", "rope_theta": 1e6, **YARN},
            {"type": "yarn", "factor": 4.0, "original_context_length": 512},
            {},
        ),
        (
            "phi3",
            {
                "rope_type": "longrope", "rope_theta": 1e4, "long_factor": LONG, "short_factor": [1.0] * 8,
                "original_max_position_embeddings": 512, "attention_factor": 1.25,
            },
            {"type": "longrope", "original_context_length": 512, "attn_factor": 1.25},
            {"rope_factors_long.weight": LONG, "rope_factors_short.weight": [1.0] * 8},
        ),
    ],
)  # fmt: skip
def test_positions_are_stretched_as_the_file_says(
    architecture: str,
    rope: dict[str, Any],
    metadata: dict[str, Any],
    factors: dict[str, list[float] | None],
    checkpoint: Checkpoints,
    tmp_path: Path,
    gguf_cache: Path,
) -> None:
    wanted, scale = rotary_frequencies({"rope_parameters": rope, "max_position_embeddings": 2048}, 16, 2048)
    plain, _ = rotary_frequencies({"rope_parameters": {"rope_theta": rope["rope_theta"]}}, 16, 2048)
    more = {name: (plain / wanted).numpy() if each is None else np.float32(each) for name, each in factors.items()}
    fields: dict[str, Any] = {f"rope.scaling.{name}": value for name, value in metadata.items()}
    source = checkpoint(architecture, rope={"rope_type": "default", "rope_theta": rope["rope_theta"]})
    make_gguf(source, tmp_path / "long.gguf", architecture, metadata=fields, more=more)
    config = json.loads((find(tmp_path / "long.gguf") / "config.json").read_bytes())
    frequencies, its_scale = rotary_frequencies(config, 16, 2048)
    assert torch.allclose(frequencies, wanted)
    assert its_scale == scale


_LINEAR = {"rope_type": "linear", "factor": 4.0}
_YARN_SCALE = 0.1 * math.log(4) + 1


@pytest.mark.parametrize(
    ("metadata", "rope", "scale"),
    [
        ({"rope.scaling.factor": 4.0}, _LINEAR, 1.0),
        ({"rope.scale_linear": 4.0}, _LINEAR, 1.0),
        ({"rope.scaling.type": "linear", "rope.scale_linear": 4.0}, _LINEAR, 1.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default"}, 1.0),
        ({"rope.scaling.factor": 0.0, "rope.scale_linear": 4.0}, {"rope_type": "default"}, 1.0),
        ({"rope.scaling.attn_factor": 1.5}, {"rope_type": "default"}, 1.5),
        ({"rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.5}, _LINEAR, 1.5),
        (
            {"rope.scaling.type": "yarn", "rope.scale_linear": 4.0, "rope.scaling.original_context_length": 512},
            {"rope_type": "yarn", **YARN},
            _YARN_SCALE,
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 512,
             "rope.scaling.attn_factor": 1.5},
            {"rope_type": "yarn", **YARN},
            1.5 * _YARN_SCALE,
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_scalings_are_those_of_llama_cpp(
    architecture: str, metadata: dict[str, Any], rope: dict[str, Any], scale: float
) -> None:
    wanted, _ = rotary_frequencies({"rope_parameters": rope, "max_position_embeddings": 2048}, 16, 2048)
    found = make_rope(fields_of(architecture, metadata))
    frequencies, its_scale = rotary_frequencies({"rope_parameters": found, "max_position_embeddings": 2048}, 16, 2048)
    assert torch.allclose(frequencies, wanted)
    assert its_scale == pytest.approx(scale)


def fields_of(architecture: str, metadata: dict[str, Any], factors: list[float] | None = None) -> Fields:
    """Those of heads of 16 numbers."""
    sizes = {"attention.head_count": 4, "embedding_length": 64, **metadata}
    known = {f"{architecture}.{name}": value for name, value in sizes.items()}
    stored = {} if factors is None else {"rope_freqs.weight": struct.pack(f"<{len(factors)}f", *factors)}
    return Fields("tiny.gguf", {"general.architecture": architecture, **known}, {}, stored)


def test_a_scaling_and_factors_of_each_frequency_are_multiplied() -> None:
    found = make_rope(fields_of("llama", {"rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.5}, LONG))
    frequencies, scale = rotary_frequencies({"rope_parameters": found, "max_position_embeddings": 2048}, 16, 2048)
    plain, _ = rotary_frequencies({"rope_parameters": {"rope_type": "default"}}, 16, 2048)
    assert torch.allclose(frequencies, plain / torch.tensor(LONG) / 4)
    assert scale == 1.5
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    with pytest.raises(ConfigError, match=r"YaRN beside factors of each frequency"):
        make_rope(fields_of("llama", yarn, LONG))


@pytest.mark.parametrize(
    ("more", "window", "factor"), [({}, None, None), ({"attention.sliding_window": 512}, 512, 8.0)]
)
def test_windows_of_gemma_3_are_those_of_the_file(
    more: dict[str, Any], window: int | None, factor: float | None
) -> None:
    """A file without windows has none, and a factor without a type stretches the layers that see all tokens."""
    stretch = {} if factor is None else {"rope.scaling.factor": factor}
    config = gemma3(fields_of("gemma3", {"block_count": 6, **more, **stretch}))
    kind = "full_attention" if window is None else "sliding_attention"
    assert config["sliding_window"] == window
    assert config["layer_types"] == [kind] * 5 + ["full_attention"]
    assert config["rope_parameters"]["full_attention"].get("factor") == factor
    assert config["rope_parameters"]["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("length", [3, 20, 3000, -100])
def test_a_file_that_is_cut_short(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ConfigError, match=r"is cut short|is no GGUF file"):
        find(path)


def write(path: Path, architecture: str, **fields: Any) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_what_is_no_model_is_refused_with_the_reason(tmp_path: Path, gguf_cache: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"of the architecture 'clip', which is not read: .*mmproj.* of .*llama, .*qwen3"
    ):
        find(write(tmp_path / "a.gguf", "clip"))
    with pytest.raises(ConfigError, match=r"a vocabulary but no weights"):
        find(write(tmp_path / "b.gguf", "llama", token_list=["a"]))
    (tmp_path / "c.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ConfigError, match=r"is no GGUF file: it begins with b'PK"):
        find(tmp_path / "c.gguf")
    (tmp_path / "d.gguf").write_bytes(b"GGUF\x01\x00\x00\x00" + bytes(100))
    with pytest.raises(ConfigError, match=r"has version 1 of GGUF"):
        find(tmp_path / "d.gguf")


def typed(name: str, value: Any) -> bytes:
    """A number of the metadata as it lies in a file."""
    kind, form = (10, "<Q") if isinstance(value, int) else (8, "")
    data = value.encode() if isinstance(value, str) else struct.pack(form, value)
    data = struct.pack("<Q", len(data)) + data if isinstance(value, str) else data
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + data


@pytest.mark.parametrize(
    ("fields", "kind", "shape", "offset", "message"),
    [
        ({"general.alignment": 0}, 0, (8, 32), 0, "general.alignment is 0"),
        ({"general.alignment": "32"}, 0, (8, 32), 0, "general.alignment is '32'"),
        ({}, 8, (8, 40), 0, r"'token_embd.weight' of shape \[8, 40\] has no whole blocks of 32 numbers \(Q8_0\)"),
        ({}, 0, (8, 32), 2, "'token_embd.weight' begins at byte 2 of the tensors, and the one before it ends at 0"),
        ({"general.alignment": 1}, 0, (8, 32), 0, "'token_embd.weight' of F32 begins at byte .* inside of a number"),
    ],
)
def test_a_damaged_header_is_refused(
    fields: dict[str, Any],
    kind: int,
    shape: tuple[int, int],
    offset: int,
    message: str,
    tmp_path: Path,
    gguf_cache: Path,
) -> None:
    fields = {"general.architecture": "llama", "llama.embedding_length": 32, "llama.block_count": 1, **fields}
    name = b"token_embd.weight"
    tensor = struct.pack("<Q", len(name)) + name + struct.pack("<IQQIQ", 2, *shape[::-1], kind, offset)
    metadata = b"".join(typed(*field) for field in fields.items())
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, len(fields)) + metadata + tensor
    (tmp_path / "a.gguf").write_bytes(header + bytes(4096))
    with pytest.raises(ConfigError, match=message):
        find(tmp_path / "a.gguf")


def test_the_package_is_named_where_it_is_missing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package gguf: pip install 'quire\[gguf\]'"):
        find(path)


def test_a_tokenizer_that_is_not_read_is_left_to_the_user(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer is damaged \(.*out of vocabulary.*--tokenizer"):
        make_tokenizer(
            "x.gguf",
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["a"],
             "tokenizer.ggml.token_type": [1], "tokenizer.ggml.merges": ["a b"]},
        )  # fmt: skip
    with pytest.raises(ConfigError, match=r"of the kind 'rwkv'; gpt2, llama, gemma4 are read.*--tokenizer"):
        make_tokenizer("x.gguf", {"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a"]})
    with pytest.raises(ConfigError, match=r"as 'odd' says.*--tokenizer"):
        make_tokenizer(
            "x.gguf",
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "odd", "tokenizer.ggml.tokens": ["a"]},
        )


def test_ends_and_templates_of_the_metadata() -> None:
    metadata = {
        "tokenizer.ggml.tokens": ["a", "<|im_end|>", "<|eot_id|>", "</s>"],
        "tokenizer.ggml.token_type": [1, 3, 1, 3],
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "tools",
        "general.sampling.temp": 0.5,
    }
    assert make_generation_config(metadata) == {"eos_token_id": [1, 2, 3], "temperature": 0.5}
    assert make_tokenizer_config(metadata) == {
        "eos_token": "</s>",
        "chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}],
    }


def sentence_pieces(**more: Any) -> Tokenizer:
    """A small vocabulary of SentencePiece's kind."""
    words = ["th", "qu", "ic", "ick", "▁th", "▁the", "▁qu", "▁quick", "▁", "▁▁", "▁1", "12"]
    letters = sorted({letter for text in TEXTS for letter in text if letter.isascii() and letter.isalnum()})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<user>", *words, *letters]
    kinds = [2, 3, 3, *[6] * 256, 4, *[1] * (len(tokens) - 260)]
    scores = [0.0] * 260 + [-float(index) for index in range(len(tokens) - 260)]
    return make_tokenizer("x.gguf", {
        f"tokenizer.ggml.{name}": value
        for name, value in {
            "model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, "bos_token_id": 1, **more,
        }.items()
    })  # fmt: skip


def test_sentence_pieces_merge_by_score_and_fall_back_to_bytes() -> None:
    tokenizer = sentence_pieces()
    assert tokenizer.encode("the quick").tokens == ["<s>", "▁the", "▁quick"]
    assert tokenizer.encode("é<user>12").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>", "<user>", "▁1", "2"]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    bare = sentence_pieces(add_bos_token=False, add_space_prefix=False)
    assert bare.encode("the").tokens == ["th", "e"]
    assert bare.decode(bare.encode(" the").ids) == " the"


def test_merges_of_gemma_4_come_from_the_file() -> None:
    """Where scores, as SentencePiece has them, would make other tokens."""
    both = {"merges": ["t h", "▁ qu"]}
    assert sentence_pieces(**both).encode("the qu").tokens == ["<s>", "▁the", "▁qu"]
    merged = sentence_pieces(model="gemma4", **both)
    assert merged.encode("the qu").tokens == ["<s>", "th", "e", "▁", "q", "u"]
    assert merged.decode(merged.encode("the qu").ids) == "the qu"


NUMBERS_APART = [" ", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["I", "'", "LL", " pay", " 12345", " HelloWorld", "\n\n ", " x"]),
        ("starcoder", ["I", "'", "LL", " pay", *NUMBERS_APART, " HelloWorld", "\n\n ", " x"]),
        ("qwen2", ["I", "'LL", " pay", *NUMBERS_APART, " HelloWorld", "\n\n", " ", " x"]),
        ("qwen35", ["I", "'LL", " pay", *NUMBERS_APART, " HelloWorld", "\n\n", " ", " x"]),
        ("bailingmoe2", ["I", "'LL", " pay", *NUMBERS_APART, " HelloWorld", "\n\n", " ", " x"]),
        ("exaone-moe", ["I", "'LL", " pay", *NUMBERS_APART, " HelloWorld", "\n\n", " ", " x"]),
        ("deepseek-v3", ["I", "'LL", " pay", " ", "123", "45", " HelloWorld", "\n\n", " ", " x"]),
        ("llama-bpe", ["I", "'LL", " pay", " ", "123", "45", " HelloWorld", "\n\n", " ", " x"]),
        ("tekken", ["I", "'LL", " pay", *NUMBERS_APART, " Hello", "World", "\n\n", " ", " x"]),
        ("gpt-4o", ["I'LL", " pay", " ", "123", "45", " Hello", "World", "\n\n", " ", " x"]),
        ("kimi-k2", ["I'LL", " pay", " ", "123", "45", " Hello", "World", "\n\n", " ", " x"]),
        ("default", ["I", "'", "LL", " pay", " ", "123", "45", " HelloWorld", "\n\n ", " x"]),
        ("falcon", ["I", "'", "LL", " pay", " ", "123", "45", " HelloWorld", "\n\n ", " x"]),
        ("deepseek-llm", ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", " HelloWorld", "\n", "\n", " ", " x"]),
    ],
)
def test_texts_are_split_into_words_as_the_file_says(pre: str, words: list[str]) -> None:
    fields = {"model": "gpt2", "pre": pre, "tokens": ["a"], "merges": []}
    tokenizer = make_tokenizer("x.gguf", {f"tokenizer.ggml.{name}": value for name, value in fields.items()})
    text = "I'LL pay 12345 HelloWorld\n\n  x"
    assert tokenizer.pre_tokenizer is not None
    assert [text[first:last] for _, (first, last) in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("qwen2", ["क", "\u094dष", " न"]),
        ("qwen35", ["क\u094dष", " न"]),  # a vowel's sign stays with its letter
        ("exaone-moe", ["क\u094dष न"]),  # and so does a space between words
        ("kimi-k2", ["你好", "Kölnかな", " $", "5", " мир"]),
        ("falcon", ["你好Kölnかな", " ", "$", "5", " мир"]),
        ("deepseek-llm", ["你好", "K", "ö", "ln", "かな", " $", "5", " мир"]),  # "[:-~]" has ASCII's letters, too
        ("default", ["你好Kölnかな", " ", "$", "5", " мир", "`", "½"]),  # llama.cpp's, whose number is no "N"
        ("deepseek-coder", ["你好", "Köln", "かな", " $", "5", " мир"]),
    ],
)
def test_scripts_are_split_as_the_file_says(pre: str, words: list[str]) -> None:
    fields = {"model": "gpt2", "pre": pre, "tokens": ["a"], "merges": []}
    tokenizer = make_tokenizer("x.gguf", {f"tokenizer.ggml.{name}": value for name, value in fields.items()})
    text = "".join(words)
    assert tokenizer.pre_tokenizer is not None
    assert [text[first:last] for _, (first, last) in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words


@pytest.mark.parametrize(
    ("architecture", "metadata", "tensors", "reason"),
    [
        ("stablelm", {}, ["blk.0.attn_q_norm.weight"], "norms of each head"),
        ("jamba", {"block_count": 5}, [f"blk.{layer}.attn_q.weight" for layer in (0, 1, 4)], "not at equal distances"),
    ],
)  # fmt: skip
def test_arrangements_that_are_not_read_are_refused(
    architecture: str, metadata: dict[str, int], tensors: list[str], reason: str
) -> None:
    known = {f"{architecture}.{name}": value for name, value in metadata.items()}
    info = TensorInfo("F32", (4, 4), 0)
    fields = Fields(
        "tiny.gguf",
        {"general.architecture": architecture, **known},
        dict.fromkeys(["token_embd.weight", *tensors], info),
    )
    with pytest.raises(ConfigError, match=rf"tiny\.gguf.*{reason}"):
        make_config(fields)


def test_a_folder_that_the_disk_does_not_take_is_told_and_leaves_nothing(path: Path, gguf_cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"Cannot write to .*File too large.*QUIRE_CACHE_ROOT"), small_files(100):
        find(path)
    assert not list(gguf_room.cache_folder().iterdir())
    assert find(path).is_dir()

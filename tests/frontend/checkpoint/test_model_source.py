"""Finding checkpoints, and reading their configuration."""

import json
import struct
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from quire.core.config.load import LoadConfig
from quire.core.config.model import ModelConfig
from quire.core.errors import ConfigError
from quire.frontend.checkpoint import model_source
from quire.frontend.checkpoint.model_spec import read_default_sampling, read_model_spec
from tests.frontend.text import tokenizers_zoo

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": 7,
    "dtype": "bfloat16",
}


def write(folder: Path, config: dict | str | None = None, generation: dict | None = None, **changes) -> Path:
    folder.mkdir(exist_ok=True)
    value = config if config is not None else {**CONFIG, **changes}
    (folder / "config.json").write_text(value if isinstance(value, str) else json.dumps(value))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def find(name: str | None, **options) -> Path:
    return model_source.find_model(ModelConfig(model=name, **options), LoadConfig())


class TestFinding:
    def test_a_folder(self, tmp_path: Path) -> None:
        assert find(str(tmp_path)) == tmp_path

    def test_the_tokenizer_is_the_models_own_unless_named(self, tmp_path: Path) -> None:
        own = model_source.find_tokenizer(ModelConfig(model="x"), LoadConfig(), tmp_path / "model")
        assert own == tmp_path / "model"
        named = ModelConfig(model="x", tokenizer=str(tmp_path))
        assert model_source.find_tokenizer(named, LoadConfig(), tmp_path / "model") == tmp_path

    def test_a_misspelt_folder_gets_the_nearest_name(self, tmp_path: Path) -> None:
        (tmp_path / "qwen3-0.6b").mkdir()
        with pytest.raises(ConfigError, match=r"there is no folder .*Did you mean '.*qwen3-0\.6b'"):
            find(str(tmp_path / "qwen-0.6b"))

    def test_a_folder_that_is_nowhere_near(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="does not exist either"):
            find(str(tmp_path / "no" / "where"))
        with pytest.raises(ConfigError, match="owner/name"):
            find("./no-such-model")

    def test_a_file_is_no_checkpoint(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").touch()
        with pytest.raises(ConfigError, match="is a file; name the folder"):
            find(str(tmp_path / "model.safetensors"))

    def test_an_adapter_is_no_model(self, tmp_path: Path) -> None:
        (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
        with pytest.raises(ConfigError, match=r"has an adapter of 'owner/base', and no model.*Merge it"):
            read_model_spec(tmp_path, ModelConfig())

    def test_an_adapter_beside_a_model_is_told(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        for name in ("pytorch_model.bin", "adapter_model.safetensors"):
            (tmp_path / name).touch()
        with caplog.at_level("WARNING", "quire"):
            assert find(str(tmp_path)) == tmp_path
        assert "adapter_model.safetensors is not applied" in caplog.text

    def test_offline_and_not_in_the_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        model = ModelConfig(model="nobody/nothing", revision="v2")
        with pytest.raises(ConfigError, match=r"not in the hub's cache at revision 'v2'.*HF_HUB_OFFLINE"):
            model_source.find_model(model, LoadConfig(download_dir=str(tmp_path)))

    def test_a_saved_token_that_is_asked_for_must_be_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(ConfigError, match="the token that `hf auth login` saved, and there is none"):
            model_source.find_model(ModelConfig(model="some/model", hf_token=True), LoadConfig())

    def test_a_hub_model_in_the_cache_needs_no_network(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        cached = tmp_path / "models--some--model"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text("a" * 40)
        snapshot = cached / "snapshots" / ("a" * 40)
        snapshot.mkdir(parents=True)
        write(snapshot)
        load = LoadConfig(download_dir=str(tmp_path))
        assert model_source.find_model(ModelConfig(model="some/model"), load) == snapshot
        (cached / "refs" / "newer").write_text("b" * 40)
        newer = write(cached / "snapshots" / ("b" * 40))
        tokenizer = ModelConfig(model="some/model", tokenizer_revision="newer")
        assert model_source.find_tokenizer(tokenizer, load, snapshot) == newer
        assert model_source.find_tokenizer(ModelConfig(model="some/model"), load, snapshot) == snapshot

    @pytest.mark.parametrize(
        ("files", "asked"),
        [
            (["model.safetensors"], ["*.safetensors"]),
            (["pytorch_model.bin"], ["*.safetensors", "*.bin"]),
            (["consolidated.safetensors"], ["*.safetensors", "*.bin", "consolidated*.safetensors"]),
        ],
    )
    def test_only_one_format_of_the_weights_is_downloaded(
        self, files: list[str], asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A hub that keeps `files` and downloads what patterns name."""
        calls = []

        def download(repository: str, allow_patterns: list[str], ignore_patterns: list[str], **_: object) -> str:
            calls.append(allow_patterns[0])
            for name in filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
                (tmp_path / name).touch()
            return str(tmp_path)

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        assert find("some/model") == tmp_path
        assert calls == asked
        assert [path.name for path in tmp_path.iterdir()] == files


class TestSpec:
    def test_facts(self, tmp_path: Path) -> None:
        spec = read_model_spec(write(tmp_path, num_key_value_heads=2), ModelConfig(model="name"))
        assert (spec.name, spec.path, spec.architecture) == ("name", str(tmp_path), "LlamaForCausalLM")
        assert (spec.vocab_size, spec.num_layers, spec.hidden_size) == (320, 2, 64)
        assert (spec.num_attention_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 16)
        assert (spec.dtype, spec.max_position_embeddings, spec.eos_token_ids) == ("bfloat16", 128, [7])

    def test_overrides_reach_into_objects(self, tmp_path: Path) -> None:
        write(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
        overrides = {"rope_parameters": {"rope_type": "linear", "factor": 4.0}, "head_dim": 32}
        spec = read_model_spec(tmp_path, ModelConfig(hf_overrides=overrides))
        assert spec.hf_config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
        assert (spec.head_dim, spec.max_position_embeddings) == (32, 512)

    @pytest.mark.parametrize(
        ("rope", "length"),
        [
            ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
            ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
            ({"type": "dynamic", "factor": 2.0}, 256),
            ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}, 128),
        ],
    )
    def test_context_length_follows_rotary_scaling(self, tmp_path: Path, rope: dict, length: int) -> None:
        assert read_model_spec(write(tmp_path, rope_scaling=rope), ModelConfig()).max_position_embeddings == length

    def test_gemma_states_its_context_length_after_scaling(self, tmp_path: Path) -> None:
        folder = write(tmp_path, model_type="gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0})
        assert read_model_spec(folder, ModelConfig()).max_position_embeddings == 128

    def test_text_part_of_a_larger_model(self, tmp_path: Path) -> None:
        text = {key: value for key, value in CONFIG.items() if key != "architectures"}
        config = {"architectures": ["SomeForConditionalGeneration"], "text_config": text, "vision_config": {}}
        spec = read_model_spec(write(tmp_path, config), ModelConfig())
        assert (spec.architecture, spec.hidden_size) == ("SomeForConditionalGeneration", 64)

    @pytest.mark.parametrize(
        ("option", "stated", "expected"),
        [
            ("auto", {"dtype": "float16"}, "float16"),
            ("auto", {"dtype": None, "torch_dtype": "torch.float32"}, "float32"),
            ("half", {}, "float16"),
            ("float", {}, "float32"),
        ],
    )
    def test_dtype(self, tmp_path: Path, option: str, stated: dict, expected: str) -> None:
        assert read_model_spec(write(tmp_path, **stated), ModelConfig(dtype=option)).dtype == expected

    def test_dtype_that_only_the_weights_tell(self, tmp_path: Path) -> None:
        header = json.dumps(
            {"__metadata__": {"format": "pt"}, "w": {"dtype": "F16", "shape": [], "data_offsets": [0, 2]}}
        )
        data = struct.pack("<Q", len(header)) + header.encode() + b"\0\0"
        (write(tmp_path, dtype=None) / "model.safetensors").write_bytes(data)
        adapter = data.replace(b'"F16"', b'"F32"')
        (tmp_path / "adapter_model.safetensors").write_bytes(adapter)
        assert read_model_spec(tmp_path, ModelConfig()).dtype == "float16"

    def test_eos_from_every_file_that_names_one(self, tmp_path: Path) -> None:
        tokenizers_zoo.save(tokenizers_zoo.byte_level(), tmp_path)  # its EOS is id 1
        write(tmp_path, generation={"eos_token_id": [7, 9]})
        assert read_model_spec(tmp_path, ModelConfig()).eos_token_ids == [1, 7, 9]
        assert read_model_spec(tmp_path, ModelConfig(generation_config="vllm")).eos_token_ids == [1, 7]

    def test_eos_of_a_tokenizer_in_older_files(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
        (tmp_path / "added_tokens.json").write_text(json.dumps({"<end>": 11}))
        assert read_model_spec(write(tmp_path), ModelConfig()).eos_token_ids == [7, 11]
        listed = {"eos_token": {"content": "<end>"}, "added_tokens_decoder": {"12": {"content": "<end>"}}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(listed))
        assert read_model_spec(tmp_path, ModelConfig()).eos_token_ids == [7, 12]

    @pytest.mark.parametrize(
        ("config", "said"),
        [
            ("{", r"Cannot read .*config\.json"),
            ("[]", "must hold a JSON object"),
            ({**CONFIG, "architectures": None}, "names no architecture.*--hf-overrides"),
            ({**CONFIG, "vocab_size": None}, r"config\.json has no vocab_size"),
            ({**CONFIG, "hidden_size": -1}, "hidden_size must be a positive whole number, got -1"),
            ({**CONFIG, "num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
            ({**CONFIG, "dtype": "int3"}, "cannot compute in dtype 'int3'"),
        ],
    )
    def test_bad_configs_name_the_file(self, tmp_path: Path, config: dict | str, said: str) -> None:
        with pytest.raises(ConfigError, match=said) as caught:
            read_model_spec(write(tmp_path, config), ModelConfig())
        assert str(tmp_path / "config.json") in str(caught.value)

    def test_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"has no config\.json"):
            read_model_spec(tmp_path, ModelConfig())


class TestDefaultSampling:
    GENERATION: dict = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 99, "pad_token_id": 0}  # noqa: RUF012

    def test_from_the_checkpoint(self, tmp_path: Path) -> None:
        defaults = read_default_sampling(write(tmp_path, generation=self.GENERATION), ModelConfig())
        assert defaults == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 99}

    def test_overrides_win_and_vllm_means_none(self, tmp_path: Path) -> None:
        write(tmp_path, generation=self.GENERATION)
        model = ModelConfig(generation_config="vllm", override_generation_config={"temperature": 0.1})
        assert read_default_sampling(tmp_path, model) == {"temperature": 0.1}

    def test_from_another_folder(self, tmp_path: Path) -> None:
        other = write(tmp_path / "other", generation={"top_k": 3})
        model = ModelConfig(generation_config=str(other))
        assert read_default_sampling(write(tmp_path), model) == {"top_k": 3}
        with pytest.raises(ConfigError, match=r"has no generation_config\.json"):
            read_default_sampling(tmp_path, ModelConfig(generation_config=str(tmp_path / "nowhere")))

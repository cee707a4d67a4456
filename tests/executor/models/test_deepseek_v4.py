"""DeepSeek V4 beyond the comparison with Transformers, which `test_coverage.py` makes."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.core.wire.rank import Rank
from quire.executor.layers.attention import compressed_rows
from quire.executor.layers.attention.compressed_rows import RowPlaces
from quire.executor.models.base import Model
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.worker import Worker
from quire.ops.latent import CacheRows
from tests.executor.models.test_models import prompts
from tests.executor.models.tiny_models import VOCAB_SIZE, write_checkpoint
from tests.executor.paged_driver import PagedDriver, load_model, read_spec
from tests.executor.step.test_model_runner import engine_config
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek_v4")
    write_checkpoint(path, "deepseek_v4")
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(read_spec(folder))


def test_tokens_do_not_depend_on_the_batch(model: Model) -> None:
    many = prompts(9, VOCAB_SIZE)
    together = PagedDriver(model, len(many), 128).greedy(many, 20)
    for row in (0, 7):
        assert PagedDriver(model, 1, 128).greedy([many[row]], 20)[0] == together[row]


def test_last_tokens_alone_are_those_of_the_whole(model: Model) -> None:
    whole, last = PagedDriver(model, 5, 128), PagedDriver(model, 5, 128)
    some = dict(enumerate(prompts(4, VOCAB_SIZE)))
    for feed in (some, {4: [3, 4, 5], 1: [6], 0: [7, 8]}, {row: [9] for row in range(5)}):
        expected, got = whole.step(feed), last.step(feed, only_last=True)
        for row in feed:
            torch.testing.assert_close(got[row], expected[row][-1:], atol=1e-4, rtol=0)


def test_slots_of_long_sequences_are_made_for_few_tokens_at_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 tokens have 15 rows of 4, and 7 rows of 8."""
    prompt = list(range(3, 63))
    expected = PagedDriver(model, 1, 128).step({0: prompt})[0]
    complete, found = RowPlaces.complete, []

    def noted(places: RowPlaces, cache: Tensor, rate: int) -> CacheRows:
        rows = complete(places, cache, rate)
        found.append(rows.slots.numel())
        return rows

    monkeypatch.setattr(RowPlaces, "complete", noted)
    monkeypatch.setattr(compressed_rows, "_SLOTS", 64)
    got = PagedDriver(model, 1, 128).step({0: prompt})[0]
    assert max(found) <= 64
    assert sum(found) >= 60 * 15
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_ranks_together_are_the_whole_model(folder: Path) -> None:
    """Each rank has whole groups of heads, and all rows."""
    some = dict(enumerate(prompts(3, VOCAB_SIZE)))

    def run(group: ParallelGroup) -> list[Tensor]:
        driver = PagedDriver(load_model(read_spec(folder), group=group), 3, 80)
        return [*driver.step(some).values(), *driver.step({0: [3], 1: [4], 2: [9]}).values()]

    whole = run(ParallelGroup())
    for of_rank in on_every_rank(2, run):
        for got, expected in zip(of_rank, whole, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_only_rows_grow_with_a_sequence(folder: Path) -> None:
    """A row of 4 tokens is made of 8, one of 8 of as many, and a token sees the latest 24."""
    ready = Worker(engine_config(folder), Rank(), ParallelGroup()).load()
    layers = {
        group.window: sum(len(each.layers) for each in ready.kv_groups if each.window == group.window)
        for group in ready.kv_groups
    }
    assert layers == {None: 3, 8: 3, 24: 4}


def test_weights_as_deepseek_publishes_them(tmp_path: Path) -> None:
    """Experts in FP4, other linear layers of blocks in FP8, scales that are powers of two, and DeepSeek's own names."""
    write_checkpoint(tmp_path, "deepseek_v4", moe_intermediate_size=64, q_lora_rank=48)
    stored: dict[str, Tensor] = {}
    plain = load_file(tmp_path / "model.safetensors")
    for name, weight in plain.items():
        layer, block = name.removesuffix(".weight"), None
        if ".experts." in name:
            block = (1, 32)
        elif re.search(r"\.(wq_a|wq_b|wkv|wo_a|wo_b|w1|w2|w3)\.weight", name) and "compressor" not in name:
            block = (16, 16)
        if block is None:
            stored[_PUBLISHED.get(name, name.removeprefix("model."))] = weight
            continue
        codes, scale, plain[name] = _quantized(weight, block)
        layer = layer.removeprefix("model.")
        stored |= {f"{layer}.weight": codes, f"{layer}.scale": scale.to(torch.float8_e8m0fnu)}
    save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
    token_ids = list(range(3, 60))
    expected = PagedDriver(load_model(read_spec(tmp_path)), 1, 64).step({0: token_ids})[0]

    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 16], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    model = load_model(read_spec(tmp_path, quantization_config=quantization))
    torch.testing.assert_close(PagedDriver(model, 1, 64).step({0: token_ids})[0], expected, atol=1e-3, rtol=1e-3)


_PUBLISHED = {
    "model.embed_tokens.weight": "embed.weight",
    **{f"model.hc_head.hc_{kind}": f"hc_head_{kind}" for kind in ("fn", "base", "scale")},
}
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def _quantized(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales that are powers of two, the numbers that both are)."""
    rows, columns = (size // part for size, part in zip(weight.shape, block, strict=True))
    blocks = weight.view(rows, block[0], columns, block[1])
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True).div(6).log2().ceil().exp2()
    if block[0] == 1:
        index = (blocks / scale).unsqueeze(-1).sub(_FP4).abs().argmin(dim=-1)
        numbers, nibbles = _FP4[index], index.view(weight.shape).to(torch.uint8)
        codes = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).view(torch.int8)
    else:
        codes = (blocks / scale).to(torch.float8_e4m3fn).view(weight.shape)
        numbers = codes.float().view(blocks.shape)
    return codes, scale.view(rows, columns), (numbers * scale).view(weight.shape)


def test_rows_do_not_cross_pages(folder: Path) -> None:
    """Pages of 6 tokens would begin inside of rows."""
    with pytest.raises(ModelLoadError, match="--block-size 6: the model keeps one row for 8 tokens"):
        PagedDriver(load_model(read_spec(folder)), 1, 30, block_size=6)


def test_settings_as_deepseek_publishes_them(model: Model, folder: Path, tmp_path: Path) -> None:
    """Kinds of layers are numbers, and the rotations lie side by side."""
    config = json.loads((folder / "config.json").read_bytes())
    for name in ("layer_types", "mlp_layer_types", "rope_parameters", "partial_rotary_factor"):
        config.pop(name, None)
    config |= {"compress_ratios": [0, 128, 4, 128, 0], "num_hash_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    prompt = {0: list(range(3, 60))}
    got = PagedDriver(load_model(read_spec(tmp_path)), 1, 64).step(prompt)[0]
    torch.testing.assert_close(got, PagedDriver(model, 1, 64).step(prompt)[0], atol=0, rtol=0)


@pytest.mark.parametrize(
    ("field", "kinds"),
    [("layer_types", ["sliding_attention"] * 3), ("mlp_layer_types", ["moe"] * 3), ("mlp_layer_types", ["dense"] * 4)],
)
def test_unknown_or_missing_kinds_of_layers_are_named(field: str, kinds: list[str], folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"{field} must name .* for each of 4 layers"):
        load_model(read_spec(folder, **{field: kinds}))


def test_layers_that_hash_tokens_stay_in_the_first_stage(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="first pipeline stage; give it 3 layers"):
        load_model(read_spec(folder, mlp_layer_types=["hash_moe"] * 3 + ["moe"]), layers=range(2, 4))

"""`quire plan` against engines that start with the same options."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, CompletedProcess
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from quire import AsyncLLM
from quire.core.config.engine_args import EngineArgs
from quire.core.wire.protocol import EngineReady
from quire.executor.inspection import load_plan, process
from quire.frontend.cli import plan as plan_command
from quire.frontend.cli.main import QUIRE
from quire.frontend.launch import inspection
from quire.frontend.launch.inspection import plan_load
from tests.checkpoints import make_checkpoint
from tests.executor.inspection.starts import config_of
from tests.executor.models.test_hybrid_models import COMMON, VARIANTS
from tests.executor.models.tiny_encoders import write_encoder
from tests.executor.paged_driver import Checkpoints

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}


async def start(options: dict[str, Any]) -> EngineReady:
    engine = AsyncLLM.from_engine_args(**options)
    try:
        return await engine.start()
    finally:
        engine.shutdown()


def test_the_figures_are_those_of_a_real_start(checkpoint: Checkpoints) -> None:
    folder = checkpoint("llama", vocab_size=321)
    options = {"model": str(folder), **SIZES, "tensor_parallel_size": 2, "quantization": "int8"}
    resolved, plan = plan_load(EngineArgs.from_flat(**options))
    ready = asyncio.run(start(options))
    assert plan.obstacle is None
    assert (plan.num_pages, plan.max_model_len) == (ready.num_pages, ready.max_model_len)
    assert plan.kv_groups == ready.kv_groups
    assert sum(rank.weights_bytes for rank in plan.ranks) == ready.weights_bytes
    assert sum(rank.page_bytes for rank in plan.ranks) * plan.num_pages == ready.kv_cache_bytes
    assert len(plan.ranks) == resolved.layout.tensor == 2


Plan = Callable[..., tuple[int, str]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Plan:
    """`plan("MODEL", "--json")`: the command's exit code and output, with this process in the place of the one that it
    asks, which would first import torch.
    """

    def asked(command: list[str], *, input: bytes, **_: Any) -> CompletedProcess[bytes]:
        question, *rest = command[command.index(process.__name__) + 1 :]
        return CompletedProcess(command, 0, msgspec.msgpack.encode(process._answer(input, question, rest)))

    def run(*arguments: str) -> tuple[int, str]:
        code = QUIRE.run("quire", ["plan", *arguments])
        return code, capsys.readouterr().out

    monkeypatch.setattr(inspection, "subprocess", SimpleNamespace(run=asked, PIPE=PIPE))
    return run


def test_the_size_of_states_is_told(tmp_path: Path, plan: Plan) -> None:
    kind, architecture, config = VARIANTS["lfm2"]
    kind(**{**COMMON, **config, "architectures": [architecture]}).save_pretrained(tmp_path)
    [rank] = load_plan.plan_load(config_of(tmp_path), None).ranks
    assert f"{rank.state_bytes:,} bytes a request" in plan(str(tmp_path))[1]


def test_an_encoder_has_no_cache(tmp_path: Path, plan: Plan) -> None:
    write_encoder(tmp_path, "bert")
    code, text = plan(str(tmp_path), "--max-num-seqs", "4")
    assert code == 0
    assert "KV cache    none" in text
    assert "130                  4" in text
    assert "keeps, on each worker" not in text
    code, answer = plan(str(tmp_path), "--json", "--max-model-len", "100")
    facts = json.loads(answer)
    assert (code, facts["num_pages"], facts["kv_groups"], facts["max_model_len"]) == (0, 0, [], 100)


def test_a_gpu_that_is_not_here(checkpoint: Checkpoints, plan: Plan) -> None:
    folder = str(checkpoint("llama"))
    code, out = plan(folder, "--device", "cuda", "--device-memory", "80GiB", "--json")
    found = json.loads(out)
    assert (code, found["device"], found["workers"][0]["free_bytes"]) == (0, "cuda", 80 << 30)
    assert found["max_num_seqs"] == 1024  # as a server on a large GPU
    rank = found["workers"][0]
    needed = rank["weights_bytes"] + rank["workspace_bytes"]
    assert found["num_pages"] == (int((80 << 30) * 0.92) - needed) // rank["page_bytes"]
    smaller = json.loads(plan(folder, "--device", "cuda", "--device-memory", "24GiB", "--json")[1])
    assert smaller["max_num_seqs"] == 256


def test_a_draft_model_is_named(checkpoint: Checkpoints, plan: Plan) -> None:
    folder, draft = str(checkpoint("llama")), str(checkpoint("gemma2"))
    alone = json.loads(plan(folder, "--json")[1])
    found = json.loads(plan(folder, "--spec-model", draft, "--json")[1])
    assert (alone["draft_model"], found["draft_model"]) == (None, draft)
    assert found["workers"][0]["weights_bytes"] > alone["workers"][0]["weights_bytes"]
    assert f"of {draft}, which weights and KV cache include" in plan(folder, "--spec-model", draft)[1]


def test_a_model_that_does_not_fit_names_the_remedies(checkpoint: Checkpoints, plan: Plan) -> None:
    folder = str(checkpoint("llama"))
    flags = ["--device-memory", "1500KB", "--max-num-seqs", "1", "--max-num-batched-tokens", "16"]
    code, out = plan(folder, *flags)
    assert code == plan_command.NO_FIT
    assert "It does not fit: One request of 2048 tokens needs" in out
    length = int(out.split("--max-model-len ")[1].split()[0])
    code, out = plan(folder, *flags, "--max-model-len", str(length))
    assert code == 0, out


def test_the_tables(checkpoint: Checkpoints, plan: Plan) -> None:
    folder = checkpoint("gemma3", sliding_window=16, num_hidden_layers=6)
    code, out = plan(str(folder), "--max-num-seqs", "8", "--max-num-batched-tokens", "32")
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "layers count keeps, on each worker" in lines
    assert any(line.startswith("full attention 1 ") and line.endswith("bytes a token") for line in lines)
    assert any(line.startswith("window of 16 5 ") and line.endswith("bytes a request at most") for line in lines)
    assert "2,048 8" in lines


def test_a_request_of_a_length_fits_as_often_as_is_said(checkpoint: Checkpoints, plan: Plan) -> None:
    out = plan(str(checkpoint("llama")), "--num-gpu-blocks-override", "200", "--json")[1]
    assert json.loads(out)["requests_by_length"] == {"1024": 3, "2048": 1}  # of 64 and 128 pages


def test_a_broken_checkpoint_is_an_error_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"], "model_type": "no"}))
    assert QUIRE.run("quire", ["plan", str(folder)]) == 1
    assert "Architecture 'NoSuchModel'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 << 30),
        ("24G", 24 << 30),
        ("80GB", 80 * 10**9),
        ("1.5GB", 15 * 10**8),
        ("512MiB", 512 << 20),
        ("7", 7),
    ],
)
def test_sizes_of_memory(text: str, expected: int) -> None:
    assert plan_command.memory_size(text) == expected


def test_the_output_of_a_pooling_model_is_told(checkpoint: Checkpoints, plan: Plan) -> None:
    folder = str(checkpoint("llama"))
    options = ("--runner", "pooling", "--pooler-config.seq_pooling_type", "MEAN", "--max-num-seqs", "4")
    _, text = plan(folder, *options)
    [line] = [line for line in text.splitlines() if line.startswith("output ")]
    assert line.split(maxsplit=1)[1] == (
        "serves embed, token_embed; pooling MEAN; vectors of 64, normalized (runner from --runner, pooling from "
        "--pooler-config)"
    )
    _, found = plan(folder, *options, "--json")
    assert json.loads(found)["pooling"]["tasks"] == ["embed", "token_embed"]
    assert json.loads(plan(folder, "--max-num-seqs", "4", "--json")[1])["pooling"] is None

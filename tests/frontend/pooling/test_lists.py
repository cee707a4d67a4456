"""A model that reads a query and its documents in one prompt, asked by each route and by `LLM.score`; the scores are
those of Transformers' hidden states.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from quire import LLM
from quire.core.errors import ParameterError
from tests.checkpoints import make_tokenizer
from tests.frontend.pooling.test_scores import DOCUMENTS, QUERY
from tests.servers import ServerProcess

HIDDEN, SIZE = 32, 12
MARKS = ("<|embed_token|>", "<|rerank_token|>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lists") / "model"
    tokenizer = make_tokenizer(384, 1024)
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS]})
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=1024,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    layers = {
        "projector.0.weight": torch.randn(HIDDEN // 2, HIDDEN),
        "projector.2.weight": torch.randn(SIZE, HIDDEN // 2),
    }
    save_file(load_file(folder / "model.safetensors") | layers, folder / "model.safetensors")
    path = folder / "config.json"
    own = {"architectures": ["JinaForRanking"], "embedding_size": SIZE, "dtype": "float32"}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    return folder


class Reference:
    """The published model's formula over Transformers' hidden states."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        weights = load_file(folder / "model.safetensors")
        self._first, self._last = weights["projector.0.weight"], weights["projector.2.weight"]

    @torch.inference_mode()
    def scores(self, query: str, documents: list[str], instruction: str | None = None) -> list[float]:
        text = (
            "<|im_start|>system\nYou are a search relevance expert who can determine a ranking of the passages based "
            "on how relevant they are to the query. If the query is a question, how relevant a passage is depends on "
            "how well it answers the question. If not, try to analyze the intent of the query and assess how well each "
            "passage satisfies the intent. If an instruction is provided, you should follow the instruction when "
            "determining the ranking.<|im_end|>\n<|im_start|>user\n"
            f"I will provide you with {len(documents)} passages, each indicated by a numerical identifier. Rank the "
            f"passages based on their relevance to query: {query}\n"
        )
        if instruction:
            text += f"<instruct>\n{instruction}\n</instruct>\n"
        for index, document in enumerate(documents):
            text += f'<passage id="{index}">\n{document}<|embed_token|>\n</passage>\n'
        text += f"<query>\n{query}<|rerank_token|>\n</query>"
        text += "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        ids = torch.tensor(self._tokenizer(text)["input_ids"])
        states = self._model(ids.unsqueeze(0)).last_hidden_state[0]
        marks = [self._tokenizer.convert_tokens_to_ids(mark) for mark in MARKS]
        found = [F.linear(F.linear(states[ids == mark], self._first).relu(), self._last) for mark in marks]
        return F.cosine_similarity(found[1], found[0]).tolist()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("server"), str(folder), "--device", "cpu", "--max-model-len", "1024")
    yield server.wait_until_ready()
    server.stop()


def ask(server: ServerProcess, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(server.base_url + path, json=fields, timeout=60)


def test_all_documents_are_read_together(server: ServerProcess, reference: Reference) -> None:
    expected = reference.scores(QUERY, DOCUMENTS)
    assert reference.scores(QUERY, DOCUMENTS[1:])[0] != pytest.approx(expected[1], abs=1e-3), "others must count"
    marked = [DOCUMENTS[0] + MARKS[1], MARKS[0] + DOCUMENTS[1], DOCUMENTS[2]]  # tokens of the prompt's own
    for documents in (DOCUMENTS, marked):
        body = ask(server, "/rerank", query=QUERY, documents=documents).raise_for_status().json()
        found = {each["index"]: each["relevance_score"] for each in body["results"]}
        assert found == pytest.approx(dict(enumerate(expected)), abs=1e-5)
    data = ask(server, "/score", text_1=QUERY, text_2=DOCUMENTS).raise_for_status().json()["data"]
    assert [each["score"] for each in data] == pytest.approx(expected, abs=1e-5)


def test_pairs_are_prompts_of_their_own(server: ServerProcess, reference: Reference) -> None:
    data = ask(server, "/score", queries=DOCUMENTS, documents=DOCUMENTS[::-1]).raise_for_status().json()["data"]
    expected = [reference.scores(one, [other])[0] for one, other in zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)]
    assert [each["score"] for each in data] == pytest.approx(expected, abs=1e-5)


def test_an_instruction_is_in_the_prompt(server: ServerProcess, reference: Reference) -> None:
    expected = reference.scores(QUERY, DOCUMENTS, "Find books.")
    for fields in ({"instruction": "Find books."}, {"chat_template_kwargs": {"instruction": "Find books."}}):
        data = ask(server, "/score", queries=QUERY, documents=DOCUMENTS, **fields).raise_for_status().json()["data"]
        assert [each["score"] for each in data] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("path", ["/pooling", "/v1/embeddings"])
def test_vectors_of_a_list(server: ServerProcess, reference: Reference, path: str) -> None:
    """The query is the last of the texts, as in vLLM; a single text is a finished prompt."""
    field = "data" if path == "/pooling" else "embedding"
    answer = ask(server, path, input=[*DOCUMENTS, QUERY]).raise_for_status().json()
    [vectors] = [torch.tensor(each[field]) for each in answer["data"]]
    assert vectors.shape == (len(DOCUMENTS) + 1, SIZE)
    found = F.cosine_similarity(vectors[-1:], vectors[:-1]).tolist()
    assert found == pytest.approx(reference.scores(QUERY, DOCUMENTS), abs=1e-5)
    finished = ask(server, path, input=[f"One.{MARKS[0]} Two.{MARKS[1]}"]).raise_for_status().json()
    assert [len(each[field]) for each in finished["data"]] == [2]
    cut = ask(server, path, input=[*DOCUMENTS, QUERY], truncate_prompt_tokens=60)
    assert (cut.status_code, cut.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": ["word " * 1100]}, "documents"),
        ({"documents": DOCUMENTS, "truncate_prompt_tokens": 60}, "truncate_prompt_tokens"),
        ({"documents": DOCUMENTS, "chat_template_kwargs": {"tone": "dry"}}, "chat_template_kwargs"),
    ],
)
def test_a_list_that_cannot_be_read(server: ServerProcess, fields: dict[str, Any], param: str) -> None:
    answer = ask(server, "/rerank", query=QUERY, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_scores_without_a_server(folder: Path, reference: Reference) -> None:
    with LLM(str(folder), max_model_len=1024) as llm:
        assert llm.supported_tasks == ("token_embed",)
        found = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS)]
        assert found == pytest.approx(reference.scores(QUERY, DOCUMENTS), abs=1e-5)
        [output] = llm.encode([*DOCUMENTS, QUERY], pooling_task="token_embed")
        vectors = output.outputs.data
        assert F.cosine_similarity(vectors[-1:], vectors[:-1]).tolist() == pytest.approx(found, abs=1e-5)
        with pytest.raises(ParameterError, match="would cut documents off"):
            llm.score(QUERY, DOCUMENTS, tokenization_kwargs={"truncate_prompt_tokens": 60})

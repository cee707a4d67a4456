"""The chat template that the files of a CrossEncoder name writes the pairs of `LLM.score`."""

import json
import shutil
from pathlib import Path

import pytest

from quire import LLM, PoolingParams
from quire.core.errors import ConfigError
from tests.frontend.pooling.test_scores import Classifier

TEMPLATE = "{{ rule }}|{{ messages[0]['content'] }}|{{ messages[1]['content'] }}{{ '!' if add_generation_prompt }}"
OPTIONS = {"device": "cpu", "max_model_len": 64, "num_gpu_blocks_override": 64}


def saved(source: Path, folder: Path, name: str) -> Path:
    """A copy of a ranker with a template in its tokenizer's files, and the files of a CrossEncoder."""
    shutil.copytree(source, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "modules.json").write_text(json.dumps([{"path": "", "type": "sentence_transformers.models.Transformer"}]))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "CrossEncoder"}))
    options = {"chat_template": name, "rule": "Judge", "add_generation_prompt": True}
    texts = {"modality_config": {"message": {}}, "processing_kwargs": {"chat_template": options}}
    (folder / "sentence_bert_config.json").write_text(json.dumps(texts))
    return folder


def test_pairs_are_written_by_it(ranking_checkpoint: Path, tmp_path: Path) -> None:
    reference = Classifier(ranking_checkpoint)
    with LLM(str(saved(ranking_checkpoint, tmp_path / "model", "default")), **OPTIONS) as llm:
        [own] = llm.score("a", "b c")
        assert own.outputs.score == pytest.approx(reference.score("Judge|a|b c!"), abs=1e-5)
        asked = PoolingParams(extra_kwargs={"chat_template_kwargs": {"rule": "Say"}})
        [other] = llm.score("a", "b c", pooling_params=asked)
        assert other.outputs.score == pytest.approx(reference.score("Say|a|b c!"), abs=1e-5)
        [given] = llm.score("a", "b c", chat_template="{{ messages[1]['content'] }}{{ rule }}")
        assert given.outputs.score == pytest.approx(reference.score("b c"), abs=1e-5)
    folder = saved(ranking_checkpoint, tmp_path / "other", "rerank")
    with LLM(str(folder), **OPTIONS) as llm, pytest.raises(ConfigError, match="no such template"):
        llm.score("a", "b c")

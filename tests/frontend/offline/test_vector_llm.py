"""Arguments of `LLM`'s methods for vectors."""

import pytest

from quire.core.config.pooling import PoolingSpec
from quire.core.errors import ParameterError
from quire.frontend.offline.vector_llm import prompted

SPEC = PoolingSpec(tasks=["embed"], sequence="MEAN", embedding_size=8, prompts={"query": "Q: ", "document": "D: "})


def test_a_prompt_of_the_checkpoint_goes_before_each_text() -> None:
    assert prompted(["a", "b"], "document", SPEC) == ["D: a", "D: b"]


@pytest.mark.parametrize(
    ("prompts", "name", "text"),
    [
        (["a"], "other", "no prompt_name 'other': those of this model are query, document"),
        (["a", [1, 2]], "query", "goes before texts"),
    ],
)
def test_a_prompt_that_cannot_be_used(prompts: list, name: str, text: str) -> None:
    with pytest.raises(ParameterError, match=text):
        prompted(prompts, name, SPEC)

"""Writes a query and its documents as one prompt, for models that read whole lists (Jina Reranker v3)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.core.config.pooling import RANKING_TOKENS, PoolingSpec
from quire.core.errors import ParameterError
from quire.frontend.requests.comparisons import cosine
from quire.frontend.requests.scored_pairs import PairOptions
from quire.frontend.text.truncation import Truncation

if TYPE_CHECKING:
    import numpy as np

_SYSTEM = (
    "You are a search relevance expert who can determine a ranking of the passages based on how relevant they are to "
    "the query. If the query is a question, how relevant a passage is depends on how well it answers the question. If "
    "not, try to analyze the intent of the query and assess how well each passage satisfies the intent. If an "
    "instruction is provided, you should follow the instruction when determining the ranking."
)
"""The text that the models were trained with."""
_ANSWER = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def lists_of(queries: Sequence[str], documents: Sequence[str]) -> list[tuple[str, list[str]]]:
    """A query with its documents for each prompt: one query has all of them, several have one each."""
    if len(queries) == 1:
        return [(queries[0], [*documents])]
    return [(query, [document]) for query, document in zip(queries, documents, strict=True)]


def write_list(query: str, documents: Sequence[str], variables: dict[str, Any]) -> str:
    """The prompt, in the form that the models were trained with.

    Args:
        variables: `instruction` alone.

    Raises:
        ParameterError: another variable, or an instruction that is no text.
    """
    instruction = variables.get("instruction")
    if unknown := sorted(variables.keys() - {"instruction"}):
        raise ParameterError(
            f"chat_template_kwargs: this model's prompts have an instruction alone, and no {unknown[0]!r}.",
            param="chat_template_kwargs",
        )
    if not isinstance(instruction, str | None):
        raise ParameterError(f"instruction must be a text, got {instruction!r}.", param="instruction")
    of_document, of_query = RANKING_TOKENS
    query, passages = _plain(query), [_plain(document) for document in documents]
    parts = [
        f"I will provide you with {len(passages)} passages, each indicated by a numerical identifier. Rank the "
        f"passages based on their relevance to query: {query}",
        *([f"<instruct>\n{_plain(instruction)}\n</instruct>"] if instruction else []),
        *(f'<passage id="{index}">\n{text}{of_document}\n</passage>' for index, text in enumerate(passages)),
        f"<query>\n{query}{of_query}\n</query>",
    ]
    user = "\n".join(parts)
    return f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n{_ANSWER}"


def joined(spec: PoolingSpec | None, inputs: Sequence[Any], truncation: Truncation | None) -> list[Any]:
    """The inputs of a request for vectors. For a model of lists, several texts are documents and, last, the query, and
    become one prompt; one text is a finished prompt, and so are token ids.

    Raises:
        ParameterError: as `check_list_options`.
    """
    is_list = len(inputs) > 1 and all(isinstance(each, str) for each in inputs)
    if spec is None or spec.ranking is None or not is_list:
        return [*inputs]
    check_list_options(PairOptions(truncation=truncation))
    return [write_list(inputs[-1], inputs[:-1], {})]


def check_list_options(options: PairOptions) -> None:
    """Refuses a cut of the whole prompt, which would leave documents without a score.

    Raises:
        ParameterError: there is one.
    """
    if options.truncation is not None:
        raise ParameterError(
            f"{options.truncation.name} would cut documents off, because this model reads all in one prompt; use "
            "max_tokens_per_doc, or send fewer documents.",
            param=options.truncation.name,
        )


def list_scores(vectors: "np.ndarray") -> list[float]:
    """The score of each document of a prompt, whose vectors [num_documents + 1, size] end with the query's."""
    return [cosine(vectors[-1], vector) for vector in vectors[:-1]]


def _plain(text: str) -> str:
    """A text without the tokens that mark where vectors are made."""
    for token in RANKING_TOKENS:
        text = text.replace(token, "")
    return text

"""LiteLLM: embeddings and ranks."""

import litellm
from vectors import QUERY, TEXTS, URL, check_ranks, check_vectors

for model, base in (("openai/quire-demo", f"{URL}/v1"), ("hosted_vllm/quire-demo", f"{URL}/v1")):
    answer = litellm.embedding(model=model, input=TEXTS, api_base=base, api_key="none")
    check_vectors([each["embedding"] for each in answer.data])
    assert answer.usage.prompt_tokens > 0

for model, base in (
    ("hosted_vllm/quire-demo", URL),
    ("cohere/quire-demo", URL),
    ("jina_ai/quire-demo", f"{URL}/v1/rerank"),
):
    answer = litellm.rerank(model=model, query=QUERY, documents=TEXTS, api_base=base, api_key="none")
    check_ranks([(each["index"], each["relevance_score"]) for each in answer.results])

"""txtai: an index whose vectors the server makes, through LiteLLM."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices

from txtai import Embeddings
from vectors import QUERY, RANKS, TEXTS, URL

index = Embeddings(
    method="litellm",
    path="openai/quire-demo",
    vectors={"api_base": f"{URL}/v1", "api_key": "none"},
    content=True,
)
index.index(TEXTS)
found = index.search(QUERY, len(TEXTS))
assert [int(each["id"]) for each in found] == [place for place, _ in RANKS], found
assert all(abs(each["score"] - score) < 1e-4 for each, (_, score) in zip(found, RANKS, strict=True)), (found, RANKS)

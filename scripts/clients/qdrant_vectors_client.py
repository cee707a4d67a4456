"""Qdrant: a collection in memory, whose vectors OpenAI's client asks of the server."""

import openai
from qdrant_client import QdrantClient
from qdrant_client.models import Distance, PointStruct, VectorParams
from vectors import QUERY, RANKS, TEXTS, URL, check_vectors

server = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")


def embed(texts: list[str]) -> list[list[float]]:
    return [each.embedding for each in server.embeddings.create(model="quire-demo", input=texts).data]


store = QdrantClient(":memory:")
vectors = embed(TEXTS)
store.create_collection("texts", vectors_config=VectorParams(size=len(vectors[0]), distance=Distance.COSINE))
store.upsert("texts", [PointStruct(id=index, vector=vector) for index, vector in enumerate(vectors)])
check_vectors([point.vector for point in store.retrieve("texts", [0, 1, 2], with_vectors=True)])
found = store.query_points("texts", query=embed([QUERY])[0], limit=len(TEXTS)).points
assert [point.id for point in found] == [index for index, _ in RANKS], found

"""Chroma: a collection whose vectors the server makes, in OpenAI's form and in that of Text Embeddings Inference."""

import chromadb
from chromadb.utils.embedding_functions import HuggingFaceEmbeddingServer, OpenAIEmbeddingFunction
from vectors import QUERY, RANKS, TEXTS, URL, check_vectors

functions = {
    "openai": OpenAIEmbeddingFunction(api_key="none", api_base=f"{URL}/v1", model_name="quire-demo"),
    "tei": HuggingFaceEmbeddingServer(url=f"{URL}/embed"),
}
client = chromadb.EphemeralClient()
for name, function in functions.items():
    collection = client.create_collection(name, embedding_function=function, metadata={"hnsw:space": "cosine"})
    collection.add(ids=[str(index) for index in range(len(TEXTS))], documents=TEXTS)
    check_vectors(collection.get(include=["embeddings"])["embeddings"])
    found = collection.query(query_texts=[QUERY], n_results=len(TEXTS))
    assert found["ids"][0] == [str(index) for index, _ in RANKS], found

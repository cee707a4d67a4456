"""LlamaIndex: embeddings in OpenAI's form, and in that of Text Embeddings Inference."""

from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from vectors import TEXTS, URL, VECTORS, check_vectors

for embedder in (
    OpenAILikeEmbedding(model_name="quire-demo", api_base=f"{URL}/v1", api_key="none", embed_batch_size=2),
    TextEmbeddingsInference(model_name="quire-demo", base_url=URL, text_instruction="", query_instruction=""),
):
    check_vectors(embedder.get_text_embedding_batch(TEXTS))
    check_vectors([embedder.get_query_embedding(TEXTS[0])], VECTORS[:1])

"""LangChain: embeddings in OpenAI's form, and in that of Text Embeddings Inference."""

from huggingface_hub import InferenceClient
from langchain_huggingface import HuggingFaceEndpointEmbeddings
from langchain_openai import OpenAIEmbeddings
from vectors import TEXTS, URL, VECTORS, check_vectors

# Else it counts the tokens of OpenAI's own models, and sends their ids.
openai = OpenAIEmbeddings(
    model="quire-demo", base_url=f"{URL}/v1", api_key="none", check_embedding_ctx_length=False, chunk_size=2
)
check_vectors(openai.embed_documents(TEXTS))
check_vectors([openai.embed_query(TEXTS[0])], VECTORS[:1])

tei = HuggingFaceEndpointEmbeddings(model="quire/demo")
tei.client = InferenceClient(model=URL)  # its own arguments take no URL
check_vectors(tei.embed_documents(TEXTS))
check_vectors([tei.embed_query(TEXTS[0])], VECTORS[:1])

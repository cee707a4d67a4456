"""Haystack's classes for Text Embeddings Inference: embeddings of documents and of a query."""

from haystack import Document
from haystack_integrations.components.embedders.huggingface_api import (
    HuggingFaceAPIDocumentEmbedder,
    HuggingFaceAPITextEmbedder,
)
from vectors import TEXTS, URL, VECTORS, check_vectors

server = {"api_type": "text_embeddings_inference", "api_params": {"url": URL}, "token": None, "normalize": True}
documents = HuggingFaceAPIDocumentEmbedder(**server, progress_bar=False).run([Document(content=text) for text in TEXTS])
check_vectors([document.embedding for document in documents["documents"]])
check_vectors([HuggingFaceAPITextEmbedder(**server).run(TEXTS[0])["embedding"]], VECTORS[:1])

"""Haystack: embeddings of documents and of a query."""

from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.utils import Secret
from vectors import TEXTS, URL, VECTORS, check_vectors

server = {"api_key": Secret.from_token("none"), "api_base_url": f"{URL}/v1", "model": "quire-demo"}
documents = OpenAIDocumentEmbedder(**server, progress_bar=False).run([Document(content=text) for text in TEXTS])
check_vectors([document.embedding for document in documents["documents"]])
check_vectors([OpenAITextEmbedder(**server).run(TEXTS[0])["embedding"]], VECTORS[:1])

#!/usr/bin/env bash
# langchain-huggingface 1.2.0 with huggingface-hub 0.36.2; needs no server.
#
# Guess: `HuggingFaceEndpointEmbeddings(client=...)` uses the client that it is given, as its field `client` suggests, so
# that a client of one's own server of embeddings can be handed in.
#
# Behaviour: the constructor replaces the client, without a warning, by one for the library's default model on the hub:
# texts would go there. The address works as `model`, or as `client` when it is set on the finished object.
#
# Seen: a client given to the constructor is not kept; its model is sentence-transformers/all-mpnet-base-v2.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check langchain-huggingface==1.2.0 huggingface-hub==0.36.2
cat > "$folder/check.py" <<'PYTHON'
from huggingface_hub import InferenceClient
from langchain_huggingface import HuggingFaceEndpointEmbeddings

url = "http://localhost:8080"
client = InferenceClient(model=url)
made = HuggingFaceEndpointEmbeddings(client=client, huggingfacehub_api_token="x")
print("a client given to the constructor is kept:", made.client is client, made.client.model)
assert made.client is not client and made.client.model == "sentence-transformers/all-mpnet-base-v2", made.client.model
made.client = client
assert made.client is client
by_model = HuggingFaceEndpointEmbeddings(model=url, huggingfacehub_api_token="x")
print("an address as the model is kept:", by_model.client.model)
assert by_model.client.model == url
PYTHON
"$folder/venv/bin/python" "$folder/check.py"

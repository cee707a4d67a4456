# GuideLLM: a short benchmark of chats of 32 tokens; all of its requests succeed.
guidellm benchmark run --target "$QUIRE_URL" --model quire-demo --processor "$QUIRE_ROOT/quire/demo_model" \
  --data '{"prompt_tokens": 32, "output_tokens": 16}' --profile synchronous --max-requests 4 --output-dir . --outputs json
python - <<'PYTHON'
import json
[benchmark] = json.load(open("benchmarks.json"))["benchmarks"]
requests = benchmark["requests"]
assert len(requests["successful"]) == 4 and not requests["errored"], {name: len(rows) for name, rows in requests.items()}
PYTHON

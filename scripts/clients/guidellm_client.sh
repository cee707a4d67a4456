# GuideLLM: a short benchmark of prompts of 32 tokens; all of its requests succeed.
guidellm run --backend "kind=openai_http,target=$QUIRE_URL,model=quire-demo" \
  --tokenizer "kind=huggingface_auto,model=$QUIRE_ROOT/quire/demo_model" \
  --data kind=synthetic_text,prompt_tokens=32,output_tokens=16 --profile kind=synchronous \
  --constraint kind=max_requests,count=4 --output kind=json,path=report.json
python - <<'PYTHON'
import json
[benchmark] = json.load(open("report.json"))["benchmarks"]
requests = benchmark["requests"]
assert len(requests["successful"]) == 4 and not requests["errored"], {name: len(rows) for name, rows in requests.items()}
PYTHON

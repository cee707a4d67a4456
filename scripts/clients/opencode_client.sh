# opencode answers a question.
cat > opencode.json <<JSON
{
  "provider": {
    "quire": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "$QUIRE_URL/v1", "apiKey": "none"},
      "models": {"quire-demo": {"limit": {"context": 8192, "output": 512}}}
    }
  }
}
JSON
opencode run --model quire/quire-demo "What is the capital of France?" | tee answer.txt
grep -q "The capital of France is Paris." answer.txt

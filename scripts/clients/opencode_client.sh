# opencode runs two commands for a task and tells the result.
cat > opencode.json <<JSON
{
  "permission": {"bash": "allow"},
  "provider": {
    "quire": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "$QUIRE_URL/v1", "apiKey": "none"},
      "models": {"quire-demo": {"limit": {"context": 131072, "output": 512}}}
    }
  }
}
JSON
word=word$RANDOM
echo "code word: $word" > task.txt
opencode run --model quire/quire-demo "Copy the code word of task.txt into answer.txt." | tee told.txt
grep -q "The code word is $word." told.txt
grep -qx "$word" answer.txt

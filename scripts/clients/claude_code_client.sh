# Claude Code with the settings of docs/examples answers a question.
sed "s#http://localhost:8000#$QUIRE_URL#; s#my-model#quire-demo#" "$QUIRE_ROOT/docs/examples/claude_code.json" > settings.json
claude --settings settings.json -p "What is the capital of France?" | tee answer.txt
grep -qx "The capital of France is Paris." answer.txt

# Codex with the settings of docs/examples answers a question.
mkdir -p "$HOME/.codex"
sed "s#http://localhost:8000#$QUIRE_URL#; s#my-model#quire-demo#" "$QUIRE_ROOT/docs/examples/codex.toml" > "$HOME/.codex/config.toml"
codex exec --skip-git-repo-check "What is the capital of France?" | tee answer.txt
grep -qx "The capital of France is Paris." answer.txt

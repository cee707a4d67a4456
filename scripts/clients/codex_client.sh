# Codex with the settings of docs/examples runs two commands for a task and tells the result.
mkdir -p "$HOME/.codex"
sed "s#http://localhost:8000#$QUIRE_URL#; s#my-model#quire-demo#" "$QUIRE_ROOT/docs/examples/codex.toml" > "$HOME/.codex/config.toml"
word=word$RANDOM
echo "code word: $word" > task.txt
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox \
  "Copy the code word of task.txt into answer.txt." | tee told.txt
grep -qx "The code word is $word." told.txt
grep -qx "$word" answer.txt

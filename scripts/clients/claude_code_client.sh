# Claude Code with the settings of docs/examples runs two commands for a task and tells the result.
sed "s#http://localhost:8000#$QUIRE_URL#; s#my-model#quire-demo#" "$QUIRE_ROOT/docs/examples/claude_code.json" > settings.json
word=word$RANDOM
echo "code word: $word" > task.txt
claude --settings settings.json --allowedTools Bash -p "Copy the code word of task.txt into answer.txt." | tee told.txt
grep -qx "The code word is $word." told.txt
grep -qx "$word" answer.txt

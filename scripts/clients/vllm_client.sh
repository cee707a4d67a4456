# vLLM's `bench serve`, if VLLM is the path of vLLM's program.
if [ -z "${VLLM:-}" ]; then
  echo "VLLM does not name vLLM's program"
  exit 77
fi
"$VLLM" bench serve --backend openai-chat --base-url "$QUIRE_URL" --endpoint /v1/chat/completions --model quire-demo \
  --tokenizer "$QUIRE_ROOT/quire/demo_model" --dataset-name random --random-input-len 64 --random-output-len 16 \
  --num-prompts 16 --ignore-eos

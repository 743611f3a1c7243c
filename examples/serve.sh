#!/usr/bin/env bash
# Starts a server. Change the parameters here; further flags of `fminfer serve` may follow:
#
#   examples/serve.sh --queue-size 100
#   curl -X POST http://127.0.0.1:7070/generation -H "Content-Type: application/json" -d @examples/test.json
#
# The flags of EnergonAI's run.sh (--name, --tp, --http_port, …) work, too: docs/coming_from.md.
model=${MODEL:-}       # a folder or hub id; empty: the demo model, which knows the way between rooms
host=127.0.0.1         # 0.0.0.0 is reached from other machines; then set FMINFER_API_KEY
port=7070
ranks=1                # processes that share the model's layers: one for each GPU
dtype=auto             # or float16, bfloat16, float32
max_rows=              # most sequences that run at once; empty: what suits the device

exec fminfer serve ${model:+--model-name "$model"} --host "$host" --port "$port" \
  --world-size "$ranks" --dtype "$dtype" ${max_rows:+--max-rows "$max_rows"} "$@"

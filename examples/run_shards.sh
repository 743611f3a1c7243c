#!/usr/bin/env bash
# Answers FOLDER/request_<i>.jsonl, one after the other, with eight ranks started by hand: the loop
# of the old tool, its flags unchanged. One command does the same, loads the model once, and needs no
# ranks by hand:  fminfer run --infer-data FOLDER --model-name MODEL --world-size 8
#
#   fminfer split --input-file requests.jsonl --output-dir parts
#   examples/run_shards.sh parts/ENGINE [more flags, such as --model-name /data/models/opt-175b-new]
#   fminfer merge --input-dir parts --output answers.jsonl
#
# split (scripts/split_queries.py is the same) makes such a folder for each engine; with --flat the
# shards stand in parts itself. merge puts all answers into one file, in the order of
# requests.jsonl, and names what is still to be answered. A file that has its answers is passed over,
# so the loop can be started again.
#
# NUM_LAYERS, MAX_LAYERS: of the model (OPT-175B on 8 GPUs: 12 and 96; BLOOM: 9 and 70).
# MAX_ID: one above the highest shard. PORT: where the ranks meet; two loops need two.
folder=${1:?give the folder of the shards, and then the model, as in: $0 shards --model-name MODEL}
shift

max_id=${MAX_ID:-500}
last=$(ls "$folder" | sed -n 's/^request_\(0\|[1-9][0-9]*\)\.jsonl$/\1/p' | sort -n | tail -n 1)
if [ -z "$last" ]; then
  echo "Error: $folder holds no request_<i>.jsonl." >&2
  below=$(find "$folder" -mindepth 2 -name 'request_*.jsonl' -exec dirname {} + 2>/dev/null | sort -u)
  [ -z "$below" ] || printf 'Give the folder of one engine:\n%s\n' "$below" >&2
  exit 2
fi
if [ "$last" -ge "$max_id" ]; then
  echo "Only shards up to request_$((max_id - 1)).jsonl are answered; for all of them give" \
    "MAX_ID=$((last + 1))" >&2
fi

i=0
while :
do

  file=${folder}/request_${i}.jsonl
  outfile=${folder}/output_request_${i}.jsonl
  if [ -f "$file" ]; then
  if [ ! -f "$outfile" ]; then

      echo "start running ${file}"

      ARGS="--seed 42 \
      --num-layers ${NUM_LAYERS:-12} \
      --max-layers ${MAX_LAYERS:-96} \
      --budget ${BUDGET:-26800} \
      --num-iters 99999999999999 \
      --dist-url tcp://127.0.0.1:${PORT:-9031} \
      --world-size 8 --pipeline-group-size 8 --data-group-size 1 \
      --pp-mode pipe_sync_sample_mask_token_pipe \
      --infer-data ${file}"

      (trap 'kill 0' SIGINT; \
      python -m fminfer run $(echo ${ARGS}) "$@" --cuda-id 0 --rank 0 \
          &
      python -m fminfer run $(echo ${ARGS}) "$@" --cuda-id 1 --rank 1 \
          &
      python -m fminfer run $(echo ${ARGS}) "$@" --cuda-id 2 --rank 2 \
          &
      python -m fminfer run $(echo ${ARGS}) "$@" --cuda-id 3 --rank 3 \
          &
      python -m fminfer run $(echo ${ARGS}) "$@" --cuda-id 4 --rank 4 \
          &
      python -m fminfer run $(echo ${ARGS}) "$@" --cuda-id 5 --rank 5 \
          &
      python -m fminfer run $(echo ${ARGS}) "$@" --cuda-id 6 --rank 6 \
          &
      python -m fminfer run $(echo ${ARGS}) "$@" --cuda-id 7 --rank 7 \
          & \
      wait)
  fi
  fi

  ((i++))
  # Max id of jobs
  if [ "$i" -ge "$max_id" ]; then
    echo "stopping submitting tasks"
    break
  fi
  sleep 0.01
done

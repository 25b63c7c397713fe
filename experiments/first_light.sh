#!/usr/bin/env bash
# The figures of the bundled pair, measured on this machine with nothing else running (about 15 minutes on 2 cores):
#   bash experiments/first_light.sh HELD_OUT_TEXT_DIR
# τ through the services at contexts 512 and 1,900, the target's loss on held-out text, tokens per second with and
# without speculation at 1, 4 and 16 requests, and the split of a round. JSON goes to experiments/results/; acceptance to
# models/draft/, where `spire perf-model` looks for it.
set -euo pipefail
cd "$(dirname "$0")/.."
text=${1:?name a directory of held-out .txt files}
out=experiments/results
url=http://127.0.0.1:8931
spire=${SPIRE_COMMAND:-.venv/bin/spire}

"$spire" doctor --calibrate --out "$out/calibration.json"
"$spire" eval target --data "$text" --windows 200 --json | tee "$out/target.json"

"$spire" up --port 8931 --prompt "" &
trap 'kill %1; wait' EXIT
until curl -sf "$url/ready" >/dev/null; do sleep 0.5; done

"$spire" bench --url "$url" --data "$text" --concurrency 1,4,16 --context 512 --generate 128 --repeats 3 --json | tee "$out/bench.json"
"$spire" bench --url "$url" --data "$text" --concurrency 4,16 --context 1900 --generate 128 --repeats 3 --json | tee "$out/bench_1900.json"
"$spire" bench --url "$url" --data "$text" --concurrency 4 --context 100,2000 --generate 32 --repeats 1 --json | tee "$out/draft_bytes.json"
"$spire" eval acceptance --url "$url" --data "$text" --contexts 512 --context 512,1900 --json | tee "$out/acceptance.part"
mv "$out/acceptance.part" models/draft/acceptance.json

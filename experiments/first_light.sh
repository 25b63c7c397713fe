#!/usr/bin/env bash
# The figures of the bundled pair, measured on this machine with nothing else running:
#   bash experiments/first_light.sh HELD_OUT_TEXT_DIR
# What the machine can do, the target's loss on held-out text, τ through the services at contexts 512 and 1,900, the
# benchmark's whole grid, and transformers beside it (pip install 'spire-serve[peers]'). JSON goes to
# experiments/results/; acceptance to models/draft/, where the performance model looks for it.
set -euo pipefail
cd "$(dirname "$0")/.."
text=${1:?name a directory of held-out .txt files}
out=experiments/results
spire=${SPIRE_COMMAND:-.venv/bin/spire}

"$spire" doctor --calibrate --out "$out/calibration.json"
"$spire" eval target --data "$text" --windows 200 --json | tee "$out/target.json"
"$spire" eval acceptance --data "$text" --contexts 512 --context 512,1900 --json | tee "$out/acceptance.part"
mv "$out/acceptance.part" models/draft/acceptance.json
# With memory to keep the prompts of 64 requests of 1,900 tokens, these decode all at once.
SPIRE_VERIFIER_CACHE_GB=2.3 \
  "$spire" bench --drafts spire --batch 1,4,16,64 --context 128,512,1900 --k 4,8,12,16,auto --repeats 5 --generate 128 \
  --data "$text" --hardware "$out/calibration.json" --json | tee "$out/bench.json"
"$spire" bench --drafts spire --batch 1,4,16 --context 1900 --k 4,8,auto --repeats 15 --generate 128 \
  --data "$text" --hardware "$out/calibration.json" --peers transformers --json | tee "$out/peers.json"

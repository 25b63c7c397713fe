#!/usr/bin/env bash
# What exactness costs and where it ends, on this machine with nothing else running:
#   bash experiments/exactness.sh HELD_OUT_TEXT_DIR
# τ and tokens per second of the three rules on the same prompts, how often texts of a seed part in bfloat16, and what the
# sampling pipeline takes at a vocabulary of 32,000. JSON goes to experiments/results/.
set -euo pipefail
cd "$(dirname "$0")/.."
text=${1:?name a directory of held-out .txt files}
out=experiments/results
spire=${SPIRE_COMMAND:-.venv/bin/spire}
python=${PYTHON:-.venv/bin/python}

# Every rule gets the same prompts: none may find them cached.
SPIRE_VERIFIER_PREFIX_CACHE=false \
  "$spire" eval acceptance --rule rejection,block,invariant --contexts 512 --data "$text" --json | tee "$out/rules.json"
"$spire" eval divergence --dtype bfloat16 --contexts 64 --generate 96 --data "$text" --json | tee "$out/divergence.json"
"$python" experiments/sampling_cost.py --json | tee "$out/sampling_cost.json"

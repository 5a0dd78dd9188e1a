#!/usr/bin/env bash
# Train a drafter for a published model on texts that the model writes, and export it for vLLM.
#
#     bash examples/drafter_for_vllm.sh [MODEL [OUT [PROMPTS [OPTION ...]]]]
#
# MODEL      a hub id, a directory, a .gguf file, or smollm2 (the default)
# OUT        directory of the run (runs/smollm2-drafter); the export is written to OUT-vllm
# PROMPTS    what the drafter shall be good at, as data.source (reasoning_gym:chain_sum)
# OPTION     further options of `longtail drafter train`, as --data.samples=2
#
# The budget is small: 256 texts. A drafter of the recipe ridge is a regression over them, in one
# pass, and is exported as an EAGLE-1 drafter. More texts make a better drafter.
set -euo pipefail
model=${1:-smollm2} out=${2:-runs/smollm2-drafter} prompts=${3:-reasoning_gym:chain_sum}
shift $(($# < 3 ? $# : 3))

longtail drafter train --target.path "$model" --run.dir "$out" \
  --data.source "$prompts" --data.size 256 --data.max_tokens 256 --data.heldout_size 16 \
  --drafter.recipe ridge "$@"

longtail drafter eval "$out" --n 8 --max-tokens 256 --temperatures 0,1
longtail drafter export "$out" --out "$out-vllm"

echo "To serve it, in vLLM's environment:"
echo "  vllm serve MODEL --speculative-config '{\"method\": \"eagle\", \"model\": \"$out-vllm\", \"num_speculative_tokens\": 4}'"

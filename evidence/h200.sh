#!/usr/bin/env bash
# Takes records of evidence/h200 again, on card DEVICE of this machine (default 0): evidence/h200.sh OUT [STUDY...]
# Run it from a clean clone. Without studies named: those of the MoE engine and the 4-bit pool, some 25 minutes on an H200 with
# the caches warm. `moe-64` is trained, exported and put where the studies look for it (models/moe-64) unless it is there. CACHE is
# a token cache of 32,000 tokens (default: the built-in corpus, prepared to caches/32k); TARGETS how much of it is trained on.
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,5s/^# //p' "$0" >&2; exit 2; }
out=$1
shift
studies=("$@")
[ $# -gt 0 ] || studies=(moe-capacity-trained moe-capacity pool-four-bits moe-layout moe-fills)
cache=${CACHE:-caches/32k}

if [ ! -d models/moe-64 ]; then
    [ -d "$cache" ] || coresident pretrain prepare --out "$cache" --set vocabulary=32000
    coresident pretrain train --preset moe-64 --set data.cache_dir="$cache" --set budget.targets="${TARGETS:-40000000}" \
        --set budget.virtual_epochs=4 --out "$out/moe-64" --device "cuda:${DEVICE:-0}"
    coresident pretrain export "$out/moe-64" --out models/moe-64
fi

# A refuted or undecided claim (exit status 1 or 3) is a result: the next study runs all the same.
for study in "${studies[@]}"; do
    coresident run "$study" --devices "${DEVICE:-0}" --out "$out/$study" || echo "$study: exit status $?"
done

#!/usr/bin/env bash
# How specla-mini was trained, on one H200: about 13 minutes, and 2 more to compile. Run again with --resume after a stop.
# Usage: train.sh CORPUS OUT     (CORPUS holds train/ and valid/)
set -euo pipefail
specla train tokenizer --data "$1" --out "$2/tokenizer"
specla train target --data "$1" --tokenizer "$2/tokenizer" --out "$2" --device cuda --resume \
  --steps 18500 --batch-size 32 --seq-len 1024 --learning-rate 4e-3 --vector-rate 8e-3 \
  --weight chat=2 --weight python=1.3 --weight c=0.4 \
  --eval-every 1500 --checkpoint-every 3000 --log-every 50

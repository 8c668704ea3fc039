#!/usr/bin/env bash
# How specla-mini's drafter was trained, on one H200: about 7.5 minutes, beside a second run. Run again after a stop.
# Usage: drafter.sh CORPUS TARGET OUT     (CORPUS holds train/ and valid/; TARGET is specla-mini's directory)
# CORPUS was a part of train.sh's, 36.9 M tokens: half of the documents of books, docs, python and textbooks, a quarter
# of c, all of chat and reference.
set -euo pipefail
specla train drafter "$2" --data "$1" --out "$3" --device cuda --resume \
  --mixer delta --draft-vocab-size 6144 --compact \
  --steps 3500 --batch-size 32 --length 512 --rows 4096 --greedy-share 0.7 --corpus-share 0.1 \
  --eval-every 500 --log-every 50

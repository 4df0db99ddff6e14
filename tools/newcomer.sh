#!/usr/bin/env bash
# Does what a newcomer does: clones this checkout's HEAD and runs README.md's commands and blocks, top to bottom, in an
# empty home. tools/newcomer.sh [FOLDER]; tools/newcomer.py says more.
exec python3 "$(dirname "$0")/newcomer.py" "$@"

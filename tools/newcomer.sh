#!/usr/bin/env bash
# Clones this checkout's HEAD and runs README.md's commands and blocks in an empty home: tools/newcomer.sh [FOLDER]. With
# --wheel FILE: the commands of docs/installation.md. See tools/newcomer.py.
exec python3 "$(dirname "$0")/newcomer.py" "$@"

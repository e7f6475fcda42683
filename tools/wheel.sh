#!/usr/bin/env bash
# Builds the wheel of the last commit into a folder: tools/wheel.sh FOLDER [PYTHON]. The date is the
# commit's and the files are those of a clean copy, whoever builds it and wherever. Needs setuptools, no network.
set -euo pipefail
folder=$(realpath -m "$1")
python=$(realpath -s "${2:-.venv/bin/python}")
cd "$(dirname "$0")/.."
umask 022 # a wheel holds the files' permissions
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git archive HEAD | tar -x -C "$copy"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) "$python" -m pip wheel --quiet --disable-pip-version-check \
    --no-deps --no-build-isolation --wheel-dir "$folder" "$copy"

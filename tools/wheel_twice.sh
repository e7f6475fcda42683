#!/usr/bin/env bash
# Builds the wheel twice, as two people would, compares the bytes, and looks for what must be inside:
# tools/wheel_twice.sh [PYTHON]
set -euo pipefail
python=$(realpath -s "${1:-.venv/bin/python}")
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(umask 022 && TZ=UTC PYTHONHASHSEED=1 tools/wheel.sh "$work/one" "$python")
sleep 2 # a clock that shows in the wheel would show another time
(umask 077 && TZ=Asia/Tokyo PYTHONHASHSEED=2 tools/wheel.sh "$work/another" "$python")
first=$(echo "$work"/one/*.whl)
cmp "$first" "$work"/another/*.whl
"$python" - "$first" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

inside = set(zipfile.ZipFile(sys.argv[1]).namelist())
source = Path("src")
wanted = {"factorpack/py.typed"}
wanted |= {str(path.relative_to(source)) for path in source.glob("factorpack/recipes/*.toml")}
wanted |= {str(path.relative_to(source)) for path in source.glob("factorpack/report/template/*")}
missing = sorted(wanted - inside)
sys.exit(f"the wheel lacks {missing}" if missing else 0)
PYTHON
echo "$(basename "$first"), the same twice: $(sha256sum "$first" | cut -d' ' -f1)"

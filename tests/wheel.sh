#!/usr/bin/env bash
# Build the wheel, install it into an environment of its own, and ask it the main question from an empty folder.
set -euo pipefail
python=$1
root=$(cd "$(dirname "$0")/.." && pwd)
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$root"
"$python" -m build --wheel --outdir "$work" . > "$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$work"/*.whl
cd "$work"
test ! -e data
"$work/venv/bin/loka-sim" whatif wukong --out "$work/run"
"$work/venv/bin/loka-sim" whatif wukong-small --json > "$work/small.json" || test $? -eq 1
"$work/venv/bin/python" - "$work" <<'PY'
import json, pathlib, sys
work = pathlib.Path(sys.argv[1])
import loka_sim, perfmodel
for module in (loka_sim, perfmodel):
    assert pathlib.Path(module.__file__).is_relative_to(work), module.__file__
assert json.loads((work / "small.json").read_text())["model"]["name"] == "wukong-small"
assert (work / "run" / "report.html").stat().st_size > 10_000
PY
echo "wheel: $(du -h "$work"/*.whl | cut -f1), answers without the checkout"

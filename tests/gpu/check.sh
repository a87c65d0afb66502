#!/bin/sh
# Everything a machine with a GPU can say about the kernels, in under ten minutes: tests, then the benchmark.
# Results go to the folder $OUT, by default a new one. PYTHON names the interpreter; options go to the benchmark.
set -u
cd "$(dirname "$0")/../.." || exit 1
OUT=${OUT:-$(mktemp -d)}
echo "results in $OUT"
PYTHON=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
# Only pytest itself is needed, none of its plugins; the test that needs the embedded model is for machines that have it.
timeout 300 "$PYTHON" -m pytest -o addopts=--import-mode=importlib -m gpu tests/gpu -q \
  --deselect tests/gpu/test_engine_cuda.py::test_a_family_shares_its_prompt_and_repeats_itself > "$OUT/tests.txt" 2>&1
status=$?
tail -n 40 "$OUT/tests.txt"
timeout 240 "$PYTHON" tests/gpu/bench_attention.py --step --json "$OUT/bench.json" "$@" || status=1
exit $status

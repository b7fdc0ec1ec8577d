#!/bin/sh
# The kernels on a machine with a CUDA GPU: their tests compiled for it, then `bench kernels`. Under five minutes.
#
# Needs python3 (or $PYTHON) with torch, triton and numpy, and this checkout, not installed. pytest, hypothesis and numba
# (checksums on the CPU, to compare with) are used where they are there; it says what is not run where not. The figures
# are printed, and written to $OUT/kernels.json where OUT names a folder. Ends with the tests' status.
set -eu
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1
unset TRITON_INTERPRET

"$python" - <<'EOF'
import sys
try:
    import numpy, torch, triton
except ImportError as absent:
    sys.exit(f"{absent}: install torch, triton and numpy for this Python, or name another one with PYTHON=")
if not torch.cuda.is_available():
    sys.exit("torch sees no CUDA GPU: run this where nvidia-smi shows one, with a torch that is built for CUDA")
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
EOF

has() {
    "$python" -c "import $1" 2>/dev/null
}

status=0
if has pytest; then
    tests="tests/device tests/unit/test_kernels.py tests/unit/test_kernels_relayout.py"
    if has numba; then
        tests="$tests tests/unit/test_kernels_checksum.py tests/unit/test_kernels_quantize.py"
    else
        echo "numba is absent: the tests of checksums and of fp8 are not run"
    fi
    if has hypothesis; then
        tests="$tests tests/property/test_kernel_copies.py"
    else
        echo "hypothesis is absent: tests/property/test_kernel_copies.py is not run"
    fi
    # Without the project's own settings and conftest, which want its other dependencies.
    # shellcheck disable=SC2086
    timeout 180 "$python" -m pytest -q -ra -c /dev/null --rootdir . --noconftest --import-mode=importlib \
        -p no:cacheprovider $tests || status=$?
else
    echo "pytest is absent: the tests are not run"
fi

timeout 110 "$python" - <<'EOF'
import json
import os
from dataclasses import asdict
from pathlib import Path

from kvbm_core.bench_kernels import run

figures = run(quick=False)
for figure in figures:
    met = {None: "", True: "met", False: "missed"}[figure.met]
    print(f"{figure.name:76} {figure.value:10.3f} {figure.unit:5} {figure.goal:6} {met}")
if folder := os.environ.get("OUT"):
    Path(folder, "kernels.json").write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")
EOF
exit "$status"

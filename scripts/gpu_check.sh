#!/usr/bin/env bash
# Build in place on a machine with a GPU, run the tests that need a GPU, and measure speed. Needs no
# package index: Python, torch, nvcc, a C++ compiler and the dependencies of exl must be installed.
#
#   scripts/gpu_check.sh [--no-build] [--no-tests] [--no-figures] [options of gpu_figures.py]
#
# stdout has one JSON object per figure and nothing else. The exit status is 1 if a test or a
# measurement fails; failed tests do not prevent the measurements. PYTHON selects the interpreter
# (default: python3). Libraries that are newer than their sources are not built again. CUDA code is
# built for the GPUs of this machine unless EXL_CUDA_ARCH lists others.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
build=1 tests=1 figures=1 options=()
for option in "$@"; do
  case $option in
    --no-build) build=0 ;;
    --no-tests) tests=0 ;;
    --no-figures) figures=0 ;;
    -h | --help)
      sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
      exec "$python" scripts/gpu_figures.py --help
      ;;
    *) options+=("$option") ;;
  esac
done

fail() {
  echo "gpu_check: $*" >&2
  exit 1
}

has() { "$python" -c "import $1" 2>/dev/null; }

command -v "$python" >/dev/null || fail "there is no $python; PYTHON can name another"
has torch || fail "$python has no torch"
capabilities=$("$python" -c '
import torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(";".join(sorted({"%d.%d" % torch.cuda.get_device_capability(i) for i in range(count)})))
')
[ -n "$capabilities" ] || fail "torch finds no GPU that it can use"

export PYTHONPATH="$PWD/csrc/python:$PWD/packages/exl-core/src:$PWD/packages/exl-eval/src:$PWD/packages/exl-cli/src${PYTHONPATH:+:$PYTHONPATH}"

# Succeeds if the extension built in place fits this Python and is newer than its sources.
is_built() {
  local built
  built=$("$python" -c 'import exl_kernels._C as built; print(built.__file__)' 2>/dev/null) || return 1
  [ -z "$(find csrc/setup.py csrc/include csrc/src -name '*.cu*' -prune -o -type f -newer "$built" -print)" ]
}

if [ $build = 1 ]; then
  export EXL_CUDA_ARCH=${EXL_CUDA_ARCH:-$capabilities}
  if is_built; then
    "$python" csrc/build_cuda.py csrc/python/exl_kernels >&2
  else
    has setuptools || fail "$python has no setuptools to build with"
    beside=""
    if ! has pybind11; then # torch ships the headers of pybind11
      beside=$(mktemp -d)
      trap 'rm -rf "$beside"' EXIT
      cat >"$beside/pybind11.py" <<'PYTHON'
import importlib.util
from pathlib import Path

__version__ = "torch's"


def get_include():
    return str(Path(importlib.util.find_spec("torch").origin).parent / "include")
PYTHON
    fi
    (cd csrc && PYTHONPATH="$beside${beside:+:}$PYTHONPATH" "$python" setup.py -q build_ext --inplace) >&2
  fi
fi

status=0
if [ $tests = 1 ]; then
  "$python" -m pytest -q -m "cuda and not thorough and not soak" >&2 || status=1
fi
if [ $figures = 1 ]; then
  "$python" scripts/gpu_figures.py "${options[@]+"${options[@]}"}" || status=1
fi
exit $status

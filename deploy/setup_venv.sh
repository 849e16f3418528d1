#!/bin/sh
# Make .venv and install the project with its test tools. Called by the Makefile; safe to run again.
#
# torch comes first, on its own: where there is no NVIDIA GPU the CPU build (its version ends in
# "+cpu") is asked for by name, so that no gigabytes of CUDA libraries arrive. The index that pip is
# set up with is tried first, then PyTorch's own.
set -eu
TORCH=2.13.0
VENV=${1:-.venv}

if [ ! -x "$VENV/bin/python" ]; then
    for candidate in ${PYTHON:-} python3.13 python3.12 python3.11 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    if [ -z "${python:-}" ]; then
        echo "Python 3.11 or newer is needed; none of python3.13, python3.12, python3.11, python3 is one." >&2
        echo "Name yours: make PYTHON=/path/to/python" >&2
        exit 1
    fi
    echo "making $VENV with $python"
    "$python" -m venv "$VENV" || {
        echo "the venv could not be made; on Debian and Ubuntu: apt install python3-venv" >&2
        exit 1
    }
fi

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

if ! "$VENV/bin/python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then
    if [ "$(uname -s)" != Linux ] || nvidia-smi -L >/dev/null 2>&1; then
        pip install "torch==$TORCH"
    else
        echo "no NVIDIA GPU: installing the CPU build of torch"
        pip install --quiet "torch==$TORCH+cpu" 2>/dev/null ||
            pip install "torch==$TORCH+cpu" --extra-index-url https://download.pytorch.org/whl/cpu ||
            pip install "torch==$TORCH"
    fi
fi
pip install --quiet -e '.[test]'

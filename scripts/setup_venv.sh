#!/bin/sh
# Makes the virtual environment and installs lt-parallel with its development tools into it; does nothing the second
# time. Usage: scripts/setup_venv.sh [folder], .venv by default.
#
# The stamp is written last, so an interrupted installation is taken up again. It holds what was installed and where:
# a changed pyproject.toml, another Python, or a copied or moved checkout installs again.
set -eu

cd "$(dirname "$0")/.."
venv=${1:-.venv}
stamp=$venv/.lt-parallel-installed
here=$(pwd -P)

# What the stamp must say for the environment to be up to date.
expected() {
    printf '%s\n%s\n' "$here" "$(cksum <pyproject.toml)"
}

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(expected)" ] && "$venv/bin/python" -c "" 2>/dev/null; then
    exit 0
fi

if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
    echo "$venv exists but is not a virtual environment; move it away or choose another: make VENV=folder ..." >&2
    exit 1
fi
if [ -e "$venv" ] && ! "$venv/bin/python" -I -c '
import importlib.util, sys
sys.exit(not ((3, 12) <= sys.version_info[:2] < (3, 14) and importlib.util.find_spec("pip")))' 2>/dev/null; then
    echo "$venv does not work with a Python >=3.12,<3.14: making it anew" >&2
    rm -rf "$venv"
fi
if [ ! -e "$venv" ]; then
    python=$(sh scripts/find_python.sh)
    echo "Making $venv ..." >&2
    "$python" -m venv "$venv"
fi

rm -f "$stamp"
echo "Installing lt-parallel and what it needs into $venv (about 6 GB, a few minutes; only this once) ..." >&2
PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip install --progress-bar off -e '.[dev]'
expected >"$stamp"
echo "Installed." >&2

#!/bin/sh
# Prints the path of a Python that lt-parallel can be installed with; says on stderr what it found or what it tried.
#
# A name on the PATH proves little: a version manager's shim may exist for a version that isn't active, and a system
# Python may lack venv. So every candidate is started and asked. Python 3.12 comes first because the tests run on it.
#
# Set PYTHON=/path/to/python to choose one yourself.
set -u

tried=""

# Succeeds if "$1" starts, has a supported version, and can make virtual environments; notes why when it doesn't.
usable() {
    answer=$("$1" -I -c '
import sys
version = "%d.%d.%d" % sys.version_info[:3]
if not (3, 12) <= sys.version_info[:2] < (3, 14):
    print("is Python " + version)
else:
    try:
        import ensurepip, venv
        print("ok " + version)
    except ImportError as error:
        print("is Python %s without the module %s (on Debian: install python%d.%d-venv)"
              % (version, error.name, sys.version_info[0], sys.version_info[1]))
' 2>/dev/null) || answer="does not start"
    case $answer in
        "ok "*)
            version=${answer#ok }
            return 0
            ;;
    esac
    tried="$tried
  $1 $answer"
    return 1
}

# Ends the script with "$1" as its result if it is usable.
offer() {
    if [ -x "$1" ] && [ ! -d "$1" ] && usable "$1"; then
        echo "Found Python $version: $1" >&2
        printf '%s\n' "$1"
        exit 0
    fi
}

if [ -n "${PYTHON:-}" ]; then
    chosen=$(command -v "$PYTHON") || chosen=$PYTHON
    offer "$chosen"
    echo "PYTHON=$PYTHON cannot be used: lt-parallel needs a Python >=3.12,<3.14 with venv and ensurepip.$tried" >&2
    exit 1
fi

for name in python3.12 python3.13 python3 python; do
    old_ifs=$IFS
    IFS=:
    for folder in $PATH; do
        IFS=$old_ifs
        offer "${folder:-.}/$name"
    done
    IFS=$old_ifs
done

pyenv_root=${PYENV_ROOT:-${HOME:-}/.pyenv}
for name in python3.12 python3.13; do
    for candidate in "$pyenv_root"/versions/*/bin/"$name"; do
        offer "$candidate"
    done
done

if command -v uv >/dev/null 2>&1; then
    if candidate=$(uv python find '>=3.12,<3.14' 2>/dev/null); then
        offer "$candidate"
    fi
    echo "No installed Python fits; asking uv for Python 3.12 ..." >&2
    if uv python install 3.12 >&2 && candidate=$(uv python find 3.12); then
        offer "$candidate"
    fi
    uv_note="uv could not provide one (see above)"
else
    uv_note="uv, which could fetch one, is not installed"
fi

cat >&2 <<END
lt-parallel needs a Python >=3.12,<3.14 and none was found.
Looked at python3.12, python3.13, python3 and python on the PATH, and in $pyenv_root/versions; $uv_note.${tried:+
Tried:$tried}
Install Python 3.12 (a system package, \`pyenv install 3.12\`, or uv), or name one: make PYTHON=/path/to/python3.12 ...
END
exit 1

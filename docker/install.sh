#!/bin/sh
# Installs farspan into a new virtual environment, as the image has it: docker/install.sh PREFIX
#   TORCH   cpu; a CUDA build, such as cu130; or none, which plans, prepares, searches and reports
#   EXTRAS  extras beside `train`, with commas between them
#   PYTHON  the interpreter
set -eu
prefix=${1:?usage: docker/install.sh PREFIX}
torch=${TORCH:-cpu}
extras=${EXTRAS-mcp,pdf}
clone=$(cd "$(dirname "$0")/.." && pwd)

if [ -e "$prefix" ]; then
    echo "$prefix exists; name a folder that does not" >&2
    exit 1
fi
case $torch in
    none) ;;
    cpu | cu[0-9]*) extras="train${extras:+,$extras}" ;;
    *)
        echo "TORCH is $torch; it can be cpu, none, or a CUDA build, such as cu130" >&2
        exit 1
        ;;
esac

# From a copy: building writes into the folder, and takes what an earlier build left there.
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
for name in pyproject.toml README.md LICENSE MANIFEST.in constraints.txt farspan farspan_exports farspan_lab farspan_studies; do
    cp -R "$clone/$name" "$source"
done

"${PYTHON:-python3}" -m venv "$prefix"
pip() { "$prefix/bin/python" -m pip --disable-pip-version-check install --no-cache-dir --quiet -c "$source/constraints.txt" "$@"; }
if [ "$torch" != none ]; then
    # That index lacks versions of other packages: they come from PyPI below.
    pip --no-deps --index-url "https://download.pytorch.org/whl/$torch" "$(grep '^torch==' "$source/constraints.txt")"
fi
pip "$source${extras:+[$extras]}"
"$prefix/bin/farspan" --version

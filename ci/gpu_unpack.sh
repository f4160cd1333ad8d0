#!/usr/bin/env bash
# ci/gpu_unpack.sh BUNDLE SITE: install what `make gpu-bundle` packed, without network, on a machine with Python 3.12.
# Takes the parts that BUNDLE has and SITE has not yet; builds go to kernels/<kernel>/build/ (not beside .venv), for PTX see
# BUNDLE/builds.
# Prints the PYTHONPATH that is needed.
set -euo pipefail
[ $# = 2 ] || { echo "usage: ci/gpu_unpack.sh BUNDLE SITE" >&2; exit 2; }
bundle=$(realpath "$1")
mkdir -p "$2"
site=$(realpath "$2")
cd "$(dirname "$0")/.."
shopt -s nullglob

say() { printf 'gpu_unpack %s (%ds)\n' "$*" "$SECONDS" >&2; }
contents() { (cd "$1" && find . -type f -printf '%p %s\n' | sort); }

wheels() { # PART
  local files=("$bundle/$1"/*.whl)
  [ ${#files[@]} = 0 ] ||
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check \
      --root-user-action ignore --upgrade --target "$site/.$1/wheels" "${files[@]}" >&2
}
archive() { # PART FILE
  local code='import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")'
  python3 -c "$code" "$2" "$site/.$1/${2##*/}"
}

unpacked() { [ -f "$site/.$1.txt" ] && [ "$(contents "$bundle/$1")" = "$(cat "$site/.$1.txt")" ]; }

parts=()
for part in wheels peers-a peers-b; do [ ! -d "$bundle/$part" ] || parts+=("$part"); done
for part in "${parts[@]}"; do
  if [ -f "$site/.$part.txt" ] && ! unpacked "$part"; then
    say "$part has changed: starting anew"
    find "$site" -mindepth 1 -delete
  fi
done
todo=()
for part in "${parts[@]}"; do unpacked "$part" || todo+=("$part"); done

# All at once, each into a directory of its own: pip replaces directories that packages share.
jobs=()
for part in "${todo[@]}"; do
  rm -rf "${site:?}/.$part"
  mkdir "$site/.$part"
  wheels "$part" & jobs+=($!)
  for file in "$bundle/$part"/*.tar.xz; do archive "$part" "$file" & jobs+=($!); done
done
for job in "${jobs[@]}"; do wait "$job"; done
for part in "${todo[@]}"; do
  for tree in "$site/.$part"/*/; do cp -alf "$tree." "$site/"; done
  rm -rf "${site:?}/.$part"
  contents "$bundle/$part" >"$site/.$part.txt"
  say "$part"
done

# A checkout with .venv builds for itself, and would take these, which are stripped, for its own.
[ -d .venv ] || for variant in "$bundle"/builds/{cpu,release}/*/*/; do
  kernel=$(basename "$(dirname "$variant")")
  out=kernels/$kernel/build/$(basename "$variant")
  rm -rf "$out"
  mkdir -p "$out"
  cp -r "$variant." "$out"
done

packages=$site/nvidia_cutlass_dsl/dsl_packages
[ ! -d "$packages" ] || site+=:$packages
echo "$site"

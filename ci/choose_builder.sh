#!/usr/bin/env bash
# Prints "nix" or "local", and on stderr why. BUILDER: auto (default), nix or local.
set -euo pipefail
cd "$(dirname "$0")/.."

choose() { echo "builder: $1 ($2)" >&2; echo "$1"; exit 0; }

case ${BUILDER:-auto} in
  nix | local) choose "$BUILDER" "BUILDER=$BUILDER" ;;
  auto) ;;
  *) echo "BUILDER must be auto, nix or local, not '$BUILDER'" >&2; exit 2 ;;
esac

version=$(nix --version 2>/dev/null | grep -oE '[0-9]+\.[0-9]+' | head -1) || choose local "no nix"
[ "$(printf '2.18\n%s\n' "$version" | sort -V | head -1)" = 2.18 ] ||
  choose local "nix $version is older than 2.18"
cache=${NIX_CACHE_URL:-$(grep -oE 'https://[a-z0-9.-]+\.cachix\.org' flake.nix | head -1)}
fetch='import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=10).read()'
timeout 10 python3 -c "$fetch" "$cache/nix-cache-info" 2>/dev/null ||
  choose local "the binary cache $cache does not answer within 10 s"
choose nix "nix $version and $cache answer"

#!/usr/bin/env bash
# Checks the Nix side without a network and without building anything:
#   1. every tracked .nix file parses;
#   2. flake.lock covers flake.nix, at the root and in every kernel, and the
#      kernels' lock files equal the root's;
#   3. the flakes evaluate against a stand-in for kernel-builder.
# Needs git and nix >= 2.8; sees what nix sees, which is files tracked by git.
set -euo pipefail
shopt -s nullglob
cd "$(dirname "$0")/.."
root=$(pwd -P)

die() { printf 'check-nix: %s\n' "$*" >&2; exit 1; }
failed=0
report() { printf 'check-nix: FAILED: %s\n' "$*" >&2; failed=1; }
say() { printf 'check-nix: %s\n' "$*"; }

command -v nix >/dev/null || die "nix is not on PATH (Debian: apt-get install nix-bin)"
command -v git >/dev/null || die "git is not on PATH"
git rev-parse --is-inside-work-tree >/dev/null || die "$root is not a git checkout that git accepts"

scratch=$(mktemp -d)
trap 'chmod -R u+w "$scratch"; rm -rf "$scratch"' EXIT
# A store and settings of our own: neither root nor /nix is needed, and the
# caller's configuration has no say.
export NIX_STORE_DIR=$scratch/store NIX_STATE_DIR=$scratch/state NIX_LOG_DIR=$scratch/log
export NIX_CONF_DIR=$scratch/conf NIX_USER_CONF_FILES=/dev/null NIX_REMOTE='' NIX_PATH=''
export XDG_CACHE_HOME=$scratch/cache XDG_CONFIG_HOME=$scratch/config XDG_DATA_HOME=$scratch/data
export NIX_CONFIG="
experimental-features = nix-command flakes
accept-flake-config = false
substituters =
flake-registry =
build-users-group =
sandbox = false
download-attempts = 1"
# Nothing listens on port 9, so an attempt to download fails at once.
export http_proxy=http://127.0.0.1:9 https_proxy=http://127.0.0.1:9 all_proxy=http://127.0.0.1:9 no_proxy=''

# Flake references are URLs; without shallow=1 nix refuses shallow clones.
root_url=${root//%/%25}
root_url=${root_url// /%20}
flake_url() { printf 'git+file://%s?shallow=1&dir=%s' "$root_url" "$1"; }

# From the first error on; the lines before it are about lock files.
show_error() { sed -n '/error:/,$p' "$scratch/err" >&2; }

flakes=(.)
for toml in kernels/*/build.toml; do
  flakes+=("$(dirname "$toml")")
done
[ "${#flakes[@]}" -gt 1 ] || die "no directory of kernels/ holds a build.toml"

for flake in "${flakes[@]}"; do
  needed=("$flake/flake.nix" "$flake/flake.lock")
  [ "$flake" = . ] || needed+=("$flake/build.toml")
  for file in "${needed[@]}"; do
    git ls-files --error-unmatch -- "$file" >/dev/null 2>&1 || report "${file#./} is not tracked by git"
  done
done

git ls-files -z -- '*.nix' >"$scratch/files"
count=0
while IFS= read -r -d '' file; do
  [ -e "$file" ] || continue
  count=$((count + 1))
  nix-instantiate --parse "$file" >/dev/null 2>"$scratch/err" || { show_error; report "$file does not parse"; }
done <"$scratch/files"
[ "$failed" = 0 ] || exit 1
say "$(nix --version): $count .nix files parse"

for flake in "${flakes[@]}"; do
  nix flake metadata --no-update-lock-file "$(flake_url "$flake")" </dev/null >/dev/null 2>"$scratch/err" ||
    { show_error; report "$flake: flake.lock does not cover flake.nix"; }
  cmp -s flake.lock "$flake/flake.lock" || report "$flake/flake.lock differs from flake.lock"
done
[ "$failed" = 0 ] || exit 1
say "flake.lock covers flake.nix and is the same file in: ${flakes[*]}"

# Forces every derivation below a flake output and counts them.
force="
  let
    count = value:
      if !builtins.isAttrs value then 0
      else if value ? drvPath then builtins.seq value.drvPath 1
      else builtins.foldl' (sum: name: sum + count value.\${name}) 0 (builtins.attrNames value);
  in count"
cp -r ci/nix/stub-kernel-builder "$scratch/stub-kernel-builder"
stub="path:$scratch/stub-kernel-builder"
for flake in "${flakes[@]}"; do
  outputs=(packages devShells)
  [ "$flake" != . ] || outputs+=(legacyPackages)
  total=0
  for output in "${outputs[@]}"; do
    if n=$(nix eval "$(flake_url "$flake")#$output" --apply "$force" --override-input kernel-builder "$stub" \
      --no-write-lock-file </dev/null 2>"$scratch/err"); then
      [ "$n" -gt 0 ] || report "$flake: no derivations in $output"
      total=$((total + n))
    else
      show_error
      report "$flake: $output does not evaluate"
      break
    fi
  done
  [ "$failed" != 0 ] || say "$flake: $total derivations evaluate against the stand-in"
done
[ "$failed" = 0 ] || exit 1

say "passed: flakes are parsed, lock-checked and evaluated against a stand-in for kernel-builder."
say "Not shown: that kernel-builder accepts the kernels, that nixpkgs evaluates, that anything"
say "compiles. Real Nix builds need network access (or the binary cache) and were not run here."

#!/usr/bin/env bash
# ci/build.sh "KERNEL..." "TARGET...": builds with Nix or with the local builder (see BUILDER).
# Nix results are links, dist/<target>/<kernel>/<variant>/; `release` holds the cpu variants too.
set -euo pipefail
cd "$(dirname "$0")/.."
read -ra kernels <<<"$1"
read -ra targets <<<"$2"

local_build() { # TARGET...
  ci/bootstrap.sh
  .venv/bin/python -m ci.build "${kernels[@]/#/--kernel=}" "${@/#/--target=}"
}

if [ "$(ci/choose_builder.sh)" = local ]; then
  local_build "${targets[@]}"
  exit
fi

failed=0
for kernel in "${kernels[@]}"; do
  for target in "${targets[@]}"; do
    case $target in
      cpu) continue ;;
      ptx*) continue ;; # below
      release) output=$kernel ;;
      *) output=$kernel-$target ;;
    esac
    if [ -n "${VARIANT:-}" ]; then
      output=targets.$target.$kernel.$VARIANT
      [ "$target" = release ] && output=kernels.$kernel.redistributable.$VARIANT
    fi
    mkdir -p "dist/$target"
    link=dist/$target/$kernel
    [ -L "$link" ] || rm -rf "$link"  # a local build
    echo "nix build .#$output"
    nix --extra-experimental-features 'nix-command flakes' build ".#$output" -o "$link" || failed=1
  done
done
# PTX alone is for tests on other GPUs; the flake does not make it.
for target in "${targets[@]}"; do
  case $target in ptx*) local_build "$target" || failed=1 ;; esac
done
exit "$failed"

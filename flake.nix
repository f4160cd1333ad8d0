{
  description = "CPU and CUDA kernels for Hugging Face models, built with kernel-builder";

  nixConfig = {
    extra-substituters = [ "https://huggingface.cachix.org" ];
    extra-trusted-public-keys = [
      "huggingface.cachix.org-1:ynTPbLS0W8ofXd9fDjk1KvoFky9K2jhxe6r4nXAkc/o="
    ];
  };

  # The kernels' own flakes have this one input under the same name, so that
  # every flake.lock of the repository is the same file.
  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs =
    { self, kernel-builder }:
    let
      # The directories of kernels/ that hold a build.toml.
      kernelNames = builtins.filter (name: builtins.pathExists (./kernels + "/${name}/build.toml")) (
        builtins.attrNames (builtins.readDir ./kernels)
      );

      # Single-capability builds, for trying a kernel on one kind of GPU. The
      # bundle, with every capability of build.toml, is what gets published.
      targets = {
        h100 = "9.0a"; # has Hopper-only instructions, runs on 9.0 alone
        a100 = "8.0";
        t4 = "7.5";
      };

      systems = [
        "x86_64-linux"
        "aarch64-linux"
      ];

      # Builtins only: the stand-in of ci/check-nix.sh has no package set.
      genAttrs =
        names: f:
        builtins.listToAttrs (
          map (name: {
            inherit name;
            value = f name;
          }) names
        );

      kernelOutputs = genAttrs kernelNames (
        name:
        kernel-builder.lib.genKernelFlakeOutputs {
          inherit self;
          path = ./kernels + "/${name}";
        }
      );

      # The same arguments as kernel-builder's own call of create-pyproject.
      uniqueId = builtins.replaceStrings [ "-" ] [ "_" ] (
        self.shortRev or self.dirtyShortRev or "unknown"
      );
      provenance =
        if self ? rev then
          "--kernel-sha ${self.rev}"
        else if self ? dirtyRev then
          "--kernel-sha ${builtins.substring 0 40 self.dirtyRev} --kernel-dirty"
        else
          "";

      # One variant for one capability: rewrites every `cuda-capabilities` of
      # build.toml and generates the project again, so that CMake files and
      # metadata say what is compiled. Every CUDA source must therefore compile
      # for every capability. Relies on `src` being a derivation that holds the
      # generated project; recheck that whenever the pin moves.
      restrictTo =
        pkgs: capability: variant:
        variant.overrideAttrs (old: {
          src = pkgs.runCommand "source" { } ''
            cp -r --no-preserve=mode ${old.src} $out
            # sed works by line: a list over several lines would survive it.
            if grep -n '^[^#]*cuda-capabilities' $out/build.toml |
              grep -v '^[0-9]*:cuda-capabilities = \[.*\]$' >&2; then
              echo 'build.toml: write cuda-capabilities = [...] on one line' >&2
              exit 1
            fi
            grep -q '^cuda-capabilities = \[.*\]$' $out/build.toml
            sed -i 's/^cuda-capabilities = \[.*\]$/cuda-capabilities = ["${capability}"]/' $out/build.toml
            ${pkgs.kernel-builder}/bin/kernel-builder create-pyproject --force \
              --unique-id ${uniqueId} ${provenance} $out
          '';
        });

      perSystem =
        system:
        let
          packagesOf = name: kernelOutputs.${name}.packages.${system};

          # { <variant> = derivation; } of the CUDA variants of a kernel.
          targetVariants =
            name: capability:
            let
              inherit (packagesOf name) pkgs redistributable;
              isCuda = variant: builtins.match ".*-cu[0-9]+-.*" variant != null;
            in
            genAttrs (builtins.filter isCuda (builtins.attrNames redistributable)) (
              variant: restrictTo pkgs.${variant} capability redistributable.${variant}
            );

          # Variant names say nothing about capabilities, so every target is a
          # directory of its own: <target bundle>/<variant>/.
          targetBundle =
            name: capability:
            let
              variants = targetVariants name capability;
              names = builtins.attrNames variants;
              inherit (packagesOf name) pkgs;
            in
            pkgs.${builtins.head names}.runCommand
              "${name}-sm${builtins.replaceStrings [ "." ] [ "" ] capability}"
              { }
              (
                builtins.concatStringsSep "\n" (
                  [ "mkdir -p $out" ] ++ map (variant: "cp -r ${variants.${variant}}/* $out/") names
                )
              );
        in
        {
          # `.#<kernel>` and `.#<kernel>-<target>`.
          packages =
            genAttrs kernelNames (name: (packagesOf name).bundle)
            // builtins.listToAttrs (
              builtins.concatMap (
                name:
                map (target: {
                  name = "${name}-${target}";
                  value = targetBundle name targets.${target};
                }) (builtins.attrNames targets)
              ) kernelNames
            );

          # All that kernel-builder makes of a kernel, for example
          # `.#kernels.<kernel>.redistributable.<variant>`. Nested sets are
          # allowed here but not in `packages`.
          legacyPackages.kernels = genAttrs kernelNames packagesOf;

          # One variant for one target: `.#targets.<target>.<kernel>.<variant>`.
          legacyPackages.targets = builtins.mapAttrs (
            _: capability: genAttrs kernelNames (name: targetVariants name capability)
          ) targets;

          devShells = genAttrs kernelNames (name: kernelOutputs.${name}.devShells.${system}.default);
        };

      outputs = genAttrs systems perSystem;
    in
    {
      packages = builtins.mapAttrs (_: out: out.packages) outputs;
      legacyPackages = builtins.mapAttrs (_: out: out.legacyPackages) outputs;
      devShells = builtins.mapAttrs (_: out: out.devShells) outputs;

      # For scripts: `nix eval --json .#lib`.
      lib = { inherit kernelNames targets; };
    };
}

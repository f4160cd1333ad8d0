# Stand-in for github:huggingface/kernels, for checking this repository's
# flakes without a network. It has the interface of `genKernelFlakeOutputs` and
# none of its package set: it checks what the real one, or the build after it,
# would trip over when it reads build.toml and collects a kernel's sources, and
# returns outputs of the same names, made of derivations that cannot be built.
{
  outputs =
    { self }:
    {
      lib.genKernelFlakeOutputs =
        # As in kernel-builder, an argument that is not listed is an error.
        {
          path,
          self, # optional there, but it throws without it
          doGetKernelCheck ? true,
          pythonCheckInputs ? _: [ ],
          pythonNativeCheckInputs ? _: [ ],
          torchVersions ? versions: versions,
        }:
        let
          systems = [
            "x86_64-linux"
            "aarch64-linux"
          ];

          # What each CUDA of the pinned kernel-builder compiles for.
          cudaArchs = {
            cu126 = [ "7.0" "7.2" "7.5" "8.0" "8.6" "8.7" "8.9" "9.0" ];
            cu130 = [ "7.5" "8.0" "8.6" "8.7" "8.9" "9.0" "10.0" "11.0" "12.0" "12.1" ];
            cu132 = [ "7.5" "8.0" "8.6" "8.7" "8.9" "9.0" "10.0" "11.0" "12.0" "12.1" ];
          };

          knownDepends = [
            "torch"
            "cutlass_2_10"
            "cutlass_3_5"
            "cutlass_3_6"
            "cutlass_3_8"
            "cutlass_3_9"
            "cutlass_4_0"
            "cutlass_4_4"
            "cutlass_4_5"
          ];

          genAttrs =
            names: f:
            builtins.listToAttrs (
              map (name: {
                inherit name;
                value = f name;
              }) names
            );
          splitOn = separator: text: builtins.filter builtins.isString (builtins.split separator text);

          tomlText = builtins.readFile (path + "/build.toml");
          toml = builtins.fromTOML tomlText;
          inherit (toml.general) name backends;
          pythonName = builtins.replaceStrings [ "-" ] [ "_" ] name;

          fail = message: throw "${name}/build.toml: ${message}";
          require = condition: message: if condition then true else fail message;

          torch = toml.torch or (fail "there is no [torch] section");
          kernels = toml.kernel or { };
          sectionNames = builtins.attrNames kernels;
          sectionsOf =
            backend: builtins.filter (section: kernels.${section}.backend == backend) sectionNames;
          cudaSections = sectionsOf "cuda";

          # A path of build.toml, without empty and "." components.
          components = file: builtins.filter (part: part != "" && part != ".") (splitOn "/" file);
          normal = file: builtins.concatStringsSep "/" (components file);

          # Every directory on the way down is looked at, because a symbolic
          # link anywhere in it dangles in the filtered copy that gets built.
          checkPath =
            kind: file:
            let
              descend =
                dir: parts:
                let
                  entry = builtins.head parts;
                  type = (builtins.readDir dir).${entry} or "missing";
                  rest = builtins.tail parts;
                in
                if parts == [ ] then
                  require (kind == "directory") "${file} is not a regular file"
                else if type == "missing" then
                  fail "${file} is not in the git tree"
                else if type == "symlink" then
                  fail "${file} goes through a symbolic link, which dangles in the build"
                else if rest != [ ] && type == "directory" then
                  descend (dir + "/${entry}") rest
                else
                  require (rest == [ ] && type == kind) "${file} is not a ${kind} file";
            in
            if builtins.elem ".." (components file) || builtins.substring 0 1 file == "/" then
              fail "${file} is outside of the kernel's directory"
            else
              descend path (components file);

          listed = map normal (
            (torch.src or [ ]) ++ builtins.concatMap (section: kernels.${section}.src) sectionNames
          );

          # Only files of `src` are copied, so a directory without one of them
          # does not exist in the build.
          checkInclude =
            dir:
            let
              prefix = "${normal dir}/";
              length = builtins.stringLength prefix;
              inside = file: builtins.substring 0 length file == prefix;
            in
            checkPath "directory" dir
            && require (components dir == [ ] || builtins.any inside listed) (
              "include directory ${dir} holds no file that src lists, it is missing in the build"
            );

          checkPaths =
            section:
            builtins.all (checkPath "regular") (section.src or [ ])
            && builtins.all checkInclude (section.include or [ ]);

          checkSection =
            sectionName:
            let
              section = kernels.${sectionName};
              unknown = builtins.filter (dep: !(builtins.elem dep knownDepends)) (section.depends or [ ]);
            in
            require (section ? backend) "[kernel.${sectionName}] has no backend"
            && require (builtins.elem section.backend backends) (
              "[kernel.${sectionName}] has backend ${section.backend}, which general.backends lacks"
            )
            && require (section ? depends) "[kernel.${sectionName}] has no depends"
            && require (unknown == [ ]) (
              "[kernel.${sectionName}] depends on unknown ${builtins.concatStringsSep ", " unknown}"
            )
            && require (section ? src) "[kernel.${sectionName}] has no src"
            && checkPaths section;

          # Compiler flags are kept per source file, so one that two sections of
          # a backend compile would get the flags of both.
          checkSharedSources =
            backend:
            let
              compiled = builtins.concatMap (
                section:
                builtins.filter (file: builtins.match ".*\\.(cu|c|cc|cpp|cxx)" file != null) (
                  map normal kernels.${section}.src
                )
              ) (sectionsOf backend);
              isTwice = file: builtins.length (builtins.filter (other: other == file) compiled) > 1;
              twice = builtins.filter isTwice compiled;
            in
            require (twice == [ ]) "${builtins.head twice} is in two ${backend} sections";

          # The target builds of the root flake rewrite these lines with sed.
          checkCapabilityLines = builtins.all (
            line:
            require
              (
                builtins.match "[^#]*cuda-capabilities.*" line == null
                || builtins.match "cuda-capabilities = \\[.*]" line != null
              )
              "write cuda-capabilities = [...] on one line (target builds rewrite that line), not: ${line}"
          ) (splitOn "\n" tomlText);

          # Whether kernel-builder's "loose intersection" keeps a capability.
          isBuiltBy =
            archs: capability:
            let
              parsed = builtins.match "([0-9]+)\\.([0-9]+)([af]?)(\\+PTX)?" capability;
              part = builtins.elemAt parsed;
              base = "${part 0}.${part 1}";
              notNewer = arch: builtins.compareVersions base arch <= 0;
              sameMajor = arch: builtins.head (splitOn "\\." arch) == part 0;
            in
            if part 2 != "" then
              builtins.elem base archs
            else
              builtins.any (arch: notNewer arch && (part 3 != null || sameMajor arch)) archs;

          checkCapabilities =
            sectionName:
            let
              section = kernels.${sectionName};
              capabilities = section.cuda-capabilities;
              isWellFormed =
                capability:
                builtins.isString capability
                && builtins.match "[0-9]+\\.[0-9]+[af]?(\\+PTX)?" capability != null;
              malformed = builtins.filter (capability: !(isWellFormed capability)) capabilities;
            in
            require (section ? cuda-capabilities) (
              "[kernel.${sectionName}] has no cuda-capabilities, which target builds rewrite"
            )
            && require (malformed == [ ]) (
              "[kernel.${sectionName}] has the capability ${builtins.toJSON (builtins.head malformed)}"
            )
            && builtins.all (
              cuda:
              require (builtins.any (isBuiltBy cudaArchs.${cuda}) capabilities) (
                "[kernel.${sectionName}] has no capability that ${cuda} compiles for"
              )
            ) (builtins.attrNames cudaArchs);

          checked =
            require (toml.general.edition or null == 5) "edition is not 5"
            && require (builtins.match "[a-z][-a-z0-9]*[a-z0-9]" name != null) "bad kernel name"
            && require (builtins.pathExists (path + "/torch-ext/${pythonName}/__init__.py")) (
              "torch-ext/${pythonName}/__init__.py is not in the git tree"
            )
            && checkPaths torch
            && builtins.all checkSection sectionNames
            && builtins.all checkSharedSources backends
            && checkCapabilityLines
            && builtins.all checkCapabilities cudaSections;

          # As kernel-builder names them: without a compiled section a backend
          # is Python-only, and the stable ABI replaces the torch version.
          stableAbi =
            let
              abi = torch.stable-abi or { };
            in
            backend: if builtins.isString abi then abi else abi.${backend} or null;
          variantName =
            system: backend: compute:
            let
              abi = stableAbi backend;
            in
            if sectionsOf backend == [ ] then
              "torch-${backend}"
            else if abi == null then
              "torch213-cxx11-${compute}-${system}"
            else
              "torch-stable-abi${builtins.replaceStrings [ "." ] [ "" ] abi}-${compute}-${system}";
          computesOf =
            backend:
            {
              cpu = [ "cpu" ];
              cuda = builtins.attrNames cudaArchs;
            }
            .${backend} or [ ];
          variantsFor =
            system:
            builtins.concatMap (backend: map (variantName system backend) (computesOf backend)) backends;
          archVariantsFor =
            system: map (compute: "torch213-cxx11-${compute}-${system}") (builtins.concatMap computesOf backends);

          mkDrv =
            attrs:
            derivation (
              {
                builder = "/bin/sh";
                args = [ "-c" "exit 1" ];
              }
              // attrs
            )
            // {
              inherit (attrs) src;
              overrideAttrs = f: mkDrv (attrs // f attrs);
            };
          drvFor =
            system: drvName:
            mkDrv {
              name = drvName;
              inherit system;
              src = "${path}";
            };
        in
        # Not to look at `self` here: it is what this function's result becomes.
        builtins.seq checked {
          packages = genAttrs systems (
            system:
            let
              drv = drvFor system;
              variants = variantsFor system;
            in
            genAttrs [ "bundle" "default" "build-and-copy" "build-and-upload" "ci" "ci-test" "kernels" ] (
              output: drv "${name}-${output}"
            )
            // {
              redistributable = genAttrs variants (_: drv "${name}-torch-ext");
              inherit variants;
              archVariants = archVariantsFor system;
              pkgs = genAttrs variants (_: {
                kernel-builder = drv "kernel-builder";
                runCommand =
                  drvName: _: script:
                  mkDrv {
                    name = drvName;
                    inherit system script;
                    src = "";
                  };
              });
            }
          );
          devShells = genAttrs systems (
            system:
            let
              shells = kind: genAttrs (archVariantsFor system) (_: drvFor system "${name}-${kind}-shell");
            in
            genAttrs [ "default" "test" ] (kind: drvFor system "${name}-${kind}-shell")
            // {
              devShells = shells "dev";
              testShells = shells "test";
            }
          );
        };
    };
}

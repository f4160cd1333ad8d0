# Kernels are the directories with a build.toml. BUILDER=auto|nix|local chooses how they are built.
KERNELS := $(patsubst kernels/%/build.toml,%,$(wildcard kernels/*/build.toml))
GPU_TARGETS := h100 a100 t4
TARGETS := cpu release $(GPU_TARGETS)
MORE_TARGETS := ptx75 ptx80
BUILDER ?= auto
VARIANT ?=
ONLY ?=
export BUILDER VARIANT ONLY

PYTHON := .venv/bin/python
# The loader takes CUDA variants where torch is a CUDA build, with a GPU or without.
TORCH_CUDA_TARGET = $(shell $(PYTHON) -c 'import torch; print("--target release" if torch.version.cuda else "")')
NIX := nix --extra-experimental-features 'nix-command flakes'
CODE := git ls-files -co --exclude-standard -- '*.h' '*.cuh' '*.cpp' '*.cu' ':!kernels/*/include/warpsmith'

.DEFAULT_GOAL := help
.PHONY: help venv build-all release test check check-nix sync-shared sync-locks fmt bench gpu-check gpu-bundle devshell clean distclean

help: ## Print this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p; s/^## ([^:]+): (.*)/\1\t\2/p' $(MAKEFILE_LIST) | \
	  awk -F'\t' '{ printf "make %-26s %s\n", $$1, $$2 }'

venv: ## Create .venv with the pinned tools and libraries
	@ci/bootstrap.sh

build-all: ## Build every kernel for cpu, release and each GPU target
	@ci/build.sh "$(KERNELS)" "$(TARGETS)"

release: ## Build every kernel as it would be published: all capabilities in one library, and cpu
	@ci/build.sh "$(KERNELS)" "cpu release"

## build-<kernel>: Build one kernel for all of these
## build-<kernel>-<target>: Build one kernel for cpu, release, h100, a100, t4, ptx75 or ptx80
define kernel_rules
.PHONY: build-$(1) $(foreach t,$(TARGETS) $(MORE_TARGETS),build-$(1)-$(t))
build-$(1):
	@ci/build.sh "$(1)" "$(TARGETS)"
$(foreach t,$(TARGETS) $(MORE_TARGETS),build-$(1)-$(t)): build-$(1)-%:
	@ci/build.sh "$(1)" "$$*"
endef
$(foreach k,$(KERNELS),$(eval $(call kernel_rules,$(k))))

test: venv ## Build the variants that this torch loads and run all tests
	@$(PYTHON) -m ci.build --target cpu $(TORCH_CUDA_TARGET)
	$(PYTHON) -m pytest

check: venv ## Check build.toml files, shared headers, bindings and what git tracks
	@$(PYTHON) -m ci.check

check-nix: ## Check the flakes without a network
	@ci/check-nix.sh

sync-shared: venv ## Copy the shared headers that each kernel uses into the kernel
	@$(PYTHON) -m ci.sync_shared

sync-locks: ## Copy the root's flake.lock into the kernels
	@for k in $(KERNELS); do cp flake.lock kernels/$$k/flake.lock; done

fmt: venv ## Format Python, C++ and CUDA sources
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .
	$(CODE) | xargs -r .venv/bin/clang-format -i
	@$(PYTHON) -m ci.sync_shared

bench: ## Measure KERNEL=<kernel> beside other implementations; CPU=1 on the CPU, ONLY=<text> some shapes
	@test -f "benchmarks/suites/$(KERNEL).py" || { echo "usage: make bench KERNEL=<kernel> [CPU=1] [ONLY=<text>]," \
	  "kernels: $(patsubst benchmarks/suites/%.py,%,$(wildcard benchmarks/suites/[a-z]*.py))" >&2; exit 2; }
	@ci/bootstrap.sh
	@$(PYTHON) -m ci.build --target cpu $(TORCH_CUDA_TARGET)
	$(PYTHON) -m benchmarks run $(KERNEL) $(if $(filter-out 0 no,$(CPU)),--cpu) $${ONLY:+--only "$$ONLY"}

gpu-check: ## Run GPU tests, compute-sanitizer and benchmarks and write their results
	@ci/gpu_check.sh

gpu-bundle: venv ## Pack for a GPU machine without network; PARTS="wheels builds peers-a peers-b"
	@$(PYTHON) -m ci.gpu_bundle $(PARTS)

devshell: ## Enter the Nix shell of KERNEL=<kernel>, optionally of one VARIANT=<variant>
	@test -n "$(KERNEL)" || { echo "usage: make devshell KERNEL=<kernel> [VARIANT=<variant>]" >&2; exit 2; }
	$(NIX) develop '$(if $(VARIANT),./kernels/$(KERNEL)#devShells.$(VARIANT),.#$(KERNEL))'

clean: ## Remove everything generated but .venv and .gpu-bundle
	rm -rf .build dist result* gray.png kernels/*/gray.png *.egg-info .pytest_cache .ruff_cache .hypothesis
	rm -rf $(foreach k,$(KERNELS),$(addprefix kernels/$(k)/,build dist result* _cmake_build cmake \
	  CMakeLists.txt pyproject.toml setup.py metadata-*.json torch-ext/registration.h torch-ext/*/_ops.py))
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## Remove .venv and .gpu-bundle as well
	rm -rf .venv .gpu-bundle

#!/usr/bin/env bash
# What AMD's open compiler makes of the kernels: registers, spills and assembly, for RDNA 2 and RDNA 3, without a GPU.
#
#   scripts/isa.sh           writes docs/isa.md
#   scripts/isa.sh --check [--all]
#                            writes nothing; fails where a configuration for GPUs spills or needs scratch memory: of the
#                            plainest and the fullest set of rules of each kernel, or of all
#   scripts/isa.sh ARGUMENT...
#                            the tool with these arguments: one kernel, its assembly, a WGSL file of your own; see --help
#
# Needs Mesa's Vulkan drivers, which are installed with apt-get where they are missing. RADV_ICD may name the description
# (radeon_icd*.json) of a second, newer Mesa, 25 or later, and RADV_LIBRARIES the folder of its libraries where it lies
# unpacked somewhere: it compiles what needs cooperative matrices, which older ones lack.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/test.sh"

GPUS=(navi21 navi31)
# The GPU that has cooperative matrices.
MATRIX_GPU=navi31
REPORT=docs/isa.md

build() {
    # The example makes cargo give every dependency the features that the tests have, so that what was built for them serves.
    cargo build --workspace --all-features --bin isa --example own_rule
}

isa() { "${CARGO_TARGET_DIR:-target}/debug/isa" "$@"; }

# The same with the newer Mesa.
isa_newer() {
    local folders=${RADV_LIBRARIES:-}
    local -x LD_LIBRARY_PATH=$folders${LD_LIBRARY_PATH:+${folders:+:}$LD_LIBRARY_PATH}
    isa --icd "$RADV_ICD" --gpu "$MATRIX_GPU" "$@"
}

# body TEXT: a section without its heading.
body() { tail -n +3 <<<"$1"; }

# check_all ICD [ARGUMENT...]: for each GPU, and what needs cooperative matrices where there is a driver for it.
check_all() {
    local gpu wrong=0
    for gpu in "${GPUS[@]}"; do
        isa --icd "$1" --gpu "$gpu" --check "${@:2}" || wrong=1
    done
    if [[ -n ${RADV_ICD:-} ]]; then
        isa_newer --matrices --check "${@:2}" || wrong=1
    else
        echo "RADV_ICD names no newer Mesa: kernels that need cooperative matrices are not checked"
    fi
    return "$wrong"
}

header() {
    cat <<'TEXT'
# What a GPU's compiler makes of the kernels

Mesa's driver for AMD's GPUs compiles for any of them without having one, and says what came out. `scripts/isa.sh` writes this
file; do not edit it. Nothing ran here: the figures say how good the code is, not how fast the memory is.

The kernels are compiled as they run: without runtime checks of indices and of the ends of loops (ARCHITECTURE.md, Runtime checks, says why they need
none). What the same kernels are with them: `--checked`.

Shown is each kernel's first set of rules in f32 and f16, without the twins that read operands whose rows begin anywhere. Every other configuration,
kernels for CPU adapters, the assembly, or a WGSL file of your own: `scripts/isa.sh --help`. `scripts/isa.sh --check` fails where a configuration for GPUs
spills or needs scratch memory; it looks at the first and the last set of rules (the plainest and the fullest) of each kernel in every element
type, and with `--all` at all of them. The exceptions are in `tools/isa/src/known.rs`, with their reason.

| column | what it says |
| --- | --- |
| configuration | constants of the kernel, as `src/kernels/` has them |
| VGPRs, SGPRs | registers a lane, and a wave. RDNA gives each wave the same number of SGPRs, so they are short only where some are spilled |
| spilled | registers that did not suffice: SGPRs go to lanes of VGPRs, VGPRs to memory (scratch, in bytes a wave) |
| LDS bytes | workgroup memory of a workgroup, as the driver rounds it |
| waves | that fit a SIMD at once, by VGPRs and workgroup memory, as the driver counts them: in waves of 32 lanes, so that one of 64 counts twice; 32 at most |
| hot block | the basic blocks inside loops with the most multiply-adds, three at most, as they stand in the program; what follows is of that block |
| multiply-adds | that one lane makes in one turn (a packed instruction makes two; the halves of a dual one are counted apart) |
| other vector, transcendental | vector instructions that are none; exponentials, reciprocals and the like, which take four times as long |
| LDS, global | accesses of workgroup memory and of buffers, of whatever width |
| dot2, wmma, lane exchanges, scratch accesses | dot products, matrix instructions of a whole wave, values handed from lane to lane, and scratch, where there are any |
| share | of multiply-adds (and dot and matrix instructions) among the vector instructions |
| per LDS | multiply-adds for each access of workgroup memory |

Hot blocks of attention kernels are first the product of queries and keys, then that of weights and values, which may be there twice: for
blocks of keys that all rows see, and a row at a time for others.
TEXT
}

matrices() {
    printf '\n## Cooperative matrices\n\n'
    if [[ -z ${RADV_ICD:-} ]]; then
        echo "Not compiled: no Mesa that has them (25 or newer) was there when this was written. \`RADV_ICD\` names one to \`scripts/isa.sh\`."
        return
    fi
    local kernels sample
    kernels=$(isa_newer --matrices)
    sample=$(isa_newer --file tools/isa/samples/matrix.wgsl --entry matrix)
    printf 'For %s. ' "$MATRIX_GPU"
    body "$kernels"
    printf '\nA sample, `tools/isa/samples/matrix.wgsl`, shows what the compiler makes of them: '
    body "$sample"
}

report() {
    local gpu
    header
    for gpu in "${GPUS[@]}"; do
        echo
        isa --icd "$1" --gpu "$gpu"
    done
    matrices
}

isa_main() {
    local icd unfinished
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    install_rust_parts
    install_drivers isa
    if ! icd=$(radeon_icd); then
        echo "no RADV driver (radeon_icd*.json): install mesa-vulkan-drivers" >&2
        exit 2
    fi
    build
    if [[ ${1:-} == --check ]]; then
        check_all "$icd" "${@:2}"
        return
    fi
    if (($# > 0)); then
        isa "$@"
        return
    fi
    unfinished=$(mktemp "$REPORT.XXXXXX")
    # shellcheck disable=SC2064 # the name as it is now
    trap "rm -f '$unfinished'" EXIT
    report "$icd" >"$unfinished"
    chmod 644 "$unfinished"
    mv "$unfinished" "$REPORT"
    echo "wrote $REPORT"
}

isa_main "$@"

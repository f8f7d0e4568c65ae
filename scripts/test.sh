#!/usr/bin/env bash
# Every check of this repository, on a Debian or Ubuntu machine without a GPU.
#
#   scripts/test.sh                  all stages; what CI runs
#   scripts/test.sh STAGE...         some of them: a partial run, which says so
#
# Stages: static      format, clippy, docs, oldest toolchain, package contents
#         free        tests that need no GPU, with every adapter hidden
#         lavapipe    GPU tests on Mesa's Vulkan driver
#         swiftshader GPU tests on SwiftShader's Vulkan driver
#         gl          GPU tests on OpenGL ES through EGL
#         isa         what AMD's compiler makes of the kernels: nothing that is for GPUs may spill
#
# The stages from lavapipe on run two at a time: a driver's compiler is one thread. Each has a process group of its own, says
# on the screen how each check ended, and shows all it printed when it ends.
#
# Missing drivers are installed with apt-get (as root or through sudo). Logs: target/test-logs/.
# Fails where a check fails, a test is ignored or filtered out, a test target runs no test, or a file in
# tests/ is in none of the lists below.
set -euo pipefail

# Every tests/*.rs is in exactly one of these four lists.
GPU_FREE_TESTS=(
    shaders
    results
    report
)
GPU_TESTS=(
    kernels
    rules
    random
    decode
    tiers
    cache
    linear_cache
    dispatch
    layer
    devices
    buffers
    errors
    case_kinds
    bench
)
# Not on SwiftShader, which compiles slowest: how the program reads and says things does not depend on the adapter. Its golden cases
# and its bare command run there too.
FASTER_ADAPTER_TESTS=(
    program
)
# Whether the checks can fail does not depend on the adapter: asked on the one that compiles fastest, hundreds of broken
# kernels over. What only an adapter of narrower vectors shows, missing barriers, is asked of SwiftShader too.
# What the tuner keeps does not depend on it either.
ONE_ADAPTER_TESTS=(
    mutants
    tune
)

STAGES=(static free lavapipe swiftshader gl isa)
# Those that run beside others, AT_ONCE at a time, in the order in which they start: the longest first.
BESIDE=(swiftshader lavapipe gl isa)
AT_ONCE=2
LOGS=target/test-logs
MAX_PACKAGED_BYTES=10000000

export CARGO_INCREMENTAL=0
export CARGO_TERM_COLOR=never
# Without line numbers in what drivers get, which naga looks up by counting lines from the top; as release builds have it.
export WGPU_DEBUG=0

failures=() # what failed, in words
summary=()  # one line a stage
own_runtime_dir=
declare -A beside=() # the stages that run in the background, each with its process, which leads a process group

# told WORDS: on the screen, also from a stage whose output goes into a file.
told() { echo "$*" 2>/dev/null >&"${screen:-1}" || true; }

note() { printf '\n== %s\n' "$*"; }

fail() {
    printf 'FAILED: %s\n' "$*" >&2
    failures+=("$*")
}

# check NAME COMMAND...: runs it, with its output on the screen and in a log; a failure is kept for the end.
check() {
    local name=$1 start=$SECONDS
    shift
    note "$name: $*"
    "$@" 2>&1 | tee "$LOGS/${name//[^A-Za-z0-9._-]/_}.log" || {
        fail "$name"
        told "$name: FAILED after $((SECONDS - start)) s"
        return 1
    }
    told "$name: ended after $((SECONDS - start)) s"
}

# ---------------------------------------------------------------- reading what cargo test prints

# judge LOG NAME LEAST [chosen]: whether the tests in LOG count as passed. Prints what is wrong.
# At least LEAST tests must have run, none may be ignored or, unless they were chosen by name, filtered out.
judge() {
    local log=$1 name=$2 least=$3 chosen=${4:-}
    awk -v name="$name" -v least="$least" -v chosen="$chosen" '
        /^test .* \.\.\. ignored/ {
            line = $0
            sub(/^test /, "", line)
            sub(/ \.\.\. ignored.*/, "", line)
            ignored_names = ignored_names " " line
        }
        /^test result: / {
            results++
            if ($3 != "ok.") bad++
            for (i = 4; i < NF; i++) {
                if ($(i + 1) ~ /^passed/) passed += $i
                if ($(i + 1) ~ /^failed/) failed += $i
                if ($(i + 1) ~ /^ignored/) ignored += $i
                if ($(i + 1) ~ /^filtered/) filtered += $i
            }
        }
        END {
            if (!results) { print name ": no line \"test result:\""; wrong = 1 }
            if (bad || failed) { print name ": " failed + 0 " tests failed"; wrong = 1 }
            if (ignored || ignored_names) { print name ": ignored:" (ignored_names ? ignored_names : " " ignored " tests"); wrong = 1 }
            if (filtered && !chosen) { print name ": " filtered " tests filtered out"; wrong = 1 }
            if (passed + failed < least) { print name ": ran " passed + failed " tests, expected at least " least; wrong = 1 }
            exit wrong
        }
    ' "$log"
}

# cargo_test NAME LEAST ARGUMENT...: one target of `cargo test`, judged by its output too.
cargo_test() {
    local name=$1 least=$2 problems
    shift 2
    check "$name" cargo test --all-features "$@" || return 0
    if ! problems=$(judge "$LOGS/${name//[^A-Za-z0-9._-]/_}.log" "$name" "$least"); then
        fail "${problems:-$name: its log cannot be read}"
    fi
}

# chosen_test NAME TARGET TEST: one test of a target, by its whole name.
chosen_test() {
    local name=$1 problems
    check "$name" cargo test --all-features --test "$2" -- --exact "$3" || return 0
    if ! problems=$(judge "$LOGS/${name//[^A-Za-z0-9._-]/_}.log" "$name" 1 chosen); then
        fail "${problems:-$name: its log cannot be read}"
    fi
}

# The judge itself: it must pass a good log and refuse the others.
check_judge() {
    local good='test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.1s'
    local empty='test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.0s'
    judge <(printf '%s\n' "$good" "$good") good 6 >/dev/null || fail "judge refuses a good log"
    judge <(printf '%s\n' "$empty") none 0 >/dev/null || fail "judge refuses a log of no tests where none are expected"
    local log
    for log in "$empty" "nothing at all" \
        "${good/0 ignored/1 ignored}" "${good/0 filtered/2 filtered}" \
        "${good/0 failed/1 failed}" "${good/ok./FAILED.}" \
        $'test a::b ... ignored, slow\n'"$good"; do
        if judge <(printf '%s\n' "$log") bad 1 >/dev/null; then
            fail "judge accepts: $log"
        fi
    done
    if judge <(printf '%s\n' "${empty/0 filtered/9 filtered}") none 1 chosen >/dev/null; then
        fail "judge accepts that a test chosen by name did not run"
    fi
}

# unlisted FOLDER: what is wrong with the four lists, given the files in FOLDER; nothing where they agree.
unlisted() {
    comm -3 \
        <(find "$1" -maxdepth 1 -name '*.rs' -printf '%f\n' | sed 's/\.rs$//' | sort) \
        <(printf '%s\n' "${GPU_FREE_TESTS[@]}" "${GPU_TESTS[@]}" "${FASTER_ADAPTER_TESTS[@]}" "${ONE_ADAPTER_TESTS[@]}" | sed '/^$/d' | sort) |
        sed -e 's/^\t\(.*\)/listed too often, or not there: \1/' -e t -e 's/^/in none of the lists: /'
}

# ---------------------------------------------------------------- drivers

# first_file GLOB...: the first file that exists.
first_file() {
    local file
    for file in "$@"; do
        if [[ -e $file ]]; then
            printf '%s\n' "$file"
            return
        fi
    done
    return 1
}

lavapipe_icd() { first_file /usr/share/vulkan/icd.d/lvp_icd*.json /etc/vulkan/icd.d/lvp_icd*.json; }

radeon_icd() { first_file /usr/share/vulkan/icd.d/radeon_icd*.json /etc/vulkan/icd.d/radeon_icd*.json; }

# SwiftShader comes with Chromium; Ubuntu's package is a snap, and other Chromium builds serve as well.
swiftshader_icd() {
    first_file ${SWIFTSHADER_ICD:+"$SWIFTSHADER_ICD"} /usr/lib/chromium*/vk_swiftshader_icd.json \
        /snap/chromium/current/usr/lib/chromium-browser/vk_swiftshader_icd.json \
        /opt/google/chrome/vk_swiftshader_icd.json
}

# missing_packages STAGE...: the Debian packages that these stages still lack.
missing_packages() {
    local stage package wanted=()
    command -v cc >/dev/null || wanted+=(gcc libc6-dev)
    for stage in "$@"; do
        case $stage in
        free)
            # Reports are looked at in a browser.
            command -v chromium >/dev/null || command -v google-chrome >/dev/null || wanted+=(chromium)
            ;;
        lavapipe)
            wanted+=(libvulkan1)
            lavapipe_icd >/dev/null || wanted+=(mesa-vulkan-drivers)
            ;;
        isa)
            wanted+=(libvulkan1)
            radeon_icd >/dev/null || wanted+=(mesa-vulkan-drivers)
            ;;
        swiftshader)
            wanted+=(libvulkan1)
            swiftshader_icd >/dev/null || wanted+=(chromium)
            ;;
        gl) wanted+=(libegl1 libegl-mesa0 libgl1-mesa-dri) ;;
        esac
    done
    for package in "${wanted[@]}"; do
        dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || printf '%s\n' "$package"
    done | sort -u
}

install_drivers() {
    local package missing as_root=()
    if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
        note "no apt-get here: the drivers must be there already"
        return
    fi
    mapfile -t missing < <(missing_packages "$@")
    if ((${#missing[@]} == 0)); then
        return
    fi
    note "installing ${missing[*]}"
    if ((EUID != 0)); then
        if ! command -v sudo >/dev/null; then
            fail "neither root nor sudo: install ${missing[*]} by hand"
            return
        fi
        as_root=(sudo)
    fi
    # An update that fails (one of several sources is down) need not keep the install from succeeding.
    "${as_root[@]}" apt-get update || true
    # One by one: a package that this system does not have must not keep the others out.
    for package in "${missing[@]}"; do
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$package" ||
            fail "apt-get install $package"
    done
}

install_rust_parts() {
    if ! command -v cargo >/dev/null; then
        echo "cargo is missing: install Rust with rustup (https://rustup.rs), then run this again" >&2
        exit 2
    fi
    if command -v rustup >/dev/null; then
        cargo fmt --version >/dev/null 2>&1 || rustup component add rustfmt
        cargo clippy --version >/dev/null 2>&1 || rustup component add clippy
    fi
}

# ---------------------------------------------------------------- stages

stage_static() {
    local problems
    check_judge
    problems=$(unlisted tests)
    if [[ -n $problems ]]; then
        fail "the lists of tests in scripts/test.sh: $problems"
    fi
    check fmt cargo fmt --all --check || true
    # The tools too; without features there is the library alone to look at.
    check clippy-all cargo clippy --workspace --all-targets --all-features -- -D warnings || true
    check clippy-none cargo clippy --all-targets --no-default-features -- -D warnings || true
    check clippy-safetensors cargo clippy --all-targets --no-default-features --features safetensors -- -D warnings || true
    check clippy-tuning-file cargo clippy --lib --no-default-features --features tuning-file -- -D warnings || true
    check rustdoc env RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --all-features --lib || true
    check_oldest_toolchain
    check_package
}

# The toolchain that Cargo.toml promises: with it where it is installed, else by clippy's knowledge of the standard library.
check_oldest_toolchain() {
    local oldest toolchain=
    oldest=$(sed -n 's/^rust-version *= *"\(.*\)"$/\1/p' Cargo.toml)
    if [[ -z $oldest ]]; then
        fail "Cargo.toml has no rust-version"
        return
    fi
    if command -v rustup >/dev/null; then
        toolchain=$(rustup toolchain list | awk '{ print $1 }' | grep -E -m1 "^${oldest//./\\.}(\.[0-9]+)?(-|$)") || true
    fi
    if [[ -n $toolchain ]]; then
        if check oldest-toolchain env CARGO_TARGET_DIR=target/oldest cargo "+$toolchain" check --all-features; then
            summary+=("  rust-version $oldest: checked with toolchain $toolchain")
        fi
    else
        if check oldest-toolchain cargo clippy --lib --bins --all-features -- -D warnings -W clippy::incompatible_msrv; then
            summary+=("  rust-version $oldest: toolchain not installed; checked by clippy's incompatible_msrv only")
        fi
    fi
}

# What `cargo package` would send out: nothing very large.
check_package() {
    local file size
    check package cargo package --list --allow-dirty || return 0
    while IFS= read -r file; do
        [[ -f $file ]] || continue # some are made while packaging
        size=$(stat -c %s "$file")
        if ((size > MAX_PACKAGED_BYTES)); then
            fail "package: $file has $size bytes, more than $MAX_PACKAGED_BYTES"
        fi
    done <"$LOGS/package.log"
}

# No adapter can be found here and a test may not do without: one that needs a GPU shows that it is in the wrong list.
stage_free() {
    local target
    local -x VK_DRIVER_FILES=/none VK_ICD_FILENAMES=/none WGPU_BACKEND=vulkan WGPU_ATTENTION_REQUIRE_GPU=1
    cargo_test lib 1 --lib
    cargo_test bins 0 --bins
    cargo_test doctest 0 --doc
    # With the whole workspace, so that cargo takes the same features, and what was built for the others serves.
    cargo_test isa 1 --workspace --bin isa
    for target in "${GPU_FREE_TESTS[@]}"; do
        cargo_test "free-$target" 1 --test "$target"
    done
}

# gpu_tests ADAPTER [TARGET...]: every GPU test and every example, and these targets, with the adapter that the
# environment names.
gpu_tests() {
    local adapter=$1 target example
    shift
    local -x WGPU_ATTENTION_REQUIRE_GPU=1
    if ((${#GPU_TESTS[@]} == 0)); then
        fail "$adapter: GPU_TESTS is empty"
    fi
    for target in "${GPU_TESTS[@]}" "$@"; do
        cargo_test "$adapter-$target" 1 --test "$target"
    done
    # They check what they show, and fail where it is not so.
    for example in examples/*.rs; do
        example=$(basename "$example" .rs)
        check "$adapter-example-$example" cargo run --quiet --all-features --example "$example" || true
    done
    # That the benches run, by one case once: nothing is timed here.
    check "$adapter-bench-kernels" cargo test --quiet --all-features --bench kernels -- --test layer-causal-b5-t6 || true
}

# vulkan_tests ADAPTER NAME ICD [TARGET...]: with the one driver of this file. Older loaders know it by the second variable.
vulkan_tests() {
    local -x VK_DRIVER_FILES=$3 VK_ICD_FILENAMES=$3 WGPU_BACKEND=vulkan WGPU_ADAPTER_NAME=$2
    if [[ -z $3 ]]; then
        fail "$1: its Vulkan driver (a file *_icd*.json) is not installed"
        return
    fi
    gpu_tests "$1" "${@:4}"
}

# The fastest adapter draws the most random problems.
stage_lavapipe() {
    local -x WGPU_ATTENTION_CASES=600
    vulkan_tests lavapipe llvmpipe "$(lavapipe_icd || true)" "${FASTER_ADAPTER_TESTS[@]}" "${ONE_ADAPTER_TESTS[@]}"
}

# The checks of all attention are run on the kernels for few queries by the fastest adapter; the others run tests/decode.rs. It also
# compiles every configuration, the others some of them: WGPU_ATTENTION_CONFIGURATIONS, in tests/support/check.rs.
stage_swiftshader() {
    local icd
    local -x WGPU_ATTENTION_DECODE_KERNELS=decode WGPU_ATTENTION_CONFIGURATIONS=few WGPU_ATTENTION_CASES=50
    icd=$(swiftshader_icd || true)
    vulkan_tests swiftshader SwiftShader "$icd"
    local -x VK_DRIVER_FILES=$icd VK_ICD_FILENAMES=$icd WGPU_BACKEND=vulkan WGPU_ADAPTER_NAME=SwiftShader
    local -x WGPU_ATTENTION_REQUIRE_GPU=1
    chosen_test swiftshader-barriers mutants missing_barriers_are_rejected
    chosen_test swiftshader-program-verify program verify_passes_the_golden_cases_in_both_forms
    chosen_test swiftshader-program-bare program the_bare_command_runs_a_real_layer_and_says_how_right_it_is
}

stage_gl() {
    local -x VK_DRIVER_FILES=/none VK_ICD_FILENAMES=/none WGPU_BACKEND=gl WGPU_ADAPTER_NAME=llvmpipe
    local -x WGPU_ATTENTION_DECODE_KERNELS=decode WGPU_ATTENTION_CONFIGURATIONS=few WGPU_ATTENTION_CASES=100
    gpu_tests gl "${FASTER_ADAPTER_TESTS[@]}"
}

# The compiler runs without a GPU, and nothing else does.
stage_isa() {
    check isa-registers scripts/isa.sh --check || true
}

# ---------------------------------------------------------------- all of it

run_stage() {
    local stage=$1 before=${#failures[@]} start=$SECONDS outcome=passed
    note "stage $stage"
    "stage_$stage"
    if ((${#failures[@]} > before)); then
        outcome=FAILED
    fi
    printf -v stage '%-12s %s after %d s' "$stage" "$outcome" $((SECONDS - start))
    summary+=("$stage")
    note "$stage"
}

# run_beside STAGE: run_stage in the background; what it printed, and what it knows at its end, go into files.
run_beside() {
    local stage=$1 files=$LOGS/stage-$1
    rm -f "$files".*
    note "stage $stage starts; its output: $files.out"
    # With job control the stage has a process group of its own, which can be ended as a whole, and does not ignore Ctrl-C.
    set -m
    (
        set +m
        trap - EXIT INT TERM
        failures=() summary=()
        run_stage "$stage"
        printf '%s\n' "${failures[@]}" >"$files.failures"
        printf '%s\n' "${summary[@]}" >"$files.summary"
        ((${#failures[@]} == 0))
    ) >"$files.out" 2>&1 </dev/null &
    set +m
    beside[$stage]=$!
}

# collect STAGE: waits for a stage in the background, shows its output and takes over what failed in it.
collect() {
    local stage=$1 files=$LOGS/stage-$1 status=0 lines
    wait "${beside[$stage]}" || status=$?
    # (Where it was killed, what it started may go on.)
    kill -TERM -- "-${beside[$stage]}" 2>/dev/null || true
    unset "beside[$stage]"
    cat "$files.out"
    mapfile -t lines < <(sed '/^$/d' "$files.failures" 2>/dev/null)
    failures+=("${lines[@]}")
    # Both files are written last: without them it did not come to its end. With a failure its status is not 0, nor without.
    if [[ ! -s $files.failures || ! -s $files.summary ]] || ((status != 0 && ${#lines[@]} == 0)); then
        fail "stage $stage ended early, with status $status"
    fi
    mapfile -t lines < <(sed '/^$/d' "$files.summary" 2>/dev/null)
    summary+=("${lines[@]}")
}

# run_all_beside STAGE...: these stages in the background, AT_ONCE at a time.
run_all_beside() {
    local stage waiting=("$@")
    while ((${#waiting[@]} + ${#beside[@]} > 0)); do
        while ((${#waiting[@]} > 0 && ${#beside[@]} < AT_ONCE)); do
            run_beside "${waiting[0]}"
            waiting=("${waiting[@]:1}")
        done
        sleep 1
        for stage in "${!beside[@]}"; do
            kill -0 "${beside[$stage]}" 2>/dev/null || collect "$stage"
        done
    done
}

# However this script ends, nothing that it started goes on.
clean_up() {
    local group
    for group in "${beside[@]}" $(jobs -p); do
        kill -TERM -- "-$group" 2>/dev/null || true
    done
    wait
    if [[ -n $own_runtime_dir ]]; then
        rm -rf "$own_runtime_dir"
    fi
}

main() {
    local stage partial=no wanted=("$@") chosen=()
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    if ((${#wanted[@]} == 0)); then
        wanted=("${STAGES[@]}")
    fi
    for stage in "${wanted[@]}"; do
        if [[ " ${STAGES[*]} " != *" $stage "* ]]; then
            printf 'no stage %q; the stages are: %s\n' "$stage" "${STAGES[*]}" >&2
            exit 2
        fi
    done
    mkdir -p "$LOGS"
    exec {screen}>&1
    if [[ -z ${XDG_RUNTIME_DIR:-} ]]; then
        own_runtime_dir=$(mktemp -d)
        export XDG_RUNTIME_DIR=$own_runtime_dir
    fi
    trap clean_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    install_rust_parts
    install_drivers "${wanted[@]}"
    for stage in "${STAGES[@]}"; do
        if [[ " ${wanted[*]} " == *" $stage "* && " ${BESIDE[*]} " != *" $stage "* ]]; then
            run_stage "$stage"
        fi
    done
    for stage in "${BESIDE[@]}"; do
        if [[ " ${wanted[*]} " == *" $stage "* ]]; then
            chosen+=("$stage")
        fi
    done
    if ((${#chosen[@]} == 1)); then
        run_stage "${chosen[0]}"
    elif ((${#chosen[@]} > 1)); then
        # So that none of them waits while another builds.
        check build cargo test --all-features --workspace --no-run --tests --examples --benches || true
        run_all_beside "${chosen[@]}"
    fi

    note summary
    printf '%s\n' "${summary[@]}" "whole run    $SECONDS s"
    if ((${#failures[@]} > 0)); then
        printf 'FAILED: %s\n' "${failures[@]}"
        exit 1
    fi
    for stage in "${STAGES[@]}"; do
        if [[ " ${wanted[*]} " != *" $stage "* ]]; then
            partial=yes
            echo "PARTIAL: stage $stage did not run"
        fi
    done
    if [[ $partial == yes ]]; then
        echo "what ran passed"
    else
        echo "all passed"
    fi
}

# Sourced, it only defines its functions.
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    main "$@"
fi

#!/usr/bin/env bash
# One run on a machine with a GPU, which needs no Rust: are the kernels right there, and how fast are they?
#
#   scripts/gpu-check.sh [FOLDER]        writes what it finds to FOLDER (a new one, gpu-check-DATE, without it)
#   scripts/gpu-check.sh --pack FILE     puts program, cases and scripts into FILE (.tar.gz), to be carried to that machine
#
# The program is WGPU_ATTENTION, or `wgpu-attention` beside this script, or target/release/wgpu-attention; the golden cases
# are WGPU_ATTENTION_CASES, or `cases` beside this script, or tests/cases. WGPU_BACKEND and WGPU_ADAPTER_NAME choose the adapter.
# Where PYTHON (python3) has PyTorch and a GPU that it can use, its scaled_dot_product_attention is timed on the same shapes.
#
# Four minutes at most on a GPU: each part has a limit of its own. The status is 0 only if every part that could run did, and nothing
# is wrong: nothing is timed before all golden cases are right.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3}

# Seconds of each part: together less than four minutes. An adapter that is a CPU has four times as long for each.
INFO_S=10 VERIFY_S=80 QUALIFY_S=10 TUNE_S=12 BENCH_S=60 FIND_TORCH_S=10 TORCH_S=25 TABLE_S=5
PATIENCE=1

failures=() # what went wrong, in words
notes=()    # what is lacking here, in words

note() { printf '\n== %s\n' "$*"; }

fail() {
    printf 'FAILED: %s\n' "$*" >&2
    failures+=("$*")
}

# first_there PATH...: the first that exists.
first_there() {
    local path
    for path in "$@"; do
        if [[ -n $path && -e $path ]]; then
            printf '%s\n' "$path"
            return
        fi
    done
    return 1
}

# limited SECONDS COMMAND...: runs it, and ends it after that long with status 124. (Not every system has `timeout`.)
limited() {
    local seconds=$1 watched watcher status=0
    shift
    if command -v timeout >/dev/null; then
        # In the foreground: an interrupt reaches the command.
        timeout --foreground --kill-after=5 "$seconds" "$@" || status=$?
        return "$status"
    fi
    "$@" &
    watched=$!
    # Not with this script's output: whoever reads that would wait for the sleep.
    (sleep "$seconds" && kill "$watched") >/dev/null 2>&1 &
    watcher=$!
    wait "$watched" || status=$?
    # The watcher is still there unless it has done its work.
    if ! kill "$watcher" 2>/dev/null; then
        status=124
    fi
    wait "$watcher" 2>/dev/null || true
    return "$status"
}

# part NAME SECONDS COMMAND...: one part, its output on the screen and in a file of FOLDER.
part() {
    local name=$1 seconds=$(($2 * PATIENCE)) status=0
    shift 2
    note "$name: $*"
    limited "$seconds" "$@" 2>&1 | tee "$FOLDER/$name.txt" || status=${PIPESTATUS[0]}
    case $status in
    0) return 0 ;;
    124 | 137) fail "$name did not end within $seconds s; what it had is in $FOLDER" ;;
    *) fail "$name: status $status" ;;
    esac
    return 1
}

# has SUBCOMMAND: whether the program has it.
has() { "$PROGRAM" --help | grep -Eq "^  $1( |\$)"; }

find_parts() {
    local named
    for named in WGPU_ATTENTION WGPU_ATTENTION_CASES; do
        if [[ -n ${!named:-} && ! -e ${!named} ]]; then
            echo "$named=${!named}: there is no such file or folder" >&2
            exit 2
        fi
    done
    if ! PROGRAM=$(first_there "${WGPU_ATTENTION:-}" "$HERE/wgpu-attention" "$HERE/../target/release/wgpu-attention"); then
        echo "no program: build it with cargo build --release, or name it in WGPU_ATTENTION" >&2
        exit 2
    fi
    if ! CASES=$(first_there "${WGPU_ATTENTION_CASES:-}" "$HERE/cases" "$HERE/../tests/cases"); then
        echo "no golden cases: name their folder in WGPU_ATTENTION_CASES" >&2
        exit 2
    fi
}

pack() {
    local file=$1 folder
    if [[ -e $file || -L $file ]]; then
        echo "$file: it is there already; remove it, or name another" >&2
        exit 2
    fi
    folder=$(mktemp -d)
    # shellcheck disable=SC2064 # the name as it is now
    trap "rm -rf '$folder'" EXIT
    mkdir "$folder/gpu-check"
    cp "$PROGRAM" "$folder/gpu-check/wgpu-attention"
    cp -r "$CASES" "$folder/gpu-check/cases"
    cp "$HERE/gpu-check.sh" "$HERE/torch_sdpa.py" "$folder/gpu-check/"
    if ! tar -C "$folder" -czf "$file" gpu-check; then
        echo "$file: it could not be written" >&2
        exit 2
    fi
    echo "$file: unpack it there and run gpu-check/gpu-check.sh"
}

# torch_there: whether PyTorch is there with a GPU that it can use (CUDA, or ROCm under the same name).
torch_there() {
    command -v "$PYTHON" >/dev/null || return 1
    limited "$FIND_TORCH_S" "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' >/dev/null 2>&1
}

main() {
    local bench=(bench --save) kind torch=() measured=no tokens
    if [[ ${1:-} == --pack && $# -eq 2 ]]; then
        find_parts
        pack "$2"
        return
    fi
    if [[ ${1:-} == -* || $# -gt 1 ]]; then
        sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        [[ ${1:-} == --help && $# -eq 1 ]] && exit 0
        exit 2
    fi
    find_parts
    FOLDER=${1:-gpu-check-$(date -u +%Y%m%dT%H%M%SZ)}
    # What an earlier run found stays: a new run is a new folder.
    if [[ -e $FOLDER && ! -d $FOLDER ]] || [[ -n $(ls -A "$FOLDER" 2>/dev/null) ]]; then
        echo "$FOLDER: it is there and not an empty folder; name a new one" >&2
        exit 2
    fi
    mkdir -p "$FOLDER"
    trap 'echo "interrupted: what was found so far is in $FOLDER" >&2; exit 130' INT TERM
    bench+=("$FOLDER/bench.json" --force)
    if ! "$PROGRAM" --version; then
        echo "$PROGRAM does not run here" >&2
        exit 2
    fi

    part info "$INFO_S" "$PROGRAM" info || true
    # The first adapter is the one that is taken.
    kind=$(awk '$1 == "type" { $1 = ""; print; exit }' "$FOLDER/info.txt")
    if [[ $kind == *CPU* ]]; then
        notes+=("the adapter is a CPU underneath: the quick set alone is measured, and nothing here says how fast a GPU is")
        bench+=(--quick)
        PATIENCE=4
    fi

    if ! part verify "$VERIFY_S" "$PROGRAM" verify "$CASES"; then
        note "not every golden case was found right, so nothing is timed"
        finish
        return
    fi
    if has qualify; then
        part qualify "$QUALIFY_S" "$PROGRAM" qualify || true
    else
        notes+=("this program has no \`qualify\`: no tier beyond the portable one was tried")
    fi
    if has tune; then
        # (What was found before a limit is kept.)
        for tokens in 128 1024; do
            part "tune-$tokens" "$TUNE_S" "$PROGRAM" tune --tokens "$tokens" --seconds 1 --file "$FOLDER/tuning.json" || true
        done
        [[ -s $FOLDER/tuning.json ]] && bench+=(--tuning "$FOLDER/tuning.json")
    else
        notes+=("this program has no \`tune\`: the planner's choices were measured")
    fi
    if has bench; then
        part bench "$BENCH_S" "$PROGRAM" "${bench[@]}" || true
        [[ -s $FOLDER/bench.json ]] && measured=yes
    else
        fail "this program has no \`bench\`: nothing was timed"
    fi

    if [[ $measured == yes ]] && has report; then
        part report "$TABLE_S" "$PROGRAM" report "$FOLDER/bench.json" -o "$FOLDER/report.html" || true
    fi

    if [[ $measured == yes ]] && torch_there; then
        torch=("$FOLDER/torch.json")
        part torch $((TORCH_S + 10)) "$PYTHON" "$HERE/torch_sdpa.py" "$FOLDER/bench.json" "${torch[0]}" --seconds "$TORCH_S" || torch=()
    else
        notes+=("no $PYTHON with PyTorch and a GPU that it can use: nothing to compare with")
    fi
    # (A name alone is no Python: some systems keep a stub there.)
    if [[ $measured == yes ]] && limited "$TABLE_S" "$PYTHON" -c '' >/dev/null 2>&1; then
        part table "$TABLE_S" "$PYTHON" "$HERE/torch_sdpa.py" --table "$FOLDER/bench.json" ${torch[@]+"${torch[@]}"} || true
    fi
    finish
}

finish() {
    note "summary, $SECONDS s"
    if ((${#notes[@]})); then
        printf '%s\n' "${notes[@]}"
    fi
    echo "everything is in $FOLDER"
    if ((${#failures[@]})); then
        printf 'FAILED: %s\n' "${failures[@]}"
        exit 1
    fi
    echo "nothing is wrong"
}

main "$@"

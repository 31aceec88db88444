#!/usr/bin/env bash
# Builds the CPU benchmark for an Android device, runs it there and brings back rows of JSON.
set -euo pipefail

readonly NAME=run_on_device
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly ROOT
readonly SOURCE=$ROOT/packages/fdk-cpu
readonly REMOTE=/data/local/tmp/fdk-bench.$$  # a shell may run programs only from there

usage() {
    cat <<'TEXT'
usage: tools/run_on_device.sh [options] [-- benchmark arguments]

Builds fdk_cpu_bench, pushes it with adb, runs it, pulls its result and cleans up on the device.

  --serial ID     the device, as `adb devices` lists it (default: the only one)
  --abi ABI       arm64-v8a or x86_64 (default: the device's own)
  --output FILE   the file for the rows (default: out/bench/device-<model>.jsonl)
  --build-dir DIR the build folder (default: packages/fdk-cpu/build)
  --dry-run       print the commands without running them
  --help          this text

docs/guide/android.md lists the benchmark arguments, such as
`--sizes 4096 --bits 4,1 --threads 1,4 --cores f0 --isa all`. --cores is a mask in hexadecimal: f0 is
cores 4 to 7; --activations int8 rounds x to 8 bits.

The compiler comes from the NDK in ANDROID_NDK_HOME, else in ANDROID_NDK_ROOT, else the newest below
ANDROID_HOME, ANDROID_SDK_ROOT, ~/Android/Sdk or ~/Library/Android/sdk. Without an NDK, Debian's
cross-compiler builds a static executable, which Android runs as well
(apt-get install g++-aarch64-linux-gnu).
TEXT
}

fail() {
    echo "$NAME: $*" >&2
    exit 1
}

serial="" abi="" output="" build_dir=$SOURCE/build dry_run=false
arguments=()

parse() {
    while (($#)); do
        case $1 in
            --help | -h) usage && exit 0 ;;
            --dry-run) dry_run=true ;;
            --serial | --abi | --output | --build-dir)
                (($# > 1)) || fail "$1 needs a value (--help)"
                local name=${1#--}
                printf -v "${name//-/_}" '%s' "$2"
                shift
                ;;
            --)
                shift
                arguments=("$@")
                return
                ;;
            *) fail "unknown option $1; benchmark arguments come after -- (--help)" ;;
        esac
        shift
    done
}

# Prints a command and runs it, unless this is a dry run.
run() {
    printf '+%s\n' "$(printf ' %q' "$@")" >&2
    $dry_run || "$@"
}

adb_device() {
    run adb ${serial:+-s "$serial"} "$@"
}

# Prints the output of a command on the device; old versions of adb add carriage returns.
ask() {
    adb ${serial:+-s "$serial"} shell "$@" </dev/null | tr -d '\r'
}

# --- the device ---------------------------------------------------------------------------------

# Sets serial to the only device, or checks the given one.
choose_device() {
    command -v adb >/dev/null ||
        fail "needs adb on PATH: install Android's platform-tools (Debian: apt-get install adb)"
    local listed state
    listed=$(adb devices | awk '/^List of devices/ {on = 1; next} on && NF >= 2 {print $1, $2}')
    if [[ -z $serial ]]; then
        [[ -n $listed ]] ||
            fail "no device: connect one with USB debugging on, or \`adb connect HOST:PORT\`"
        (($(wc -l <<<"$listed") == 1)) ||
            fail "several devices, choose one with --serial:"$'\n'"$listed"
        serial=${listed%% *}
    fi
    state=$(awk -v id="$serial" '$1 == id {print $2}' <<<"$listed")
    case $state in
        device) ;;
        "") fail "no device $serial; connected: ${listed:-none}" ;;
        unauthorized) fail "device $serial: accept this computer's key on its screen, then try again" ;;
        *) fail "device $serial is $state, not ready" ;;
    esac
}

choose_abi() {
    local offered
    offered=$(ask getprop ro.product.cpu.abilist)
    [[ -n $abi ]] || abi=${offered%%,*}
    [[ ,$offered, == *,$abi,* ]] || fail "device $serial supports $offered, not $abi"
}

# --- the build ----------------------------------------------------------------------------------

is_ndk() {
    [[ -f $1/build/cmake/android.toolchain.cmake ]]
}

# Prints the folder of an NDK, or nothing.
find_ndk() {
    local name folder sdk
    for name in ANDROID_NDK_HOME ANDROID_NDK_ROOT; do
        folder=${!name:-}
        [[ -n $folder ]] || continue
        is_ndk "$folder" ||
            fail "$name=$folder is not an NDK: it has no build/cmake/android.toolchain.cmake"
        echo "$folder"
        return
    done
    for sdk in "${ANDROID_HOME:-}" "${ANDROID_SDK_ROOT:-}" ~/Android/Sdk ~/Library/Android/sdk; do
        [[ -d $sdk/ndk ]] || continue
        while read -r folder; do
            if is_ndk "$folder"; then
                echo "$folder"
                return
            fi
        done < <(printf '%s\n' "$sdk"/ndk/* | sort -rV)
    done
}

# Builds the benchmark and sets binary to it.
build() {
    local target ndk preset compiler debian
    case $abi in
        arm64-v8a) target=arm64 compiler=aarch64-linux-gnu-g++ ;;
        x86_64) target=x86_64 compiler=x86_64-linux-gnu-g++ ;;
        *) fail "there are kernels for arm64-v8a and x86_64, not for ${abi:-an unknown ABI}" ;;
    esac
    command -v cmake >/dev/null || fail "needs cmake 3.21 or later (pip install cmake)"
    ndk=$(find_ndk)
    if [[ -n $ndk ]]; then
        preset=android-$target
        export ANDROID_NDK_HOME=$ndk
        echo "$NAME: NDK $ndk" >&2
    else
        preset=static-$target
        debian=g++-${compiler%-g++}
        debian=${debian//_/-}  # package names have x86-64
        $dry_run || command -v "$compiler" >/dev/null ||
            fail "no compiler for $abi: set ANDROID_NDK_HOME to an NDK, or install $compiler" \
                "(Debian: apt-get install $debian)"
        echo "$NAME: no NDK found, building a static executable with $compiler" >&2
    fi
    local folder=$build_dir/$preset${ndk:+-$(basename "$ndk")}
    run cmake -S "$SOURCE" --preset "$preset" -B "$folder" >&2
    run cmake --build "$folder" --target fdk_cpu_bench --parallel >&2
    binary=$folder/fdk_cpu_bench
}

# --- the run ------------------------------------------------------------------------------------

clean_up() {
    adb_device shell "rm -rf $REMOTE" </dev/null || echo "$NAME: could not remove $REMOTE" >&2
}

measure() {
    local model=model commit words
    if ! $dry_run; then
        model=$(ask getprop ro.product.model)
    fi
    commit=$(git -C "$ROOT" describe --always --dirty --abbrev=40 --exclude='*' 2>/dev/null || true)
    : "${output:=$ROOT/out/bench/device-${model//[^[:alnum:].-]/_}.jsonl}"
    # The device's shell receives one string, so the words are quoted.
    arguments+=(--device "$model" --commit "$commit" --out "$REMOTE/result.jsonl")
    words=$(printf ' %q' "${arguments[@]}")
    trap clean_up EXIT
    adb_device shell "mkdir -p $REMOTE" </dev/null
    adb_device push "$binary" "$REMOTE/fdk_cpu_bench" >&2
    adb_device shell "chmod 755 $REMOTE/fdk_cpu_bench" </dev/null
    local status=0
    adb_device shell "$REMOTE/fdk_cpu_bench$words" </dev/null || status=$?
    # Status 1: a case failed, and its row says why. With any other status there are no rows.
    ((status <= 1)) || fail "the benchmark ended with status $status on the device"
    run mkdir -p "$(dirname "$output")"
    adb_device pull "$REMOTE/result.jsonl" "$output" >&2
    $dry_run || echo "$NAME: $(wc -l <"$output") rows in $output"
    return "$status"
}

main() {
    parse "$@"
    if $dry_run; then
        : "${abi:=arm64-v8a}"
    else
        choose_device
        choose_abi
    fi
    build
    measure
}

main "$@"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that shows the CUDA backend to be right and fast, on a machine with a GPU: builds,
# verifies every kernel, runs compute-sanitizer, measures beside PyTorch, and prints one table in
# Markdown. Exit code 0: nothing failed.
#
# usage: gpu-check.sh [--quick | --full] [--without STEP,...] [--only STEP,...] [--results DIR]
#   STEP: verify, sanitizer, bench, peers
#
# The build needs cmake, ninja, a C compiler and cJSON; NYBBLE_DEPENDENCIES names a folder with
# include/cjson/cJSON.h and lib/libcjson.so where the system has none. Results go to DIR, to $OUT
# where that is set, else to build-gpu/results.
set -uo pipefail
script=$(realpath "$0")
cd "$(dirname "$script")/.." || exit 1

# It calls itself: gpu-check.sh --verify-part DEPTH FORMAT OPERATION.
part=()
if [ "${1-}" = --verify-part ]; then
  part=("${@:2}")
  set --
fi

depth=--quick
steps=verify,sanitizer,bench,peers
results=${OUT:-build-gpu/results}
while [ $# -gt 0 ]; do
  case $1 in
    --quick) depth=--quick ;;
    --full) depth= ;;
    --only)
      steps=$2
      shift
      ;;
    --without)
      for step in ${2//,/ }; do steps=${steps//$step/}; done
      shift
      ;;
    --results)
      results=$2
      shift
      ;;
    *)
      echo "gpu-check.sh: unknown argument \"$1\"" >&2
      exit 2
      ;;
  esac
  shift
done
wanted() { [[ ,$steps, == *,$1,* ]]; }
begin=$SECONDS
say() { printf '== %3d s: %s\n' $((SECONDS - begin)) "$*"; }

mkdir -p "$results" build-gpu
results=$(cd "$results" && pwd)
work=$(cd build-gpu && pwd)
nybble=$work/nybble
# A cache of its own, so that nothing compiled by another version is measured.
export NYBBLE_CACHE_DIR=${NYBBLE_CACHE_DIR:-$work/kernel-cache}

verify_part() {
  local log=$work/verify-$2-$3
  timeout 900 "$nybble" verify --backend cuda ${1:+"$1"} --format "$2" --operation "$3" --json \
    >"$log.json" 2>"$log.log" || echo "verify $2 $3: exit code $?: $(head -c 300 "$log.log")"
}
if [ ${#part[@]} -gt 0 ]; then
  verify_part "${part[@]}"
  exit
fi

# ---- Build ----------------------------------------------------------------------------------------
say "building"
if ! {
  cmake -S . -B "$work" -G Ninja -DCMAKE_BUILD_TYPE=Release -DNYBBLE_BUILD_TESTS=OFF \
    ${NYBBLE_DEPENDENCIES:+-DCMAKE_PREFIX_PATH="$NYBBLE_DEPENDENCIES"} &&
    cmake --build "$work" --target nybble_command
} >"$work/build.log" 2>&1; then
  tail -30 "$work/build.log"
  exit 1
fi
"$nybble" info | grep -iE 'cuda|device|nvrtc|driver|cache|gpu' | head -20
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv,noheader || true

# ---- Verify: one process for each stored format and operation, since compiling takes the time -----
formats="plain_f32 plain_f16 plain_bf16 affine2 affine3 affine4 affine5 affine6 affine8"
verify_all() {
  local format operation
  rm -f "$work"/verify-*.json
  for format in $formats; do
    for operation in attention quantize geglu append; do
      [[ $operation == geglu && $format == affine* ]] && continue
      printf '%s %s\n' "$format" "$operation"
    done
  done | xargs -P "$(nproc)" -L 1 "$script" --verify-part "$depth"
}
# ---- compute-sanitizer, on a few cases, beside it ---------------------------------------------------
sanitize() {
  local tool=$1 limit=$2
  timeout "$limit" compute-sanitizer --tool "$tool" --error-exitcode 9 \
    --log-file "$results/sanitizer-$tool.log" \
    "$nybble" verify --backend cuda --sanitizer --json >"$work/sanitizer-$tool.json" \
    2>"$work/sanitizer-$tool.err"
  echo $? >"$work/sanitizer-$tool.status"
}
if wanted sanitizer; then
  rm -f "$work"/sanitizer-*
  limit=200
  [ "$depth" = --quick ] || limit=500
  if command -v compute-sanitizer >/dev/null; then
    say "compute-sanitizer"
    for tool in memcheck racecheck initcheck; do sanitize $tool $limit & done
  else
    echo "compute-sanitizer is not installed"
  fi
fi
if wanted verify; then
  say "verifying"
  verify_all
fi
wait

# ---- Benchmarks, alone on the card ---------------------------------------------------------------------
measure() {
  local name=$1
  shift
  say "bench $name"
  "$nybble" bench "$@" --backend cuda --json >"$work/bench-$name.json" 2>"$work/bench-$name.err" ||
    echo "bench $name: $(head -c 400 "$work/bench-$name.err")"
}
if wanted bench; then
  rm -f "$work"/bench-*
  # A shape at a time: one that fails leaves the others their figures.
  index=0
  while read -r shape; do
    index=$((index + 1))
    measure "attention-$index" attention --shape "$shape" --bits 4,8 --seconds 0.15
  done < <(sed 's/#.*//' bench/shapes/attention-gpu.txt | grep -E '[0-9]')
  measure prefill attention --shape 1,32,8,128,32768 --query-len 2048 --bits 4,8 --seconds 0.2
  measure append append --shapes bench/shapes/append.txt --bits 4,8 --seconds 0.1
  measure geglu geglu --elements 134217728 --seconds 0.2
  measure quantize quantize --shape 65536,128 --bits 4,8 --seconds 0.1
  for tokens in 8192 131072; do
    measure "features-$tokens" features --shape "1,32,8,128,$tokens" --seconds 0.1
  done
fi

# ---- Peers -----------------------------------------------------------------------------------------------
if wanted peers; then
  say "PyTorch"
  compile=
  [ "$depth" = --quick ] || compile=--compile
  timeout 240 python3 bench/peers/torch_sdpa.py --shapes bench/shapes/attention-gpu.txt \
    --prefill 2048:1,32,8,128,32768 --geglu 134217728 $compile --json "$work/torch.json" \
    2>"$work/torch.err" || echo "torch_sdpa.py: $(tail -c 600 "$work/torch.err")"
fi

# ---- The table -------------------------------------------------------------------------------------------
say "done"
python3 scripts/gpu_report.py --work "$work" --json "$results/gpu-check.json" |
  tee "$results/gpu-check.md"
exit "${PIPESTATUS[0]}"

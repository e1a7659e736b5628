#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the checks for AArch64 and runs them under qemu: emulate_neon.sh [BUILD_FOLDER]. Exits 77
# where the cross compiler or the emulator is missing.
set -eu
source_folder=$(cd "$(dirname "$0")/.." && pwd)
build_folder=${1:-"$source_folder/build-aarch64"}
for tool in aarch64-linux-gnu-gcc qemu-aarch64; do
  if ! command -v "$tool" > /dev/null; then
    echo "skipped: no $tool; apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
    exit 77
  fi
done
cmake -S "$source_folder" -B "$build_folder" \
  -DCMAKE_TOOLCHAIN_FILE="$source_folder/cmake/aarch64-linux-gnu.cmake" \
  -DNYBBLE_BUILD_TESTS=OFF -DNYBBLE_BUILD_COMMAND=OFF
cmake --build "$build_folder" --target nybble_emulated
qemu-aarch64 "$build_folder/nybble_emulated"

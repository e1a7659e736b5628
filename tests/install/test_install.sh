#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs a build into an empty folder, moves that folder, builds examples/attend.c against it by
# find_package and by pkg-config, shared and static, and runs the four programs.
# usage: test_install.sh CMAKE BUILD_FOLDER C_COMPILER LIBDIR
set -eu
cmake=$1 build=$2 compiler=$3 libdir=$4
source=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if ! command -v pkg-config > /dev/null; then
  echo "skipped: no pkg-config"
  exit 77
fi

"$cmake" --install "$build" --prefix "$work/staged" > "$work/log" || { cat "$work/log"; exit 1; }
mv "$work/staged" "$work/prefix"
prefix=$work/prefix

if grep -rlE "$work|$build|$source" "$prefix/$libdir/cmake" "$prefix/$libdir/pkgconfig"; then
  echo "failed: these files name a folder of this machine"
  exit 1
fi

build_consumer() {
  "$cmake" -S "$source/tests/install" -B "$work/consumer" "-DCMAKE_PREFIX_PATH=$prefix" \
    "-DCMAKE_C_COMPILER=$compiler" && "$cmake" --build "$work/consumer"
}
if ! build_consumer > "$work/log" 2>&1; then
  cat "$work/log"
  exit 1
fi

PKG_CONFIG_PATH=$prefix/$libdir/pkgconfig
export PKG_CONFIG_PATH
# The words of pkg-config are options of the compiler: they must be split.
# shellcheck disable=SC2046
"$compiler" -std=c17 "$source/examples/attend.c" -o "$work/attend_pc_shared" \
  $(pkg-config --cflags --libs nybble) -lm
# With both libraries in one folder, only the file's own name asks for the static one.
# shellcheck disable=SC2046
"$compiler" -std=c17 "$source/examples/attend.c" -o "$work/attend_pc_static" \
  $(pkg-config --static --cflags --libs nybble | sed 's/-lnybble/-l:libnybble.a/') -lm

LD_LIBRARY_PATH=$prefix/$libdir
export LD_LIBRARY_PATH
# The C compiler's own family, by the name that it has for C++.
case $(basename "$compiler") in
  *clang*) cxx=clang++ ;;
  *) cxx=g++ ;;
esac
if command -v "$cxx" > /dev/null; then
  for standard in c++11 c++17 c++20; do
    # shellcheck disable=SC2046
    "$cxx" "-std=$standard" -Wall -Wextra -pedantic -Wconversion -Werror \
      "$source/tests/install/header.cpp" -o "$work/header_cpp" $(pkg-config --cflags --libs nybble)
    "$work/header_cpp"
    echo "header.cpp: compiles and runs as $standard"
  done
else
  echo "header.cpp: not compiled: no $cxx"
fi
expected=
for program in "$work/consumer/attend_nybble" "$work/consumer/attend_nybble_static" \
  "$work/attend_pc_shared" "$work/attend_pc_static"; do
  result=$("$program")
  echo "$(basename "$program"): $result"
  : "${expected:=$result}"
  if [ "$result" != "$expected" ]; then
    echo "failed: the programs differ"
    exit 1
  fi
done
for program in "$work/consumer/attend_nybble_static" "$work/attend_pc_static"; do
  if ldd "$program" | grep libnybble; then
    echo "failed: $(basename "$program") is not static"
    exit 1
  fi
done

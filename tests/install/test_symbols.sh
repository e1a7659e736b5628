#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The shared library exports what include/nybble.h declares, no more and no less, and needs nothing
# at run time but libc, libm and threads. usage: test_symbols.sh NM READELF LIBRARY
set -eu
nm=$1 readelf=$2 library=$3
header=$(cd "$(dirname "$0")/../.." && pwd)/include/nybble.h
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

tr '\n' ' ' < "$header" | grep -oE 'NYB_API [^;()]*\(' | grep -oE 'nyb_[a-z0-9_]+ *\($' |
  tr -d ' (' | sort > "$work/declared"
"$nm" -D --defined-only "$library" | awk '{print $NF}' | sort > "$work/exported"
if [ ! -s "$work/declared" ]; then
  echo "failed: no declaration found in $header"
  exit 1
fi
if ! diff "$work/declared" "$work/exported"; then
  echo "failed: < is declared only, > is exported only"
  exit 1
fi
echo "exported, as declared: $(wc -l < "$work/exported") functions"

"$readelf" -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' > "$work/needed"
if grep -vE '^(libc|libm|libpthread|libpthreadpool|ld-linux-[a-z0-9_-]+)\.so' "$work/needed"; then
  echo "failed: the library needs these at run time"
  exit 1
fi
"$readelf" -d "$library" | grep -q 'SONAME.*\[libnybble\.so\.[0-9]*\]' || {
  echo "failed: no versioned soname"
  exit 1
}
echo "needed at run time: $(tr '\n' ' ' < "$work/needed")"

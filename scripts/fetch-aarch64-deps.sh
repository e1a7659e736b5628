#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Fills .deps/aarch64 with the arm64 builds of the libraries that the tests need, so that all tests
# run under qemu. They are unpacked there, not installed: the machine's own packages stay as they
# are. Exits 1 where this machine's package sources have no arm64; then only the checks run there.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
deps=$root/.deps/aarch64
packages="libcmocka0 libcmocka-dev libcjson1 libcjson-dev libpthreadpool0 libpthreadpool-dev"
[ ! -e "$deps/.complete" ] || exit 0

mkdir -p "$root/.deps"
work=$(mktemp -d "$root/.deps/apt.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial" "$work/debs"
: > "$work/state/status"
cat > "$work/apt.conf" <<CONF
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Sandbox::User "";
Acquire::Languages "none";
Dir::State "$work/state";
Dir::State::status "$work/state/status";
Dir::Cache "$work/cache";
CONF
export APT_CONFIG="$work/apt.conf"

# shellcheck disable=SC2086
if ! { apt-get update && cd "$work/debs" && apt-get download $packages; } > "$work/log" 2>&1; then
  tail -n 5 "$work/log" >&2
  exit 1
fi
rm -rf "$deps"
for deb in "$work"/debs/*.deb; do
  dpkg-deb --extract "$deb" "$deps"
done
touch "$deps/.complete"

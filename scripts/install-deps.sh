#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Sees to it that the packages of the named groups are there: build, test, lint, plot, peers.
# With apt and as root it installs what is missing; otherwise it prints the command and exits 1.
# When all is there it takes a fraction of a second and changes nothing.
set -eu

debian_packages() {
  case $1 in
    build)
      echo make cmake ninja-build gcc libc6-dev libcjson-dev libpthreadpool-dev
      ;;
    test)
      debian_packages build
      echo binutils pkg-config libcmocka-dev clang libclang-rt-dev llvm python3 python3-venv
      echo libopenmpi-dev openmpi-bin
      # On AArch64 itself the NEON kernels run without an emulator.
      [ "$(dpkg --print-architecture)" = arm64 ] ||
        echo gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
      ;;
    lint)
      debian_packages test
      echo clang-format clang-tidy shellcheck
      ;;
    plot)
      debian_packages build
      echo python3 python3-venv
      ;;
    peers)
      debian_packages build
      echo g++ python3 python3-pip
      ;;
    *)
      echo "install-deps.sh: no group \"$1\"; there are build, test, lint, plot and peers" >&2
      exit 2
      ;;
  esac
}

[ $# -gt 0 ] || set -- test lint
wanted=
for group in "$@"; do
  # A variable of its own, so that a failure in it ends the script.
  packages=$(debian_packages "$group" 2> /dev/null) || debian_packages "$group" > /dev/null
  wanted="$wanted $packages"
done

if [ "$(uname -s)" = Darwin ]; then
  for tool in cmake ninja; do
    command -v "$tool" > /dev/null && continue
    echo "install-deps.sh: no $tool. docs/building.md has the Homebrew lines." >&2
    exit 1
  done
  exit 0
fi
if ! command -v apt-get > /dev/null; then
  for tool in cmake ninja; do
    command -v "$tool" > /dev/null && continue
    echo "install-deps.sh: no $tool, and no apt-get to install it with." >&2
    echo "docs/building.md lists what is needed; Debian calls it: $wanted" >&2
    exit 1
  done
  exit 0
fi

is_installed() {
  dpkg-query --show --showformat='${db:Status-Status}\n' "$1" 2> /dev/null | grep -qx installed
}

missing=
for package in $wanted; do
  case " $missing " in *" $package "*) continue ;; esac
  is_installed "$package" || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" != 0 ]; then
  echo "These packages are missing. Install them, then try again:" >&2
  echo "  sudo apt-get update && sudo apt-get install --no-install-recommends$missing" >&2
  exit 1
fi
echo "install-deps.sh: installing$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet --quiet
# shellcheck disable=SC2086
apt-get install --quiet --quiet --yes --no-install-recommends $missing < /dev/null

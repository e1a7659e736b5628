#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Formatting, clang-tidy, ruff, shellcheck; all of them, then the verdict.
# usage: lint.sh [--jobs N] [--ruff PROGRAM]
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
jobs=2
ruff=ruff
while [ $# -gt 0 ]; do
  case $1 in
    --jobs) jobs=$2 ;;
    --ruff) ruff=$2 ;;
    *)
      echo "lint.sh: unknown argument \"$1\"" >&2
      exit 2
      ;;
  esac
  shift 2
done

failed=()
step() {
  local name=$1
  shift
  printf '== %s\n' "$name"
  "$@" || failed+=("$name")
}

# Formatting differs between versions of clang-format: the tree follows Debian 12's.
formatter=$(command -v clang-format-14 || command -v clang-format)

check_format() {
  git ls-files '*.c' '*.h' | xargs "$formatter" --dry-run -Werror
}

# The release build's own commands, for all that it compiles.
check_tidy() {
  cmake --preset release -DNYBBLE_BUILD_TESTS=ON > build-lint.log || {
    cat build-lint.log
    return 1
  }
  rm -f build-lint.log
  python3 - <<'LIST' | xargs -P "$jobs" -n 4 clang-tidy -p build --quiet --warnings-as-errors='*' 2>&1 |
import json
files = {entry["file"] for entry in json.load(open("build/compile_commands.json"))}
print(*sorted(file for file in files if "/build/" not in file), sep="\n")  # not what is generated
LIST
    grep -vE '^([0-9]+ warnings? generated\.|Suppressed .*|Use -header-filter.*)$'
  return "${PIPESTATUS[1]}"
}

check_shell() {
  git ls-files '*.sh' .ci/run | xargs shellcheck
}

step clang-format check_format
step clang-tidy check_tidy
step "ruff check" "$ruff" check
step "ruff format" "$ruff" format --check
step shellcheck check_shell

if [ ${#failed[@]} -gt 0 ]; then
  echo "lint: failed: ${failed[*]}"
  exit 1
fi
echo "lint: all clean"

# SPDX-License-Identifier: Apache-2.0
# Cross-compiling for AArch64 Linux with Debian's compiler; tests run under qemu's user mode.
# Libraries come from .deps/aarch64 only, which scripts/fetch-aarch64-deps.sh fills.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)

get_filename_component(nybble_deps ${CMAKE_CURRENT_LIST_DIR}/../.deps/aarch64 ABSOLUTE)
set(CMAKE_FIND_ROOT_PATH ${nybble_deps} /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)

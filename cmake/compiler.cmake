# SPDX-License-Identifier: Apache-2.0
# The language, the warnings and the sanitizers of everything in this tree.

set(CMAKE_C_STANDARD 17)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release)
  endif()
endif()

# The contract fixes where products and sums are fused: the code says fma where it means it.
add_compile_options(-ffp-contract=off -Wall -Wextra -Wundef -Wvla -Wconversion -Wshadow
                    -Wstrict-prototypes -Wmissing-prototypes -Wno-sign-conversion)

# A newer compiler may warn of what these two do not: no reason to keep anybody from building.
set(warnings_are_errors OFF)
if((CMAKE_C_COMPILER_ID STREQUAL "GNU" AND CMAKE_C_COMPILER_VERSION VERSION_LESS 13)
   OR (CMAKE_C_COMPILER_ID STREQUAL "Clang" AND CMAKE_C_COMPILER_VERSION VERSION_LESS 15))
  set(warnings_are_errors ${PROJECT_IS_TOP_LEVEL})
endif()
option(NYBBLE_WERROR "Treat warnings as errors" ${warnings_are_errors})
if(NYBBLE_WERROR)
  add_compile_options(-Werror)
endif()

set(NYBBLE_SANITIZE "" CACHE STRING "Sanitizers of everything built: address,undefined or thread")
if(NYBBLE_SANITIZE)
  add_compile_options(-g -O1 -fno-omit-frame-pointer -fno-sanitize-recover=all
                      -fsanitize=${NYBBLE_SANITIZE})
  add_link_options(-fsanitize=${NYBBLE_SANITIZE})
endif()
if(NYBBLE_FUZZ)
  if(NOT CMAKE_C_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "NYBBLE_FUZZ needs Clang's libFuzzer; set CMAKE_C_COMPILER=clang")
  endif()
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()

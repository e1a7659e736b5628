# SPDX-License-Identifier: Apache-2.0
# The extension module of the Python package: cffi's C source, made from the public header, and
# python/calls.c, with the library inside. One build serves every CPython from 3.10 on. pyproject.toml turns this on.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

set(extension ${CMAKE_CURRENT_BINARY_DIR}/_nybble.c)
add_custom_command(
  OUTPUT ${extension}
  COMMAND Python::Interpreter ${PROJECT_SOURCE_DIR}/python/build_extension.py
          ${PROJECT_SOURCE_DIR}/include/nybble.h ${PROJECT_SOURCE_DIR}/python/helpers.h ${extension}
  DEPENDS python/build_extension.py python/helpers.h include/nybble.h
  VERBATIM)
python_add_library(nybble_python MODULE ${extension} python/calls.c)
set_target_properties(nybble_python PROPERTIES OUTPUT_NAME _nybble PREFIX "")
if(NOT WIN32)
  set_target_properties(nybble_python PROPERTIES SUFFIX .abi3.so)
endif()
target_include_directories(nybble_python PRIVATE python)
set_source_files_properties(${extension} PROPERTIES COMPILE_OPTIONS -w) # generated code
target_link_libraries(nybble_python PRIVATE nybble_static)
install(TARGETS nybble_python LIBRARY DESTINATION nybble COMPONENT python)

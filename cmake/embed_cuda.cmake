# SPDX-License-Identifier: Apache-2.0
# Turns a CUDA source, with all that it includes by #include "...", into a C file that holds its
# text: cmake -DSOURCE=device/NAME.cu -DNAME=NAME -DOUTPUT=NAME.c -P embed_cuda.cmake

cmake_minimum_required(VERSION 3.22)

# Appends a file's text to `text`; a file that was included before is left out. The compiler's
# messages name file and line of what is there.
function(append_file path)
  get_filename_component(file_name "${path}" NAME)
  get_filename_component(directory "${path}" DIRECTORY)
  if(file_name IN_LIST included)
    return()
  endif()
  list(APPEND included "${file_name}")
  file(READ "${path}" rest)
  string(REPLACE "#pragma once" "" rest "${rest}")
  set(line 1)
  string(APPEND text "#line 1 \"${file_name}\"\n")
  while(rest MATCHES "(^|\n)#include \"([^\"\n]+)\"([^\n]*)\n")
    set(directive "${CMAKE_MATCH_0}")
    set(start "${CMAKE_MATCH_1}")
    set(included_file "${CMAKE_MATCH_2}")
    string(FIND "${rest}" "${directive}" position)
    string(LENGTH "${directive}" length)
    string(SUBSTRING "${rest}" 0 ${position} before)
    math(EXPR position "${position} + ${length}")
    string(SUBSTRING "${rest}" ${position} -1 rest)
    string(APPEND text "${before}${start}")
    string(REGEX REPLACE "[^\n]" "" newlines "${before}${directive}")
    string(LENGTH "${newlines}" lines)
    math(EXPR line "${line} + ${lines}")
    append_file("${directory}/${included_file}")
    string(APPEND text "#line ${line} \"${file_name}\"\n")
  endwhile()
  string(APPEND text "${rest}")
  set(text "${text}" PARENT_SCOPE)
  set(included "${included}" PARENT_SCOPE)
endfunction()

set(text "")
set(included "")
append_file("${SOURCE}")

# One string for each line: no string is longer than a C compiler must take.
string(REPLACE "\\" "\\\\" text "${text}")
string(REPLACE "\"" "\\\"" text "${text}")
string(REPLACE "\n" "\\n\",\n\"" text "${text}")
file(WRITE "${OUTPUT}.new" "/* Made from ${NAME}.cu. */
#include <stddef.h>
extern const char *const nyb_cuda_source_${NAME}[];
const char *const nyb_cuda_source_${NAME}[] = {
\"${text}\", NULL};
")
file(RENAME "${OUTPUT}.new" "${OUTPUT}")

# SPDX-License-Identifier: Apache-2.0
"""Write the C source of the extension module, from the public header and nothing else.

    build_extension.py include/nybble.h python/helpers.h OUTPUT.c

CMake runs it. Every declaration of nybble.h becomes callable from Python, so that a field added
there is here as well; the C compiler checks each size and offset.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from cffi import FFI

# What helpers.h defines, as Python sees it.
HELPERS = """
#define NYBPY_NO_MEMORY -1
struct nybpy_dlpack {
  void *data;
  int32_t device_type, device_id;
  int32_t rank;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
};
struct nybpy_workspace {
  void *memory;
  size_t bytes;
};
struct nybpy_context {
  nyb_context *context;
  ...;
};
struct nybpy_cache {
  nyb_cache *cache;
  struct nybpy_context *owner;
};
int nybpy_context_create(const nyb_context_options *options, struct nybpy_context **context);
void nybpy_context_release(struct nybpy_context *context);
int nybpy_cache_create(struct nybpy_context *owner, const nyb_cache_options *options,
                       struct nybpy_cache **cache);
void nybpy_cache_destroy(struct nybpy_cache *cache);
void nybpy_set_view(void *view, uintptr_t data, int dtype, int64_t batch, int64_t head,
                    int64_t row);
int nybpy_attend(nyb_context *context, const nyb_attention *attention,
                 struct nybpy_workspace *workspace);
int nybpy_run(nyb_context *context, const nyb_cache *cache, nyb_attention *attention,
              struct nybpy_workspace *workspace);
void nybpy_free(struct nybpy_workspace *workspace);

/* Memory of caches on a GPU, from PyTorch's allocator; user_data is the device's number. */
extern "Python" void *nybpy_device_allocate(void *user_data, size_t bytes, size_t alignment);
extern "Python" void nybpy_device_release(void *user_data, void *memory);
"""


def declarations(header: str) -> str:
    """The header without comments and preprocessor, as cffi's parser takes it."""
    text = re.sub(r"/\*.*?\*/", " ", header, flags=re.DOTALL)
    text = text.replace("\\\n", " ")
    constants, lines = [], []
    for line in without_cplusplus(text.splitlines()):
        constant = re.match(r"#define (NYB_[A-Z_]+) \(?(-?\d+)\)?\s*$", line)
        if constant:
            constants.append(f"#define {constant[1]} {constant[2]}")
        elif not line.startswith("#"):
            lines.append(line)
    return "\n".join([*constants, *lines]).replace("NYB_API ", "")


def without_cplusplus(lines: list[str]) -> Iterator[str]:
    """What a C compiler sees of the parts for C++."""
    conditions: list[bool] = []  # of the blocks around a line, whether it is C++'s alone
    for line in lines:
        if re.match(r"#\s*if", line):
            conditions.append(line.split() == ["#ifdef", "__cplusplus"])
        elif re.match(r"#\s*(else|elif)", line):
            conditions[-1] = False
        elif re.match(r"#\s*endif", line):
            conditions.pop()
        elif not any(conditions):
            yield line


def main() -> None:
    header, helpers, output = (Path(argument) for argument in sys.argv[1:])
    builder = FFI()
    builder.cdef(declarations(header.read_text(encoding="utf-8")) + HELPERS)
    builder.set_source("nybble._nybble", f'#include "{helpers.name}"\n', py_limited_api=True)
    builder.emit_c_code(str(output))


if __name__ == "__main__":
    main()

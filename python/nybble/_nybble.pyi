# SPDX-License-Identifier: Apache-2.0
# cffi's module: C declarations of nybble.h, checked by the C compiler.
from typing import Any

ffi: Any
lib: Any

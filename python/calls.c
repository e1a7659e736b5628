/* SPDX-License-Identifier: Apache-2.0 */
/* nybble._calls: the one call that decode loops make again and again, in C from the arrays on. It
 * stands in the shared object of nybble._nybble, beside cffi's module.
 *
 * What it cannot read at a glance it leaves alone: the caller then takes the way through Python,
 * which knows every kind of array and has the sentences of what is wrong. */
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "helpers.h"

/* ---- Arrays -----------------------------------------------------------------------------------
 */

/* Rows in host memory: [batch, heads, rows, dim], strides in elements, the last axis contiguous. */
typedef struct rows {
  void *data;
  nyb_dtype dtype;
  int64_t shape[4], stride[3];
} rows;

/* DLPack 1.3's functions of an array type, which its `__dlpack_c_exchange_api__` points to. */
typedef struct exchange {
  struct {
    uint32_t major, minor;
  } version;
  void *previous;
  void *allocate, *managed_from_object, *managed_to_object;
  int (*tensor_from_object)(void *object, struct nybpy_dlpack *tensor);
  int (*current_stream)(int32_t device_type, int32_t device_id, void **stream);
} exchange;

enum { DLPACK_CPU = 1, DLPACK_FLOAT = 2, DLPACK_BFLOAT = 4 };

/* The last type that has them, and the last that has not: what to ask of a type costs more than the
 * rest of the call. The GIL guards them; the types are kept. */
static PyObject *known_type, *known_without;
static const exchange *known_exchange;

static void keep(PyObject **place, PyObject *type) {
  PyObject *const before = *place;
  Py_INCREF(type);
  *place = type;
  Py_XDECREF(before);
}

static const exchange *exchange_of(PyObject *array) {
  PyObject *const type = (PyObject *)Py_TYPE(array);
  if (type == known_type) return known_exchange;
  if (type == known_without) return NULL;
  const exchange *found = NULL;
  PyObject *const capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
  if (capsule == NULL) {
    PyErr_Clear();
  } else if (PyCapsule_IsValid(capsule, "dlpack_exchange_api")) {
    found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (found->version.major != 1 || found->tensor_from_object == NULL) found = NULL;
  }
  Py_XDECREF(capsule);
  keep(found != NULL ? &known_type : &known_without, type);
  if (found != NULL) known_exchange = found;
  return found;
}

static nyb_dtype dlpack_dtype(const struct nybpy_dlpack *tensor) {
  if (tensor->lanes != 1) return (nyb_dtype)0;
  if (tensor->code == DLPACK_FLOAT && tensor->bits == 32) return NYB_F32;
  if (tensor->code == DLPACK_FLOAT && tensor->bits == 16) return NYB_F16;
  if (tensor->code == DLPACK_BFLOAT && tensor->bits == 16) return NYB_BF16;
  return (nyb_dtype)0;
}

static bool read_exchanged(const exchange *functions, PyObject *array, rows *found) {
  struct nybpy_dlpack tensor;
  if (functions->tensor_from_object(array, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  found->dtype = dlpack_dtype(&tensor);
  if (tensor.device_type != DLPACK_CPU || tensor.rank != 4 || tensor.strides == NULL) return false;
  found->data = (char *)tensor.data + tensor.byte_offset;
  memcpy(found->shape, tensor.shape, sizeof found->shape);
  memcpy(found->stride, tensor.strides, sizeof found->stride);
  return found->dtype != 0 && (tensor.strides[3] == 1 || tensor.shape[3] == 1);
}

/* NumPy's array interface, as a struct. */
typedef struct array_interface {
  int two, rank;
  char kind;
  int item_bytes, flags;
  Py_ssize_t *shape, *strides;
  void *data;
  PyObject *description;
} array_interface;

enum { ALIGNED = 0x100, NOT_SWAPPED = 0x200, WRITEABLE = 0x400 };
static PyObject *interface_name;

static bool read_interface(PyObject *array, bool written, rows *found) {
  PyObject *const capsule = PyObject_GetAttr(array, interface_name);
  if (capsule == NULL) {
    PyErr_Clear();
    return false;
  }
  const array_interface *const from =
      PyCapsule_IsValid(capsule, NULL) ? PyCapsule_GetPointer(capsule, NULL) : NULL;
  const int needed = ALIGNED | NOT_SWAPPED | (written ? WRITEABLE : 0);
  bool good = from != NULL && from->two == 2 && from->rank == 4 && from->kind == 'f' &&
              (from->item_bytes == 4 || from->item_bytes == 2) && (from->flags & needed) == needed;
  if (good) {
    found->data = from->data;
    found->dtype = from->item_bytes == 4 ? NYB_F32 : NYB_F16;
    for (int axis = 0; axis < 4; axis++) found->shape[axis] = from->shape[axis];
    for (int axis = 0; axis < 3; axis++) {
      found->stride[axis] = from->strides[axis] / from->item_bytes;
      good &= from->strides[axis] % from->item_bytes == 0;
    }
    good &= from->strides[3] == from->item_bytes || from->shape[3] == 1;
  }
  Py_DECREF(capsule);
  return good;
}

static bool read_rows(PyObject *array, bool written, rows *found) {
  const exchange *const functions = exchange_of(array);
  if (functions != NULL) return read_exchanged(functions, array, found);
  return read_interface(array, written, found);
}

/* ---- The call ---------------------------------------------------------------------------------
 */

/* A pointer from cffi, as a number. */
static void *pointer_of(PyObject *number) { return PyLong_AsVoidPtr(number); }

static bool fits(const rows *query, const rows *out, const nyb_attention *call) {
  return query->shape[0] == call->batch && query->shape[3] == call->key_dim &&
         out->shape[0] == call->batch && out->shape[1] == query->shape[1] &&
         out->shape[2] == query->shape[2] && out->shape[3] == call->value_dim;
}

enum { CACHE, WORKSPACE, QUERY, OUT, SCALE, MASK, PATH, ROUNDING, ARGUMENTS };

PyDoc_STRVAR(attend_words,
             "attend(cache, workspace, query, out, scale, mask, path, rounding)\n\n"
             "Attends over a cache of the CPU: pointers as numbers, enums as the header has them, "
             "scale or None. Returns the status, or None where it did nothing: it cannot read the "
             "arrays, or they do not fit.");

static PyObject *attend(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  (void)module;
  if (count != ARGUMENTS) {
    PyErr_SetString(PyExc_TypeError, "attend takes 8 arguments");
    return NULL;
  }
  rows query, out;
  if (!read_rows(arguments[QUERY], false, &query) || !read_rows(arguments[OUT], true, &out)) {
    Py_RETURN_NONE;
  }
  const struct nybpy_cache *const cache = pointer_of(arguments[CACHE]);
  struct nybpy_workspace *const workspace = pointer_of(arguments[WORKSPACE]);
  const double scale = arguments[SCALE] == Py_None ? 0.0 : PyFloat_AsDouble(arguments[SCALE]);
  const long mask = PyLong_AsLong(arguments[MASK]);
  const long path = PyLong_AsLong(arguments[PATH]);
  const long rounding = PyLong_AsLong(arguments[ROUNDING]);
  if (PyErr_Occurred() != NULL) return NULL;
  nyb_attention call = NYB_ATTENTION_INIT;
  int status = (int)nyb_cache_view(cache->cache, &call);
  if (status == NYB_OK) {
    if (!fits(&query, &out, &call)) Py_RETURN_NONE;
    call.query_heads = query.shape[1];
    call.query_len = query.shape[2];
    call.q.data = query.data;
    call.q.dtype = query.dtype;
    memcpy(call.q.stride, query.stride, sizeof call.q.stride);
    call.out.data = out.data;
    call.out.dtype = out.dtype;
    memcpy(call.out.stride, out.stride, sizeof call.out.stride);
    call.scale = arguments[SCALE] == Py_None ? nybpy_usual_scale(call.key_dim) : (float)scale;
    call.mask = (nyb_mask)mask;
    call.path = (nyb_path)path;
    call.rounding = (nyb_rounding)rounding;
    PyThreadState *const state = PyEval_SaveThread();
    status = nybpy_attend(cache->owner->context, &call, workspace);
    PyEval_RestoreThread(state);
  }
  return PyLong_FromLong(status);
}

static PyMethodDef methods[] = {
    {"attend", (PyCFunction)(void (*)(void))attend, METH_FASTCALL, attend_words},
    {NULL, NULL, 0, NULL},
};

static int begin(PyObject *module) {
  (void)module;
  if (interface_name == NULL) interface_name = PyUnicode_InternFromString("__array_struct__");
  return interface_name != NULL ? 0 : -1;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)begin},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "nybble._calls", NULL, 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__calls(void);
PyMODINIT_FUNC PyInit__calls(void) { return PyModuleDef_Init(&definition); }

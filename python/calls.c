/* SPDX-License-Identifier: Apache-2.0 */
/* nybble._calls: the two calls that decode loops make again and again, in C from the arrays on.
 * They stand in the shared object of nybble._nybble, beside cffi's module.
 *
 * What it cannot read at a glance it leaves alone: the caller then takes the way through Python,
 * which knows every kind of array and has the sentences of what is wrong. */
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "helpers.h"

/* ---- Arrays -----------------------------------------------------------------------------------
 */

/* Rows where the call wants them: [batch, heads, rows, dim], strides in elements, the last axis
 * contiguous. */
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

enum { DLPACK_CPU = 1, DLPACK_CUDA = 2, DLPACK_FLOAT = 2, DLPACK_BFLOAT = 4 };
enum { HOST = -1 }; /* else the number of a CUDA device */

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

static bool is_on(const struct nybpy_dlpack *tensor, long device) {
  if (device == HOST) return tensor->device_type == DLPACK_CPU;
  return tensor->device_type == DLPACK_CUDA && tensor->device_id == device;
}

static bool read_exchanged(const exchange *functions, PyObject *array, long device, rows *found) {
  struct nybpy_dlpack tensor;
  if (functions->tensor_from_object(array, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  found->dtype = dlpack_dtype(&tensor);
  if (!is_on(&tensor, device) || tensor.rank != 4 || tensor.strides == NULL) return false;
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

static bool read_rows(PyObject *array, long device, bool written, rows *found) {
  const exchange *const functions = exchange_of(array);
  if (functions != NULL) return read_exchanged(functions, array, device, found);
  return device == HOST && read_interface(array, written, found);
}

/* nyb_input and nyb_output differ by a const only. */
static void set_view(void *view, const rows *from) {
  nybpy_set_view(view, (uintptr_t)from->data, from->dtype, from->stride[0], from->stride[1],
                 from->stride[2]);
}

static bool has_shape(const rows *array, int64_t batch, int64_t heads, int64_t tokens,
                      int64_t dim) {
  return array->shape[0] == batch && array->shape[1] == heads && array->shape[2] == tokens &&
         array->shape[3] == dim;
}

/* A pointer from cffi, as a number. */
static void *pointer_of(PyObject *number) { return PyLong_AsVoidPtr(number); }

/* ---- Attention --------------------------------------------------------------------------------
 */

/* On a GPU: memory from `allocate`, which may go as soon as the call is queued on its stream. */
static int attend_on_device(const struct nybpy_cache *cache, const nyb_attention *call,
                            PyObject *allocate, nyb_stream stream) {
  nyb_plan plan = NYB_PLAN_INIT;
  int status = (int)nyb_attention_plan(cache->owner->context, call, &plan);
  if (status != NYB_OK) return status;
  PyObject *memory = NULL;
  void *workspace = NULL;
  if (plan.workspace_bytes > 0) {
    PyObject *const bytes = PyLong_FromSize_t(plan.workspace_bytes);
    memory = bytes != NULL ? PyObject_CallFunctionObjArgs(allocate, bytes, NULL) : NULL;
    Py_XDECREF(bytes);
    PyObject *const address = memory != NULL ? PyTuple_GetItem(memory, 1) : NULL;
    if (address != NULL) workspace = pointer_of(address);
  }
  if (PyErr_Occurred() == NULL) {
    status = (int)nyb_attention_run(cache->owner->context, call, workspace, plan.workspace_bytes,
                                    stream);
  }
  Py_XDECREF(memory);
  return status;
}

static int attend_on_host(const struct nybpy_cache *cache, const nyb_attention *call,
                          struct nybpy_workspace *workspace) {
  PyThreadState *const state = PyEval_SaveThread();
  const int status = nybpy_attend(cache->owner->context, call, workspace);
  PyEval_RestoreThread(state);
  return status;
}

enum { CACHE, DEVICE, MEMORY, STREAM, QUERY, OUT, SCALE, MASK, PATH, ROUNDING, ATTEND_ARGUMENTS };

PyDoc_STRVAR(attend_words,
             "attend(cache, device, memory, stream, query, out, scale, mask, path, rounding)\n\n"
             "Attends over a cache: pointers as numbers, enums as the header has them, scale or "
             "None. memory: on the CPU (device -1) the thread's workspace; on a GPU a function of "
             "a size that returns (what must live, its address). Returns the status, or None where "
             "it did nothing: it cannot read the arrays, or they do not fit.");

static PyObject *attend(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  (void)module;
  if (count != ATTEND_ARGUMENTS) {
    PyErr_SetString(PyExc_TypeError, "attend takes 10 arguments");
    return NULL;
  }
  const long device = PyLong_AsLong(arguments[DEVICE]);
  rows query, out;
  if (!read_rows(arguments[QUERY], device, false, &query) ||
      !read_rows(arguments[OUT], device, true, &out)) {
    Py_RETURN_NONE;
  }
  const struct nybpy_cache *const cache = pointer_of(arguments[CACHE]);
  nyb_attention call = NYB_ATTENTION_INIT;
  int status = (int)nyb_cache_view(cache->cache, &call);
  if (status != NYB_OK) return PyLong_FromLong(status);
  if (!has_shape(&query, call.batch, query.shape[1], query.shape[2], call.key_dim) ||
      !has_shape(&out, call.batch, query.shape[1], query.shape[2], call.value_dim)) {
    Py_RETURN_NONE;
  }
  call.query_heads = query.shape[1];
  call.query_len = query.shape[2];
  set_view(&call.q, &query);
  set_view(&call.out, &out);
  call.scale = arguments[SCALE] == Py_None ? nybpy_usual_scale(call.key_dim)
                                           : (float)PyFloat_AsDouble(arguments[SCALE]);
  call.mask = (nyb_mask)PyLong_AsLong(arguments[MASK]);
  call.path = (nyb_path)PyLong_AsLong(arguments[PATH]);
  call.rounding = (nyb_rounding)PyLong_AsLong(arguments[ROUNDING]);
  void *const stream = pointer_of(arguments[STREAM]);
  void *const workspace = device == HOST ? pointer_of(arguments[MEMORY]) : NULL;
  if (PyErr_Occurred() != NULL) return NULL;
  status = device == HOST ? attend_on_host(cache, &call, workspace)
                          : attend_on_device(cache, &call, arguments[MEMORY], stream);
  return PyErr_Occurred() != NULL ? NULL : PyLong_FromLong(status);
}

/* ---- Append -----------------------------------------------------------------------------------
 */

enum { TO_CACHE, ON_DEVICE, ON_STREAM, KEY, VALUE, APPEND_ARGUMENTS };

PyDoc_STRVAR(append_words,
             "append(cache, device, stream, key, value)\n\n"
             "Appends to a cache. Returns the status, or None where it did nothing, as attend.");

static PyObject *append(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  (void)module;
  if (count != APPEND_ARGUMENTS) {
    PyErr_SetString(PyExc_TypeError, "append takes 5 arguments");
    return NULL;
  }
  const long device = PyLong_AsLong(arguments[ON_DEVICE]);
  rows key, value;
  if (!read_rows(arguments[KEY], device, false, &key) ||
      !read_rows(arguments[VALUE], device, false, &value)) {
    Py_RETURN_NONE;
  }
  const struct nybpy_cache *const cache = pointer_of(arguments[TO_CACHE]);
  void *const stream = pointer_of(arguments[ON_STREAM]);
  if (PyErr_Occurred() != NULL) return NULL;
  nyb_attention view = NYB_ATTENTION_INIT;
  int status = (int)nyb_cache_view(cache->cache, &view);
  if (status != NYB_OK) return PyLong_FromLong(status);
  nyb_append call = NYB_APPEND_INIT;
  call.tokens = key.shape[2];
  if (!has_shape(&key, view.batch, view.kv_heads, call.tokens, view.key_dim) ||
      !has_shape(&value, view.batch, view.kv_heads, call.tokens, view.value_dim)) {
    Py_RETURN_NONE;
  }
  set_view(&call.key, &key);
  set_view(&call.value, &value);
  /* A cache on a GPU that grows calls PyTorch's allocator, which takes the GIL itself. */
  PyThreadState *const state = PyEval_SaveThread();
  status = (int)nyb_cache_append(cache->cache, &call, stream);
  PyEval_RestoreThread(state);
  return PyLong_FromLong(status);
}

/* ---- The module -------------------------------------------------------------------------------
 */

static PyMethodDef methods[] = {
    {"attend", (PyCFunction)(void (*)(void))attend, METH_FASTCALL, attend_words},
    {"append", (PyCFunction)(void (*)(void))append, METH_FASTCALL, append_words},
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

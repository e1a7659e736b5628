/* SPDX-License-Identifier: Apache-2.0 */
#include "format.h"

#include "context.h"

static bool affine_id(int32_t bits, nyb_format_id *id) {
  switch (bits) {
    case 2: *id = NYB_FORMAT_AFFINE2; return true;
    case 3: *id = NYB_FORMAT_AFFINE3; return true;
    case 4: *id = NYB_FORMAT_AFFINE4; return true;
    case 5: *id = NYB_FORMAT_AFFINE5; return true;
    case 6: *id = NYB_FORMAT_AFFINE6; return true;
    case 8: *id = NYB_FORMAT_AFFINE8; return true;
    default: return false;
  }
}

nyb_format_id nyb_plain_format(nyb_dtype dtype) {
  switch (dtype) {
    case NYB_F16: return NYB_FORMAT_PLAIN_F16;
    case NYB_BF16: return NYB_FORMAT_PLAIN_BF16;
    case NYB_F32: break;
  }
  return NYB_FORMAT_PLAIN_F32;
}

static nyb_status check_plain(const nyb_format *format, const char *field, int64_t dim,
                              nyb_row_layout *layout) {
  if (format->bits != 0) {
    return nyb_fail(NYB_ERROR_BITS,
                    "%s.bits is %d; it must be 0 for NYB_PLAIN, whose dtype says it", field,
                    (int)format->bits);
  }
  if (format->group_size != 0) {
    return nyb_fail(NYB_ERROR_GROUP_SIZE, "%s.group_size is %d; it must be 0 for NYB_PLAIN", field,
                    (int)format->group_size);
  }
  const size_t element_bytes = nyb_dtype_bytes(format->dtype);
  const int64_t row_bytes = dim * (int64_t)element_bytes;
  *layout = (nyb_row_layout){
      .id = nyb_plain_format(format->dtype),
      .bits = (int32_t)element_bytes * 8,
      .group_size = 1,
      .groups = dim,
      .codes = dim,
      .code_bytes = element_bytes,
      .codes_bytes = row_bytes,
      .row_bytes = row_bytes,
  };
  return NYB_OK;
}

static nyb_status check_affine(const nyb_format *format, const char *field, int64_t dim,
                               const char *dim_field, nyb_row_layout *layout) {
  nyb_format_id id;
  if (!affine_id(format->bits, &id)) {
    return nyb_fail(NYB_ERROR_BITS, "%s.bits is %d; it must be 2, 3, 4, 5, 6 or 8", field,
                    (int)format->bits);
  }
  const int32_t group_size = format->group_size;
  if (group_size != 32 && group_size != 64 && group_size != 128) {
    return nyb_fail(NYB_ERROR_GROUP_SIZE, "%s.group_size is %d; it must be 32, 64 or 128", field,
                    (int)group_size);
  }
  if (dim % group_size != 0) {
    return nyb_fail(NYB_ERROR_GROUP_SIZE, "%s.group_size is %d, which does not divide %s, %lld",
                    field, (int)group_size, dim_field, (long long)dim);
  }
  *layout = (nyb_row_layout){
      .id = id,
      .affine = true,
      .bits = format->bits,
      .group_size = group_size,
      .groups = dim / group_size,
      .codes = dim / 32 * format->bits,
      .code_bytes = sizeof(uint32_t),
      .scale_bytes = nyb_dtype_bytes(format->dtype),
  };
  layout->codes_bytes = layout->codes * (int64_t)layout->code_bytes;
  layout->row_bytes = layout->codes_bytes + 2 * layout->groups * (int64_t)layout->scale_bytes;
  return NYB_OK;
}

/* Rows beyond this are nonsense, and every size of a row below it fits int64 many times over. */
#define NYB_MAX_DIM ((int64_t)1 << 40)

nyb_status nyb_format_check(const nyb_format *format, const char *field, int64_t dim,
                            const char *dim_field, nyb_row_layout *layout) {
  nyb_row_layout unused;
  if (layout == NULL) layout = &unused;
  if (format->scheme != NYB_PLAIN && format->scheme != NYB_AFFINE) {
    return nyb_fail(NYB_ERROR_ENUM, "%s.scheme is %d; it must be NYB_PLAIN or NYB_AFFINE", field,
                    (int)format->scheme);
  }
  if (nyb_dtype_bytes(format->dtype) == 0) {
    return nyb_fail(NYB_ERROR_ENUM, "%s.dtype is %d; it must be NYB_F32, NYB_F16 or NYB_BF16",
                    field, (int)format->dtype);
  }
  if (dim < 1 || dim > NYB_MAX_DIM) {
    return nyb_fail(NYB_ERROR_SHAPE, "%s is %lld; it must be 1 to %lld", dim_field, (long long)dim,
                    (long long)NYB_MAX_DIM);
  }
  return format->scheme == NYB_PLAIN ? check_plain(format, field, dim, layout)
                                     : check_affine(format, field, dim, dim_field, layout);
}

int64_t nyb_format_row_bytes(const nyb_format *format, int64_t dim) {
  if (format == NULL) {
    nyb_fail(NYB_ERROR_NULL, "format is NULL; it must point to an nyb_format");
    return -1;
  }
  nyb_row_layout layout = {0};
  return nyb_format_check(format, "format", dim, "dim", &layout) == NYB_OK ? layout.row_bytes : -1;
}

int nyb_stored_views(const nyb_row_layout *layout, const nyb_stored *stored, const char *owner,
                     const int64_t shape[3], nyb_view views[NYB_STORED_MAX_VIEWS]) {
  views[0] = nyb_rows_view(owner, "codes", stored->codes, layout->code_bytes, layout->codes, shape,
                           stored->codes_stride);
  if (!layout->affine) return 1;
  views[1] = nyb_rows_view(owner, "scales", stored->scales, layout->scale_bytes, layout->groups,
                           shape, stored->scales_stride);
  views[2] = nyb_rows_view(owner, "biases", stored->biases, layout->scale_bytes, layout->groups,
                           shape, stored->biases_stride);
  return 3;
}

nyb_stored_row nyb_stored_row_at(const nyb_stored *stored, int64_t batch, int64_t head,
                                 int64_t token) {
  const bool affine = stored->format.scheme == NYB_AFFINE;
  const int64_t scale_bytes = (int64_t)nyb_dtype_bytes(stored->format.dtype);
  const int64_t code_bytes = affine ? (int64_t)sizeof(uint32_t) : scale_bytes;
  nyb_stored_row row = {.codes = stored->codes};
  row.codes += nyb_row_offset(stored->codes_stride, batch, head, token) * code_bytes;
  if (!affine) return row;
  row.scales = stored->scales;
  row.scales += nyb_row_offset(stored->scales_stride, batch, head, token) * scale_bytes;
  row.biases = stored->biases;
  row.biases += nyb_row_offset(stored->biases_stride, batch, head, token) * scale_bytes;
  return row;
}

nyb_stored nyb_stored_from_output(const nyb_stored_output *output) {
  nyb_stored stored = {
      .format = output->format,
      .codes = output->codes,
      .scales = output->scales,
      .biases = output->biases,
  };
  for (int axis = 0; axis < 3; axis++) {
    stored.codes_stride[axis] = output->codes_stride[axis];
    stored.scales_stride[axis] = output->scales_stride[axis];
    stored.biases_stride[axis] = output->biases_stride[axis];
  }
  return stored;
}

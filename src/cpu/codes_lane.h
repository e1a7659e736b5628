/* SPDX-License-Identifier: Apache-2.0 */
/* Sixteen codes, packed: 2 * bits bytes, read and written to the byte. They are the low bytes of
 * two 64-bit words. */
#ifndef NYB_CODES_LANE_H
#define NYB_CODES_LANE_H

#include <stdint.h>
#include <string.h>

#define NYB_INLINE static inline __attribute__((always_inline))

NYB_INLINE void nyb_store_lane(uint64_t low, uint64_t high, int bits, uint8_t *bytes) {
  memcpy(bytes, &low, (size_t)(bits < 4 ? 2 * bits : 8));
  if (bits > 4) memcpy(bytes + 8, &high, (size_t)(2 * bits - 8));
}

/* Joined from parts of 2, 4 and 8 bytes, since a copy of six bytes would go through the stack. */
NYB_INLINE uint64_t nyb_load_lane_low(const uint8_t *bytes, int bits) {
  uint64_t eight = 0;
  uint32_t four = 0;
  uint16_t two = 0;
  if (bits >= 4) {
    memcpy(&eight, bytes, 8);
    return eight;
  }
  memcpy(&four, bytes, 4);
  if (bits == 3) memcpy(&two, bytes + 4, 2);
  return four | (uint64_t)two << 32;
}

NYB_INLINE uint64_t nyb_load_lane_high(const uint8_t *bytes, int bits) {
  uint32_t four = 0;
  uint16_t two = 0;
  if (bits == 6) memcpy(&four, bytes + 8, 4);
  if (bits == 5) memcpy(&two, bytes + 8, 2);
  return four | two;
}

/* The bytes that bring two 64-bit elements' first `bits` bytes together, and those that take them
 * apart again; 0x80 stands for a zero byte. */
NYB_INLINE void nyb_gap_orders(int bits, uint8_t close[16], uint8_t open[16]) {
  for (int i = 0; i < 16; i++) {
    close[i] = (uint8_t)(i < bits ? i : i < 2 * bits ? i - bits + 8 : 0x80);
    open[i] = (uint8_t)(i % 8 < bits ? i % 8 + i / 8 * bits : 0x80);
  }
}

#endif

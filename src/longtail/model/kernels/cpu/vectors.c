/* Vectors of floats, and attention's operations on rows of elements with them.
 *
 * Included by attention.c, once.
 */
/* One of the two halves into which step 0, 1, 2 or 3 mixes a and b. Adding the halves of pairs, step
 * by step, reduces 16 vectors to one: the sums of each vector's lanes, in the same order. */
LT_INLINE lt_vec lt_half(lt_vec a, lt_vec b, int step, int second) {
#define LT_MIX(...) return __builtin_shuffle(a, b, (lt_index){__VA_ARGS__})
  switch (2 * step + second) {
#if LT_LANES == 16
    case 0: LT_MIX(0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    case 1: LT_MIX(2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    case 2: LT_MIX(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    case 3: LT_MIX(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    case 4: LT_MIX(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    case 5: LT_MIX(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    case 6: LT_MIX(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    default: LT_MIX(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
#elif LT_LANES == 8
    case 0: LT_MIX(0, 8, 1, 9, 4, 12, 5, 13);
    case 1: LT_MIX(2, 10, 3, 11, 6, 14, 7, 15);
    case 2: LT_MIX(0, 1, 8, 9, 4, 5, 12, 13);
    case 3: LT_MIX(2, 3, 10, 11, 6, 7, 14, 15);
    case 4: LT_MIX(0, 1, 2, 3, 8, 9, 10, 11);
    default: LT_MIX(4, 5, 6, 7, 12, 13, 14, 15);
#else
    case 0: LT_MIX(0, 4, 1, 5);
    case 1: LT_MIX(2, 6, 3, 7);
    case 2: LT_MIX(0, 1, 4, 5);
    default: LT_MIX(2, 3, 6, 7);
#endif
  }
#undef LT_MIX
}

LT_INLINE lt_vec lt_fold(lt_vec a, lt_vec b, int step) {
  return lt_half(a, b, step, 0) + lt_half(a, b, step, 1);
}

/* Vectors of a row: one, or `both` of a pair, by lt_spread. lt_split gives those numbered j and j + 1
 * of a head for dot products, by lt_dot. The cheapest way to split bfloat16 is into the first and the
 * second halves of pairs, so sums have another order than the row, into which lt_gather puts them; if
 * the processor multiplies pairs of bfloat16, dot products take them as they are. */
#define lt_parts_f32(dim) ((dim) / LT_LANES)
LT_INLINE void lt_spread_f32(const float *row, int both, lt_vec *value) {
  value[0] = *(const lt_vec *)row;
  if (both) value[1] = *(const lt_vec *)(row + LT_LANES);
}
LT_INLINE void lt_split_f32(const float *row, int64_t j, int both, int64_t dim, lt_vec *part) {
  (void)dim, lt_spread_f32(row + j * LT_LANES, both, part);
}
LT_INLINE lt_vec lt_dot_f32(lt_vec x, lt_vec y, lt_vec sum) { return lt_fma(x, y, sum); }
LT_INLINE void lt_gather_f32(const lt_vec *sums, int64_t parts, float scale, float *row) {
  for (int64_t j = 0; j < parts; j++) *(lt_vec *)(row + j * LT_LANES) = sums[j] * scale;
}

LT_INLINE void lt_spread_bf16(const uint16_t *row, int both, lt_vec *value) {
  if (!both) {
    value[0] = lt_load_bf16(row);
    return;
  }
  const lt_u32 pairs = *(const lt_u32 *)row;
  value[0] = (lt_vec)(pairs << 16), value[1] = (lt_vec)(pairs & 0xffff0000u);
}
#ifdef LT_PAIRS
#define lt_parts_bf16(dim) (((dim) / 2 + LT_LANES - 1) / LT_LANES)
LT_INLINE lt_vec lt_part_bf16(const uint16_t *row, int64_t j, int64_t dim) {
  row += 2 * LT_LANES * j;
  if (2 * LT_LANES * (j + 1) <= dim) return *(const lt_vec *)row;
#ifdef __AVX512BF16__
  return (lt_vec)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)row));
#else
  lt_vec part = {0};
  memcpy(&part, row, sizeof(part) / 2);
  return part;
#endif
}
LT_INLINE void lt_split_bf16(const uint16_t *row, int64_t j, int both, int64_t dim, lt_vec *part) {
  part[0] = lt_part_bf16(row, j, dim);
  if (both) part[1] = lt_part_bf16(row, j + 1, dim);
}
LT_INLINE lt_vec lt_dot_bf16(lt_vec x, lt_vec y, lt_vec sum) { return lt_add_pairs(sum, x, y); }
#else
#define lt_parts_bf16(dim) ((dim) / LT_LANES)
LT_INLINE void lt_split_bf16(const uint16_t *row, int64_t j, int both, int64_t dim, lt_vec *part) {
  (void)dim, lt_spread_bf16(row + j * LT_LANES, both, part);
}
LT_INLINE lt_vec lt_dot_bf16(lt_vec x, lt_vec y, lt_vec sum) { return lt_fma(x, y, sum); }
#endif
LT_INLINE void lt_gather_bf16(const lt_vec *sums, int64_t parts, float scale, uint16_t *row) {
  for (int64_t j = 0; j + 1 < parts; j += 2)
    *(lt_u32 *)(row + j * LT_LANES) =
        lt_rounded(sums[j] * scale) | lt_rounded(sums[j + 1] * scale) << 16;
  if (parts % 2)
    *(lt_u16 *)(row + (parts - 1) * LT_LANES) =
        __builtin_convertvector(lt_rounded(sums[parts - 1] * scale), lt_u16);
}

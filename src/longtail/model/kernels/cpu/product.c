/* Products x W^T + bias for few rows of x. Their time is that of reading W once, so W is stored in
 * the order in which it is read. Every sum runs in the order of the inputs, for any number of rows,
 * so a row of the result does not depend on its batch. */

typedef int32_t lt_wide __attribute__((vector_size(64), aligned(4), may_alias));

/* From 5 rows on a step is long, and the processor alone looks too few lines ahead: it would compute
 * and read in turn. With fewer rows it is never ahead of memory. */
#define LT_WEIGHTS_AHEAD 8192 /* bytes */
#define LT_PREFETCH_WEIGHTS(from, bytes)                                                           \
  _Pragma("GCC unroll 2") for (uint64_t line = 0; line < (bytes); line += 64)                      \
      __builtin_prefetch((const char *)(from) + LT_WEIGHTS_AHEAD + line, 0, 2)

/* R rows by V vectors of outputs. Both are literals, so the sums stay in registers.
 *   T_ELEMENT   of x and w        T_STEP  inputs that one vector of w holds for each of 16 outputs
 *   T_PICK(p)   those of a row, for all lanes        T_DOT(sum, x, w)  sum + x w */
#define LT_DEFINE_TILE(NAME_, R, V)                                                                \
  static void NAME_##_##R##_##V(const T_ELEMENT *restrict x, const T_ELEMENT *restrict w,          \
                                const T_ELEMENT *restrict bias, T_ELEMENT *restrict out,           \
                                int64_t inputs, int64_t outputs, int64_t first) {                  \
    lt_vec sums[R][V];                                                                             \
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                           \
        _Pragma("GCC unroll 16") for (int v = 0; v < V; v++) sums[r][v] = (lt_vec){0};             \
    for (int64_t k = 0; k < inputs; k += T_STEP) {                                                 \
      T_VECTOR weights[V];                                                                         \
      if (V == 2) LT_PREFETCH_WEIGHTS(w + k * 32, 2 * sizeof(T_VECTOR));                           \
      _Pragma("GCC unroll 16") for (int v = 0; v < V; v++) weights[v] = *(const T_VECTOR *)(       \
          w + (v / 2) * inputs * 32 + k * 32 + (v % 2) * LT_LANES * T_STEP);                       \
      _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {                                       \
        const T_VECTOR row = T_PICK(x + r * inputs + k);                                           \
        _Pragma("GCC unroll 16") for (int v = 0; v < V; v++) sums[r][v] =                          \
            T_DOT(sums[r][v], row, weights[v]);                                                    \
      }                                                                                            \
    }                                                                                              \
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                           \
        _Pragma("GCC unroll 16") for (int v = 0; v < V; v++)                                       \
            T_STORE(sums[r][v], bias, out + r * outputs, first + v * LT_LANES, outputs);           \
  }

/* Up to 4 rows take two blocks of 32 outputs at a time: enough independent sums to hide latency. At most
 * 12 rows go through a block in one pass: their sums fill the registers. */
#define LT_DEFINE_PRODUCT(NAME_)                                                                   \
  LT_DEFINE_TILE(NAME_, 1, 4) LT_DEFINE_TILE(NAME_, 1, 2)                                          \
  LT_DEFINE_TILE(NAME_, 2, 4) LT_DEFINE_TILE(NAME_, 2, 2)                                          \
  LT_DEFINE_TILE(NAME_, 3, 4) LT_DEFINE_TILE(NAME_, 3, 2)                                          \
  LT_DEFINE_TILE(NAME_, 4, 4) LT_DEFINE_TILE(NAME_, 4, 2)                                          \
  LT_DEFINE_TILE(NAME_, 5, 2) LT_DEFINE_TILE(NAME_, 6, 2)                                          \
  LT_DEFINE_TILE(NAME_, 7, 2) LT_DEFINE_TILE(NAME_, 8, 2)                                          \
  LT_DEFINE_TILE(NAME_, 9, 2) LT_DEFINE_TILE(NAME_, 10, 2)                                         \
  LT_DEFINE_TILE(NAME_, 11, 2) LT_DEFINE_TILE(NAME_, 12, 2)                                        \
  static void NAME_(const T_ELEMENT *restrict x, const T_ELEMENT *restrict packed,                 \
                    const T_ELEMENT *restrict bias, T_ELEMENT *restrict out, int64_t rows,         \
                    int64_t inputs, int64_t outputs, int threads) {                                \
    const int64_t blocks = (outputs + 31) / 32, together = rows <= 4 ? 2 : 1;                      \
    _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1)")             \
    for (int64_t block = 0; block < blocks; block += together) {                                   \
      const T_ELEMENT *w = packed + block * inputs * 32;                                           \
      const int wide = together == 2 && blocks - block >= 2;                                       \
      for (int64_t r = 0, here; r < rows; r += here) {                                             \
        const int64_t passes = (rows - r + 11) / 12; /* of nearly equal numbers of rows */         \
        here = (rows - r + passes - 1) / passes;                                                   \
        switch (wide ? here : here + 16) {                                                         \
          case 1: LT_TILE(NAME_, 1, 4); break;                                                     \
          case 2: LT_TILE(NAME_, 2, 4); break;                                                     \
          case 3: LT_TILE(NAME_, 3, 4); break;                                                     \
          case 4: LT_TILE(NAME_, 4, 4); break;                                                     \
          case 17: LT_TILE(NAME_, 1, 2); break;                                                    \
          case 18: LT_TILE(NAME_, 2, 2); break;                                                    \
          case 19: LT_TILE(NAME_, 3, 2); break;                                                    \
          case 20: LT_TILE(NAME_, 4, 2); break;                                                    \
          case 21: LT_TILE(NAME_, 5, 2); break;                                                    \
          case 22: LT_TILE(NAME_, 6, 2); break;                                                    \
          case 23: LT_TILE(NAME_, 7, 2); break;                                                    \
          case 24: LT_TILE(NAME_, 8, 2); break;                                                    \
          case 25: LT_TILE(NAME_, 9, 2); break;                                                    \
          case 26: LT_TILE(NAME_, 10, 2); break;                                                   \
          case 27: LT_TILE(NAME_, 11, 2); break;                                                   \
          case 28: LT_TILE(NAME_, 12, 2); break;                                                   \
        }                                                                                          \
      }                                                                                            \
    }                                                                                              \
  }
#define LT_TILE(NAME_, R, V) \
  NAME_##_##R##_##V(x + r * inputs, w, bias, out + r * outputs, inputs, outputs, block * 32)

/* ---- float32: [blocks of 32 outputs][inputs][32 outputs], the last block padded with 0. ---- */

static inline void lt_store_f32(lt_vec sum, const float *restrict bias, float *restrict out,
                                 int64_t first, int64_t outputs) {
  for (int64_t i = 0; bias && i < LT_LANES && first + i < outputs; i++) sum[i] += bias[first + i];
  if (first + LT_LANES <= outputs) *(lt_vec *)(out + first) = sum;
  else
    for (int64_t i = 0; first + i < outputs; i++) out[first + i] = sum[i];
}

#define T_ELEMENT float
#define T_VECTOR lt_vec
#define T_STEP 1
#define T_PICK(p) ((lt_vec){0} + *(p))
#define T_DOT(sum, x, w) ((sum) + (x) * (w))
#define T_STORE lt_store_f32
LT_DEFINE_PRODUCT(lt_product_f32)
#undef T_ELEMENT
#undef T_VECTOR
#undef T_STEP
#undef T_PICK
#undef T_DOT
#undef T_STORE

/* 1 if the processor has as many wide registers as a tile has sums; otherwise a library's product is
 * faster. */
int product_f32_ready(void) {
#ifdef __AVX512F__
  return 1;
#else
  return 0;
#endif
}

void product_f32(const float *x, const float *packed, const float *bias, float *out, int64_t rows,
                 int64_t inputs, int64_t outputs, int threads) {
  lt_product_f32(x, packed, bias, out, rows, inputs, outputs, threads);
}

/* ---- bfloat16 in and out, float32 sums, without tiles: as above, but with pairs of inputs:
 * [blocks of 32 outputs][pairs of inputs][32 outputs][2]. ---- */
#if defined(__AVX512BF16__)
#include <immintrin.h>

static inline void lt_store_bf16(lt_vec sum, const uint16_t *restrict bias, uint16_t *restrict out,
                                 int64_t first, int64_t outputs) {
  for (int64_t i = 0; bias && i < LT_LANES && first + i < outputs; i++)
    sum[i] += lt_from_bf16(bias[first + i]);
  if (first + LT_LANES <= outputs)
    _mm256_storeu_si256((__m256i *)(out + first), (__m256i)_mm512_cvtneps_pbh((__m512)sum));
  else
    for (int64_t i = 0; first + i < outputs; i++) out[first + i] = lt_to_bf16(sum[i]);
}

static inline lt_wide lt_pick_pair(const uint16_t *p) {
  int32_t pair;
  memcpy(&pair, p, 4);
  return (lt_wide)_mm512_set1_epi32(pair);
}

#define T_ELEMENT uint16_t
#define T_VECTOR lt_wide
#define T_STEP 2
#define T_PICK(p) lt_pick_pair(p)
#define T_DOT(sum, x, w) \
  ((lt_vec)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(x), (__m512bh)(w)))
#define T_STORE lt_store_bf16
LT_DEFINE_PRODUCT(lt_product_bf16)
#undef T_ELEMENT
#undef T_VECTOR
#undef T_STEP
#undef T_PICK
#undef T_DOT
#undef T_STORE
#endif

/* ---- bfloat16 in and out, float32 sums, on AMX tiles: for every 16 outputs, 32 inputs at a time,
 * one tile of [16 pairs of inputs][16 outputs][2]. ----
 *
 *     x tile   16 rows x 32 inputs                         W tile   32 inputs x 16 outputs
 *     sums    +-----------+-----------+
 *     rows 0  | outputs 0 | outputs 1 |      two by two tiles of sums: every loaded tile is
 *     rows 1  | outputs 0 | outputs 1 |      used twice
 *             +-----------+-----------+
 */
#ifdef LT_TILES
/* Tiles 0-3 sums, 4-5 rows of x, 6-7 W; the second of each pair of row tiles may be absent. */
static void lt_shape_for_block(int first, int second) {
  lt_shape_tiles((const int[8]){first, first, second, second, first, second, 16, 16});
}

/* `columns` of 32 are outputs; the rest pads the last block. */
static void lt_store_sums(const float *restrict sums, const uint16_t *restrict bias,
                          uint16_t *restrict out, int64_t rows, int64_t stride, int64_t columns) {
  for (int64_t half = 0; half < columns; half += 16) {
    const __mmask16 lanes = (__mmask16)(columns - half < 16 ? (1 << (columns - half)) - 1 : 0xffff);
    const __m256i own = bias ? _mm256_maskz_loadu_epi16(lanes, bias + half) : (__m256i){0};
    const __m512 shift = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(own), 16);
    for (int64_t r = 0; r < rows; r++) {
      const __m512 sum = _mm512_load_ps(sums + r * 32 + half) + shift;
      _mm256_mask_storeu_epi16(out + r * stride + half, lanes, (__m256i)_mm512_cvtneps_pbh(sum));
    }
  }
}

/* Up to 32 rows by 32 outputs. */
static void lt_block(const uint16_t *x, const uint16_t *w, float *sums, int64_t inputs,
                     int two_row_tiles) {
  const uint16_t *w2 = w + inputs * 16;
  const int64_t stride = inputs * 2;
  _tile_zero(0);
  _tile_zero(1);
  if (!two_row_tiles) {
    for (int64_t k = 0; k < inputs; k += 32) {
      _tile_loadd(4, x + k, stride);
      _tile_loadd(6, w + k * 16, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w2 + k * 16, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
  } else {
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < inputs; k += 32) {
      _tile_loadd(4, x + k, stride);
      _tile_loadd(5, x + 16 * inputs + k, stride);
      _tile_loadd(6, w + k * 16, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
      _tile_loadd(7, w2 + k * 16, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(2, sums + 16 * 32, 128);
    _tile_stored(3, sums + 16 * 32 + 16, 128);
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
}

/* inputs are a multiple of 32; packed as above, the last 32 outputs padded with 0. */
void product_bf16(const uint16_t *restrict x, const uint16_t *restrict packed,
                  const uint16_t *restrict bias, uint16_t *restrict out, int64_t rows,
                  int64_t inputs, int64_t outputs, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float sums[32 * 32] __attribute__((aligned(64)));
#pragma omp for schedule(static)
    for (int64_t n = 0; n < outputs; n += 32) /* part of W that fits into the nearest cache */
      for (int64_t r = 0; r < rows; r += 32) {
        const int64_t here = rows - r < 32 ? rows - r : 32;
        const int first = here < 16 ? (int)here : 16, second = (int)here - first;
        lt_shape_for_block(first, second);
        lt_block(x + r * inputs, packed + n * inputs, sums, inputs, second > 0);
        lt_store_sums(sums, bias ? bias + n : 0, out + r * outputs + n, here, outputs,
                      outputs - n < 32 ? outputs - n : 32);
      }
    lt_release_tiles();
  }
}

/* Return the layout of W for product_bf16: 2 for tiles (requested from the kernel once per process),
 * 1 for pairs, 0 if it is not available. */
int product_bf16_layout(void) { return lt_tiles_granted() ? 2 : 0; }
#elif defined(__AVX512BF16__)
int product_bf16_layout(void) { return 1; }
void product_bf16(const uint16_t *x, const uint16_t *packed, const uint16_t *bias, uint16_t *out,
                  int64_t rows, int64_t inputs, int64_t outputs, int threads) {
  lt_product_bf16(x, packed, bias, out, rows, inputs, outputs, threads);
}
#else
int product_bf16_layout(void) { return 0; }
void product_bf16(const uint16_t *x, const uint16_t *packed, const uint16_t *bias, uint16_t *out,
                  int64_t rows, int64_t inputs, int64_t outputs, int threads) {
  (void)x, (void)packed, (void)bias, (void)out, (void)rows, (void)inputs, (void)outputs;
  (void)threads;
}
#endif

/* Products x W^T + bias for few rows of x, with bits of a row that are independent of its batch.
 *
 * Their time is that of reading W once, so W is stored in the order in which it is read: in panels of
 * 32 outputs, the last one padded with 0, and in a panel input by input.
 *
 *     float32           [panels][inputs][32 outputs]
 *     bfloat16, pairs   [panels][pairs of inputs][32 outputs][2], multiplied by AVX512-BF16
 *     bfloat16, halves  [panels][inputs][groups][LT_LANES][2: output j, j + LT_LANES]
 *     bfloat16, tiles   see AMX below
 *
 * A register of halves is split without shuffles, by a shift and a mask, into two registers of exact
 * float32, so without BF16 instructions a step is that of float32 and reads half of its bytes.
 *
 * Every sum is one chain of fused multiply-adds in the order of the inputs, whatever the number of
 * rows, and however they are cut into tiles and blocks: between blocks sums are stored and loaded.
 */
#include "common.c"
#include <stdlib.h>

#define LT_PANEL 32
#define LT_DEPTH 512  /* inputs of a block, at most: a block of a panel stays in the second cache */
#define LT_AHEAD_BYTES 8192
#define LT_AT_ONCE 48 /* rows that go through a block while it is there */

/* Tiles of R rows by V registers of outputs: as many sums as leave room for weights and a row. */
#ifdef LT_EMULATED /* few, since plain C for 16 lanes is long */
#define LT_MOST 4
#define LT_WIDTH(R) 2
#define LT_SHAPES(DO, K) DO(K, 1, 2) DO(K, 2, 2) DO(K, 3, 2) DO(K, 4, 2)
#elif LT_LANES == 16 /* 32 registers */
#define LT_MOST 12
#define LT_WIDTH(R) 2
#define LT_SHAPES(DO, K)                                                                \
  DO(K, 1, 2) DO(K, 2, 2) DO(K, 3, 2) DO(K, 4, 2) DO(K, 5, 2) DO(K, 6, 2)               \
  DO(K, 7, 2) DO(K, 8, 2) DO(K, 9, 2) DO(K, 10, 2) DO(K, 11, 2) DO(K, 12, 2)
#elif LT_LANES == 8 /* 16 registers */
#define LT_MOST 6
#define LT_WIDTH(R) ((R) <= 3 ? 4 : 2)
/* No tile of several has 4 rows: their 8 sums hide the latency of a multiplication only if nothing else
 * runs on the core. Example: 8 rows are 5 and 3, 9 are 6 and 3, 13 are 5, 5 and 3. */
#define LT_TILE_ROWS(left, passes) ((passes) == 1 ? (left) : (left) % 6 % 3 == 0 || (left) % 6 == 5 ? 6 : 5)
#define LT_SHAPES(DO, K) \
  DO(K, 1, 4) DO(K, 2, 4) DO(K, 3, 4) DO(K, 4, 2) DO(K, 5, 2) DO(K, 6, 2)
#else /* 32 registers of 4 lanes */
#define LT_MOST 6
#define LT_WIDTH(R) ((R) <= 3 ? 8 : 4)
#define LT_SHAPES(DO, K) \
  DO(K, 1, 8) DO(K, 2, 8) DO(K, 3, 8) DO(K, 4, 4) DO(K, 5, 4) DO(K, 6, 4)
#endif

#ifndef LT_TILE_ROWS /* Rows of the next of `passes` tiles, of the rows left: tiles are equal. */
#define LT_TILE_ROWS(left, passes) (((left) + (passes) - 1) / (passes))
#endif

/* A kind K of weights W and of rows X:
 *   T_K         elements of W in memory         ROW_K        elements of the rows
 *   STEP_K      inputs of a step                lt_row_K     those of a row, for all lanes
 *   lt_weights_K(w, v, full)  register v of a step; if the sums leave no `full` set of registers, it
 *                             is loaded again rather than kept
 *   lt_multiply_K(sum, row, weights) */
#define T_f32 float
#define ROW_f32 float
#define STEP_f32 1
LT_INLINE lt_vec lt_row_f32(const float *row) { return (lt_vec){0} + *row; }
LT_INLINE lt_vec lt_weights_f32(const float *w, int v, int full) {
  return (void)full, *(const lt_vec *)(w + v * LT_LANES);
}
LT_INLINE lt_vec lt_multiply_f32(lt_vec sum, lt_vec row, lt_vec weights) {
  return lt_fma(row, weights, sum);
}

#define T_halves uint16_t
#define ROW_halves float
#define STEP_halves 1
#define LT_MASK 0xffff0000u
#define lt_row_halves lt_row_f32
LT_INLINE lt_vec lt_weights_halves(const uint16_t *w, int v, int full) {
  const uint16_t *from = w + v / 2 * 2 * LT_LANES;
  lt_u32 halves = full ? *(const volatile lt_u32 *)from : *(const lt_u32 *)from;
  if (v % 2 == 0) return (lt_vec)(halves << 16);
#if LT_LANES == 8
  static const lt_u32 second = {LT_MASK, LT_MASK, LT_MASK, LT_MASK,
                                LT_MASK, LT_MASK, LT_MASK, LT_MASK};
  if (full) __asm__("vpand %1, %0, %0" : "+x"(halves) : "m"(second)); /* no register for the mask */
  if (full) return (lt_vec)halves;
#endif
  return (lt_vec)(halves & LT_MASK);
}
#define lt_multiply_halves lt_multiply_f32

#ifdef LT_PAIRS
#define T_pairs uint16_t
#define ROW_pairs uint16_t
#define STEP_pairs 2
LT_INLINE lt_vec lt_row_pairs(const uint16_t *row) {
  int32_t pair;
  memcpy(&pair, row, 4);
  return (lt_vec)((lt_index){0} + pair);
}
LT_INLINE lt_vec lt_weights_pairs(const uint16_t *w, int v, int full) {
  return (void)full, *(const lt_vec *)(w + v * LT_LANES * 2);
}
LT_INLINE lt_vec lt_multiply_pairs(lt_vec sum, lt_vec row, lt_vec weights) {
  return lt_add_pairs(sum, row, weights);
}
#endif

/* One step: sums[r][v] += row r times weights v. The fewer of both stay in registers. */
#define LT_UNROLL _Pragma("GCC unroll 16")
#define LT_FULL(R, V) (LT_LANES == 8 && (R) * (V) >= 12)
#define LT_STEP(K, R, V)                                                                  \
  if (R <= V) {                                                                           \
    lt_vec row[R];                                                                        \
    LT_UNROLL for (int r = 0; r < R; r++) row[r] = lt_row_##K(x + r * stride + k);        \
    LT_UNROLL for (int v = 0; v < V; v++) {                                               \
      lt_vec weights = lt_weights_##K(w, v, LT_FULL(R, V));                               \
      if (R > 1) LT_HELD(weights);                                                        \
      LT_UNROLL for (int r = 0; r < R; r++) s[r][v] = lt_multiply_##K(s[r][v], row[r], weights); \
    }                                                                                     \
  } else {                                                                                \
    lt_vec weights[V];                                                                    \
    LT_UNROLL for (int v = 0; v < V; v++) {                                               \
      weights[v] = lt_weights_##K(w, v, LT_FULL(R, V));                                   \
      LT_HELD(weights[v]);                                                                \
    }                                                                                     \
    LT_UNROLL for (int r = 0; r < R; r++) {                                               \
      const lt_vec row = lt_row_##K(x + r * stride + k);                                  \
      LT_UNROLL for (int v = 0; v < V; v++) s[r][v] = lt_multiply_##K(s[r][v], row, weights[v]); \
    }                                                                                     \
  }

/* What a tile prefetches: `ahead` bytes from `next` on, in each step. */
typedef struct {
  const char *next;
  int64_t ahead;
} lt_coming;

/* Continue the sums of R rows and V registers of outputs, or begin them; a function each, so that all
 * sums stay in registers. */
#define LT_DEFINE_TILE(K, R, V)                                                               \
  static __attribute__((noinline)) void lt_tile_##K##_##R##_##V(                              \
      const ROW_##K *restrict x, int64_t stride, const T_##K *restrict w, int64_t depth,      \
      const lt_coming *coming, int begun, float (*restrict sums)[LT_PANEL]) {                 \
    lt_vec s[R][V];                                                                           \
    LT_UNROLL for (int r = 0; r < R; r++)                                                     \
        LT_UNROLL for (int v = 0; v < V; v++)                                                 \
            s[r][v] = begun ? *(const lt_vec *)(sums[r] + v * LT_LANES) : (lt_vec){0};        \
    const char *next = coming->next;                                                          \
    const int64_t ahead = coming->ahead;                                                      \
    for (int64_t k = 0; k < depth; k += STEP_##K, w += STEP_##K * LT_PANEL, next += ahead) {  \
      __builtin_prefetch(next, 0, 2);                                                         \
      if (V * LT_LANES * STEP_##K * sizeof(T_##K) > 64) __builtin_prefetch(next + 64, 0, 2);  \
      LT_STEP(K, R, V)                                                                        \
    }                                                                                         \
    LT_UNROLL for (int r = 0; r < R; r++)                                                     \
        LT_UNROLL for (int v = 0; v < V; v++) *(lt_vec *)(sums[r] + v * LT_LANES) = s[r][v];  \
  }
#define LT_TILE_CASE(K, R, V) \
  case R: lt_tile_##K##_##R##_##V(rows_at, stride, w + first, depth, &coming, b > 0, to); break;

/* Bytes ahead of itself that a tile alone prefetches. With at most 6 multiplications for each line of
 * W it waits for memory; the processor then reads ahead by itself, and prefetches slow it down, by
 * 1.2 to 1.45 on Zen 4. */
#define LT_REGISTER_BYTES(K) (LT_LANES * STEP_##K * (int64_t)sizeof(T_##K))
#define LT_SOON(K, rows) ((rows) * 64 / LT_REGISTER_BYTES(K) <= 6 ? 0 : LT_AHEAD_BYTES)

/* What one of `parts` tiles over a block of W prefetches: its share of the next block; if it is alone,
 * what it reads soon. */
static lt_coming lt_share(const void *w, int64_t bytes, int64_t steps, int64_t parts, int64_t part,
                          int64_t soon) {
  const char *next = (const char *)w + (parts > 1 ? bytes + bytes / parts * part : soon);
  return (lt_coming){next, (bytes / parts + steps - 1) / steps};
}

LT_INLINE void lt_put_f32(float *sum, const float *bias, float *out, int64_t many) {
  for (int64_t i = 0; bias && i < many; i++) sum[i] += bias[i];
  memcpy(out, sum, (size_t)many * sizeof(float));
}
LT_INLINE void lt_put_halves(float *sum, const uint16_t *bias, uint16_t *out, int64_t many) {
  uint16_t rounded[LT_PANEL];
  for (int64_t i = 0; bias && i < many; i++) sum[i] += lt_from_bf16(bias[i]);
  for (int64_t i = 0; i < LT_PANEL; i += LT_LANES)
    *(lt_u16 *)(rounded + i) = __builtin_convertvector(lt_rounded(*(lt_vec *)(sum + i)), lt_u16);
  memcpy(out, rounded, (size_t)many * sizeof(uint16_t));
}
#define lt_put_pairs lt_put_halves

/* lt_panel_K: the sums of all rows, 32 outputs. Tiles go through a block of W one after another;
 * together they prefetch the next block, so that memory is read while products are computed. */
#define LT_DEFINE_PRODUCT(K)                                                                      \
  LT_SHAPES(LT_DEFINE_TILE, K)                                                                    \
  static void lt_panel_##K(const ROW_##K *restrict x, int64_t stride, const T_##K *restrict w,    \
                           float (*restrict sums)[LT_PANEL], int64_t rows, int64_t inputs) {      \
    const int64_t blocks = (inputs + LT_DEPTH - 1) / LT_DEPTH;                                    \
    const int64_t passes = (rows + LT_MOST - 1) / LT_MOST;                                        \
    for (int64_t b = 0, k = 0, depth; b < blocks; b++, k += depth, w += depth * LT_PANEL) {       \
      depth = (inputs - k) / (blocks - b);                                                        \
      depth += depth % STEP_##K;                                                                  \
      const int64_t bytes = depth * LT_PANEL * sizeof(T_##K), steps = depth / STEP_##K;           \
      for (int64_t p = 0, r = 0, here; p < passes; p++, r += here) {                              \
        here = LT_TILE_ROWS(rows - r, passes - p);                                                    \
        const int64_t wide = LT_WIDTH(here) * LT_LANES;                                           \
        const int64_t parts = passes * (LT_PANEL / wide);                                         \
        for (int64_t first = 0; first < LT_PANEL; first += wide) {                                \
          const ROW_##K *rows_at = x + r * stride + k;                                            \
          float (*to)[LT_PANEL] = (float (*)[LT_PANEL])(sums[r] + first);                         \
          const int64_t part = (p * LT_PANEL + first) / wide;                                     \
          const lt_coming coming =                                                                \
              lt_share(w, bytes, steps, parts, part, LT_SOON(K, here));                          \
          switch (here) { LT_SHAPES(LT_TILE_CASE, K) }                                            \
        }                                                                                         \
      }                                                                                           \
    }                                                                                             \
  }                                                                                               \
  static void lt_product_##K(const ROW_##K *restrict x, const T_##K *restrict packed,             \
                             const T_##K *restrict bias, T_##K *restrict out, int64_t rows,       \
                             int64_t inputs, int64_t outputs, int threads) {                      \
    _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1)")            \
    for (int64_t n = 0; n < outputs; n += LT_PANEL) {                                             \
      const int64_t many = outputs - n < LT_PANEL ? outputs - n : LT_PANEL;                       \
      for (int64_t r = 0, here; r < rows; r += here) {                                            \
        float sums[LT_AT_ONCE][LT_PANEL] __attribute__((aligned(64)));                            \
        here = rows - r < LT_AT_ONCE ? rows - r : LT_AT_ONCE;                                     \
        lt_panel_##K(x + r * inputs, inputs, packed + n * inputs, sums, here, inputs);            \
        for (int64_t i = 0; i < here; i++)                                                        \
          lt_put_##K(sums[i], bias ? bias + n : 0, out + (r + i) * outputs + n, many);            \
      }                                                                                           \
    }                                                                                             \
  }

#ifndef LT_BFLOAT16
LT_DEFINE_PRODUCT(f32)
void product_f32(const float *x, const float *packed, const float *bias, float *out, int64_t rows,
                 int64_t inputs, int64_t outputs, int threads) {
  lt_product_f32(x, packed, bias, out, rows, inputs, outputs, threads);
}

/* The number of lanes, on which the layout of halves depends. */
int product_lanes(void) { return LT_LANES; }
#else

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
    const int64_t many = columns - half < 16 ? columns - half : 16;
    uint16_t own[16] = {0};
    if (bias) memcpy(own, bias + half, (size_t)many * sizeof(*own));
    const lt_vec shift = lt_load_bf16(own);
    for (int64_t r = 0; r < rows; r++) {
      const lt_u16 sum = lt_narrowed(*(const lt_vec *)(sums + r * 32 + half) + shift);
      if (many == 16)
        *(lt_u16 *)(out + r * stride + half) = sum;
      else
        memcpy(out + r * stride + half, &sum, (size_t)many * sizeof(*own));
    }
  }
}

/* What a pass over a block prefetches for each 32 inputs, and as much half a block later. One pass
 * reads it LT_SOON_BYTES later. Several passes find their block in the cache; each prefetches a share
 * of the next one, so that memory is read while products are computed. */
#define LT_SOON_BYTES 4096
static lt_coming lt_tiles_to_come(const uint16_t *w, int64_t inputs, int64_t passes, int64_t pass) {
  const char *block = (const char *)w;
  const int64_t lines = passes < 16 ? 16 / passes : pass < 16;
  const int64_t share = inputs * 64 + pass * lines * inputs * 2;
  return (lt_coming){block + (passes == 1 ? LT_SOON_BYTES : share), 64 * lines};
}

#define LT_PREFETCH_TILES()                     \
  LT_PREFETCH(next, 0, coming.ahead, 2);        \
  LT_PREFETCH(next + half, 0, coming.ahead, 2); \
  next += coming.ahead

/* The inputs of W, of which the last ones are 0. */
#define LT_PADDED(inputs) (((inputs) + 31) / 32 * 32)

/* Up to 32 rows by 32 outputs. `rest` are the last inputs of the rows, padded with 0 to 32. */
static void lt_block(const uint16_t *x, const uint16_t *w, float *sums, int64_t inputs,
                     const uint16_t *rest, int two_row_tiles, lt_coming coming) {
  const int64_t padded = LT_PADDED(inputs), whole = inputs / 32 * 32, half = padded * 32;
  const uint16_t *w2 = w + padded * 16;
#define LT_ROWS_AT(first) (k < whole ? x + first * inputs + k : rest + first * 32)
#define LT_STRIDE (k < whole ? inputs * 2 : 64)
  const char *next = coming.next;
  _tile_zero(0);
  _tile_zero(1);
  if (!two_row_tiles) {
    for (int64_t k = 0; k < padded; k += 32) {
      LT_PREFETCH_TILES();
      _tile_loadd(4, LT_ROWS_AT(0), LT_STRIDE);
      _tile_loadd(6, w + k * 16, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w2 + k * 16, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
  } else {
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < padded; k += 32) {
      LT_PREFETCH_TILES();
      _tile_loadd(4, LT_ROWS_AT(0), LT_STRIDE);
      _tile_loadd(5, LT_ROWS_AT(16), LT_STRIDE);
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

/* Packed as above, the last 32 inputs and outputs padded with 0. */
void product_bf16(const uint16_t *restrict x, const uint16_t *restrict packed,
                  const uint16_t *restrict bias, uint16_t *restrict out, int64_t rows,
                  int64_t inputs, int64_t outputs, int threads) {
  const int64_t passes = (rows + 31) / 32, more = inputs % 32;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float sums[32 * 32] __attribute__((aligned(64)));
    uint16_t rest[32 * 32] = {0};
    int64_t shaped = 0; /* rows of the tiles */
#pragma omp for schedule(static)
    for (int64_t n = 0; n < outputs; n += 32) /* part of W that fits into the second cache */
      for (int64_t r = 0; r < rows; r += 32) {
        const int64_t here = rows - r < 32 ? rows - r : 32;
        const int first = here < 16 ? (int)here : 16, second = (int)here - first;
        const uint16_t *w = packed + n * LT_PADDED(inputs);
        if (shaped != here) lt_shape_for_block(first, second), shaped = here;
        for (int64_t i = 0; more && i < here; i++)
          memcpy(rest + i * 32, x + (r + i + 1) * inputs - more, (size_t)more * sizeof(*rest));
        LT_WRITTEN();
        lt_block(x + r * inputs, w, sums, inputs, rest, second > 0,
                 lt_tiles_to_come(w, LT_PADDED(inputs), passes, r / 32));
        lt_store_sums(sums, bias ? bias + n : 0, out + r * outputs + n, here, outputs,
                      outputs - n < 32 ? outputs - n : 32);
      }
    lt_release_tiles();
  }
}

/* Return the layout of W for product_bf16: 0 halves, 1 pairs, 2 tiles (requested from the kernel once
 * per process), -1 if the kernel refuses tiles. */
int product_bf16_layout(void) { return lt_tiles_granted() ? 2 : -1; }
#elif defined(LT_PAIRS)
LT_DEFINE_PRODUCT(pairs)
int product_bf16_layout(void) { return 1; }
void product_bf16(const uint16_t *x, const uint16_t *packed, const uint16_t *bias, uint16_t *out,
                  int64_t rows, int64_t inputs, int64_t outputs, int threads) {
  lt_product_pairs(x, packed, bias, out, rows, inputs, outputs, threads);
}
#else
LT_DEFINE_PRODUCT(halves)
int product_bf16_layout(void) { return 0; }
void product_bf16(const uint16_t *x, const uint16_t *packed, const uint16_t *bias, uint16_t *out,
                  int64_t rows, int64_t inputs, int64_t outputs, int threads) {
  float *wide = malloc((size_t)(rows * inputs) * sizeof(float));
  if (!wide) abort(); /* less than the activations that the caller holds */
  for (int64_t i = 0; i < rows * inputs; i++) wide[i] = lt_from_bf16(x[i]);
  lt_product_halves(wide, packed, bias, out, rows, inputs, outputs, threads);
  free(wide);
}
#endif
#endif

/* Products x W^T + bias for few rows of x. Reading W once is all that can be fast about them, so W
 * lies in the order in which it is read. Every sum is taken in the order of the inputs, whatever
 * rows are beside it: a row of the result does not depend on the batch that it is in. */

/* ---- float32: [blocks of 32 outputs][inputs][32 outputs], the last block filled up with 0. ---- */

/* R rows by V vectors of outputs. Both are literals, so the sums are registers, not memory. */
#define LT_DEFINE_TILE(R, V)                                                                      \
  static void lt_tile_##R##_##V(const float *restrict x, const float *restrict w,                 \
                                const float *restrict bias, float *restrict out, int64_t inputs,  \
                                int64_t outputs, int64_t first) {                                 \
    lt_vec sums[R][V];                                                                            \
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                          \
        _Pragma("GCC unroll 16") for (int v = 0; v < V; v++) sums[r][v] = (lt_vec){0};            \
    for (int64_t k = 0; k < inputs; k++) {                                                        \
      lt_vec weights[V];                                                                          \
      _Pragma("GCC unroll 16") for (int v = 0; v < V; v++) weights[v] =                           \
          lt_load_f32(w + (v / 2) * inputs * 32 + k * 32 + (v % 2) * LT_LANES);                   \
      _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                        \
          _Pragma("GCC unroll 16") for (int v = 0; v < V; v++) sums[r][v] +=                      \
          x[r * inputs + k] * weights[v];                                                         \
    }                                                                                             \
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                          \
        _Pragma("GCC unroll 16") for (int v = 0; v < V; v++)                                      \
            lt_store_tile(sums[r][v], bias, out + r * outputs, first + v * LT_LANES, outputs);    \
  }

static inline void lt_store_tile(lt_vec sum, const float *restrict bias, float *restrict out,
                                 int64_t first, int64_t outputs) {
  for (int64_t i = 0; bias && i < LT_LANES && first + i < outputs; i++) sum[i] += bias[first + i];
  if (first + LT_LANES <= outputs) *(lt_vec *)(out + first) = sum;
  else
    for (int64_t i = 0; first + i < outputs; i++) out[first + i] = sum[i];
}

LT_DEFINE_TILE(1, 2)
LT_DEFINE_TILE(1, 4)
LT_DEFINE_TILE(2, 2)
LT_DEFINE_TILE(2, 4)
LT_DEFINE_TILE(3, 2)
LT_DEFINE_TILE(3, 4)
LT_DEFINE_TILE(5, 2)
LT_DEFINE_TILE(5, 4)
LT_DEFINE_TILE(12, 2)

void product_f32(const float *restrict x, const float *restrict packed,
                 const float *restrict bias, float *restrict out, int64_t rows, int64_t inputs,
                 int64_t outputs, int threads) {
  const int64_t blocks = (outputs + 31) / 32;
  const int64_t together = rows <= 5 ? 2 : 1; /* enough sums under way to hide their latency */
#define LT_TILE(R, V) \
  lt_tile_##R##_##V(x + r * inputs, w, bias, out + r * outputs, inputs, outputs, block * 32)
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t block = 0; block < blocks; block += together) {
    const float *w = packed + block * inputs * 32;
    const int two = together == 2 && blocks - block >= 2;
    for (int64_t r = 0, here; r < rows; r += here) {
      const int64_t left = rows - r;
      here = left >= 12 ? 12 : left >= 5 ? 5 : left >= 3 ? 3 : left;
      if (here == 12) LT_TILE(12, 2);
      else if (here == 5) { if (two) LT_TILE(5, 4); else LT_TILE(5, 2); }
      else if (here == 3) { if (two) LT_TILE(3, 4); else LT_TILE(3, 2); }
      else if (here == 2) { if (two) LT_TILE(2, 4); else LT_TILE(2, 2); }
      else { if (two) LT_TILE(1, 4); else LT_TILE(1, 2); }
    }
  }
#undef LT_TILE
}

/* ---- bfloat16 in and out, float32 sums, on AMX tiles: for every 16 outputs, 32 inputs at a time,
 * one tile of [16 pairs of inputs][16 outputs][2]. ----
 *
 *     x tile   16 rows x 32 inputs                         W tile   32 inputs x 16 outputs
 *     sums    +-----------+-----------+
 *     rows 0  | outputs 0 | outputs 1 |      two by two tiles of sums: every tile that is loaded
 *     rows 1  | outputs 0 | outputs 1 |      is used twice
 *             +-----------+-----------+
 */
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} lt_tiles;

/* Tiles 0-3 sums, 4-5 rows of x, 6-7 W; the second of each pair of row tiles may be absent. */
static void lt_shape_tiles(int first, int second) {
  lt_tiles tiles = {.palette = 1};
  const int rows[8] = {first, first, second, second, first, second, 16, 16};
  for (int i = 0; i < 8; i++) {
    tiles.row_bytes[i] = rows[i] ? 64 : 0;
    tiles.rows[i] = (uint8_t)rows[i];
  }
  _tile_loadconfig(&tiles);
}

static void lt_store_sums(const float *restrict sums, const uint16_t *restrict bias,
                          uint16_t *restrict out, int64_t rows, int64_t stride) {
  for (int half = 0; half < 32; half += 16) {
    const __m512 shift = bias ? (__m512)lt_load_bf16(bias + half) : _mm512_setzero_ps();
    for (int64_t r = 0; r < rows; r++) {
      const __m512 sum = _mm512_load_ps(sums + r * 32 + half) + shift;
      _mm256_storeu_si256((__m256i *)(out + r * stride + half), (__m256i)_mm512_cvtneps_pbh(sum));
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

/* inputs and outputs are multiples of 32; packed as above. */
void product_bf16(const uint16_t *restrict x, const uint16_t *restrict packed,
                  const uint16_t *restrict bias, uint16_t *restrict out, int64_t rows,
                  int64_t inputs, int64_t outputs, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float sums[32 * 32] __attribute__((aligned(64)));
    int64_t shaped = 0;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < outputs; n += 32) /* this much of W stays in the nearest cache */
      for (int64_t r = 0; r < rows; r += 32) {
        const int64_t here = rows - r < 32 ? rows - r : 32;
        const int first = here < 16 ? (int)here : 16, second = (int)here - first;
        if (here != shaped) lt_shape_tiles(first, second);
        shaped = here;
        lt_block(x + r * inputs, packed + n * inputs, sums, inputs, second > 0);
        lt_store_sums(sums, bias ? bias + n : 0, out + r * outputs + n, here, outputs);
      }
    _tile_release();
  }
}

/* Ask the kernel for the tiles (once a process); 1 if they may be used. */
int product_bf16_ready(void) {
  const long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#else
int product_bf16_ready(void) { return 0; }
void product_bf16(const uint16_t *x, const uint16_t *packed, const uint16_t *bias, uint16_t *out,
                  int64_t rows, int64_t inputs, int64_t outputs, int threads) {
  (void)x, (void)packed, (void)bias, (void)out, (void)rows, (void)inputs, (void)outputs;
  (void)threads;
}
#endif

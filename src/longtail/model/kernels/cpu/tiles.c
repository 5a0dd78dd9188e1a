/* AMX: tiles of 16 rows by 64 bytes, and sums += a b over pairs of bfloat16, float32 sums.
 *
 * Included by attention.c, once. An element of the sums depends only on its row of a and its column
 * of b, and takes 32 inputs at a time in order. So the scores and sums of attention here do not
 * depend on other rows.
 *
 *     scores   16 queries x 16 keys     a: queries, 32 of a head at a time     b: keys, transposed
 *     sums     16 queries x 16 of dim   a: weights of 32 keys, in bfloat16     b: values, in pairs
 */
#if (defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)) || LT_EMULATED == 2
#define LT_TILES 1
#include <sys/syscall.h>
#include <unistd.h>

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} lt_tile_shapes;

/* Memory barrier: the compiler does not know that tile operations read memory. */
#define LT_WRITTEN() __asm__ volatile("" ::: "memory")

static __thread int lt_shaped[8]; /* Configuring tiles takes as long as 20 products. */

#ifdef LT_EMULATED
/* AMX in plain C, under its names: a tile is 16 rows of 16 lanes, of which lt_shaped are in use. */
static __thread lt_u32 lt_held_tiles[8][16];

static void _tile_loadconfig(const void *shapes) { (void)shapes; }
static void _tile_release(void) {}
static void _tile_zero(int tile) { memset(lt_held_tiles[tile], 0, sizeof(lt_held_tiles[tile])); }
static void _tile_loadd(int tile, const void *from, int64_t stride) {
  for (int r = 0; r < lt_shaped[tile]; r++) memcpy(&lt_held_tiles[tile][r], (char *)from + r * stride, 64);
}
static void _tile_stored(int tile, void *to, int64_t stride) {
  for (int r = 0; r < lt_shaped[tile]; r++) memcpy((char *)to + r * stride, &lt_held_tiles[tile][r], 64);
}
static void _tile_dpbf16ps(int sums, int a, int b) {
  for (int r = 0; r < lt_shaped[sums]; r++)
    for (int pair = 0; pair < 16; pair++) {
      lt_vec *const sum = (lt_vec *)&lt_held_tiles[sums][r];
      *sum = lt_add_pairs(*sum, (lt_vec)((lt_u32){0} + lt_held_tiles[a][r][pair]),
                          (lt_vec)lt_held_tiles[b][pair]);
    }
}
#endif

/* Configure the rows of the eight tiles unless they have them; a tile with 0 rows is absent. */
static void lt_shape_tiles(const int *rows) {
  lt_tile_shapes shapes = {.palette = 1};
  if (!memcmp(lt_shaped, rows, sizeof(lt_shaped))) return;
  for (int i = 0; i < 8; i++) {
    shapes.row_bytes[i] = rows[i] ? 64 : 0;
    shapes.rows[i] = (uint8_t)rows[i];
  }
  __asm__ volatile("" ::"r"(&shapes) : "memory");
  _tile_loadconfig(&shapes);
  memcpy(lt_shaped, rows, sizeof(lt_shaped));
}

/* After the last product: released tiles are not saved on a context switch. */
static void lt_release_tiles(void) {
  if (lt_shaped[0]) _tile_release();
  memset(lt_shaped, 0, sizeof(lt_shaped));
}

/* Configure tiles 0-3 for sums, 4 for a and 5 for b, for the rows of a. Returns the tiles' rows. */
static int64_t lt_shape_for_rows(int64_t count) {
  const int rows = count < 16 ? (int)count : 16;
  lt_shape_tiles((const int[8]){rows, rows, rows, rows, rows, 16, 0, 0});
  return (count + rows - 1) / rows * rows;
}

/* 1 if the kernel permits tiles to this process, which is requested once. */
static int lt_tiles_granted(void) {
  static int found = -1;
  const long request_permission = 0x1023, tile_data = 18;
#ifdef LT_EMULATED
  found = 1;
#endif
  if (found < 0) found = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return found;
}

/* sums += a b for tiles 0 .. tiles - 1; the sums are side by side in memory, and b's tiles are
 * consecutive. Tile numbers must be literals, so they are written out. */
#define LT_EACH_TILE(DO)  \
  do {                    \
    DO(0);                \
    if (tiles > 1) DO(1); \
    if (tiles > 2) DO(2); \
    if (tiles > 3) DO(3); \
  } while (0)

LT_INLINE void lt_load_sums(const float *at, int64_t stride, int64_t tiles) {
#define LT_DO(i) _tile_loadd(i, at + 16 * i, stride)
  LT_EACH_TILE(LT_DO);
#undef LT_DO
}

LT_INLINE void lt_keep_sums(float *at, int64_t stride, int64_t tiles) {
#define LT_DO(i) _tile_stored(i, at + 16 * i, stride)
  LT_EACH_TILE(LT_DO);
#undef LT_DO
}

LT_INLINE void lt_add_products(const uint16_t *a, int64_t a_stride, const uint16_t *b,
                               int64_t tiles) {
  _tile_loadd(4, a, a_stride);
#define LT_DO(i) {_tile_loadd(5, b + 512 * i, 64); _tile_dpbf16ps(i, 4, 5);}
  LT_EACH_TILE(LT_DO);
#undef LT_DO
}

/* Addresses of 32 keys or values from number `from` on; from `end` on, `beyond`. */
LT_INLINE void lt_find(const uint16_t *first, int64_t stride, const lt_seen *seen, int64_t from,
                       int64_t end, const uint16_t *beyond, const uint16_t **found, int64_t count) {
  if (from + count <= end && from + count <= seen->context)
    for (int64_t i = 0; i < count; i++) found[i] = first + (from + i) * stride;
  else
    for (int64_t i = 0; i < count; i++)
      found[i] = from + i < end ? first + lt_place(seen, from + i) * stride : beyond;
}

/* Transpose: a tile of pairs 0 .. 15 by 16 keys, 4 pairs (16 bytes) at a time. Beyond `dim` elements
 * it is 0. */
#ifdef LT_EMULATED
LT_INLINE void lt_turn(const uint16_t *const *key, int64_t dim, lt_u32 *tile) {
  for (int q = 0; q < 16; q++)
    for (int i = 0; i < 16; i++) {
      uint32_t pair = 0;
      if (2 * q < dim) memcpy(&pair, key[i] + 2 * q, sizeof(pair));
      tile[q][i] = pair;
    }
}
#else
LT_INLINE void lt_turn(const uint16_t *const *key, int64_t dim, lt_u32 *into) {
  __m512i *const tile = (__m512i *)into;
#pragma GCC unroll 4
  for (int q = 0; q < 4; q++) {
    __m512i part[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
#define LT_LANE(L) _mm_loadu_si128((const __m128i *)(key[i + 4 * L] + 8 * q))
      part[i] = _mm512_setzero_si512();
      if (8 * q >= dim) continue;
      part[i] = _mm512_mask_broadcast_i32x4(part[i], 0x000f, LT_LANE(0));
      part[i] = _mm512_mask_broadcast_i32x4(part[i], 0x00f0, LT_LANE(1));
      part[i] = _mm512_mask_broadcast_i32x4(part[i], 0x0f00, LT_LANE(2));
      part[i] = _mm512_mask_broadcast_i32x4(part[i], 0xf000, LT_LANE(3));
#undef LT_LANE
    }
    const __m512i low = _mm512_unpacklo_epi32(part[0], part[1]);
    const __m512i low2 = _mm512_unpacklo_epi32(part[2], part[3]);
    const __m512i high = _mm512_unpackhi_epi32(part[0], part[1]);
    const __m512i high2 = _mm512_unpackhi_epi32(part[2], part[3]);
    tile[4 * q] = _mm512_unpacklo_epi64(low, low2);
    tile[4 * q + 1] = _mm512_unpackhi_epi64(low, low2);
    tile[4 * q + 2] = _mm512_unpacklo_epi64(high, high2);
    tile[4 * q + 3] = _mm512_unpackhi_epi64(high, high2);
  }
}
#endif

/* Pairs of two values' elements, in the order of lt_spread_bf16: of 32 elements the even and then
 * the odd ones; of a last 16, all. Tiles are 1 KB apart. */
LT_INLINE void lt_pair(const uint16_t *one, const uint16_t *two, int64_t parts, lt_u32 *at) {
  int64_t j = 0;
  for (; j + 1 < parts; j += 2) {
    const lt_u32 a = *(const lt_u32 *)(one + 16 * j), b = *(const lt_u32 *)(two + 16 * j);
    at[16 * j] = (a & 0xffffu) | b << 16, at[16 * j + 16] = a >> 16 | (b & 0xffff0000u);
  }
  if (j < parts)
    at[16 * j] = __builtin_convertvector(*(const lt_u16 *)(one + 16 * j), lt_u32) |
                 __builtin_convertvector(*(const lt_u16 *)(two + 16 * j), lt_u32) << 16;
}

/* As score_bf16. A tile is padded with the last query; the scores of the padding come after the
 * others and are not read. */
static void lt_score_tiles(const uint16_t *const *query, const uint16_t *keys, int64_t stride,
                           const lt_seen *seen, int64_t begin, int64_t end, float scale,
                           lt_scores *restrict scores, int64_t count, int64_t dim) {
  const int64_t parts = (dim + 31) / 32, rows = lt_shape_for_rows(count);
  lt_vec packed[LT_RUN_HEADS][4] __attribute__((aligned(64)));
  lt_u32 turned[4][4][16] __attribute__((aligned(64))); /* [part][16 keys][pair] */
  for (int64_t x = 0; x < rows; x++)
    for (int64_t j = 0; j < parts; j++)
      packed[x][j] = lt_part_bf16(query[x < count ? x : count - 1], j, dim);
  for (int64_t k = begin; k < end; k += 64) {
    const int64_t left = end - k, tiles = left >= 64 ? 4 : (left + 15) / 16;
    for (int64_t t = 0; t < tiles; t++) {
      const uint16_t *key[16];
      lt_find(keys, stride, seen, k + 16 * t, end, keys + lt_place(seen, k) * stride, key, 16);
      for (int i = 0; i < 16; i++) LT_FETCH(key[i] + LT_AHEAD * stride, dim);
      for (int64_t j = 0; j < parts; j++) {
        lt_turn(key, dim - 32 * j, turned[j][t]);
        for (int i = 0; i < 16; i++) key[i] += 32;
      }
    }
    LT_WRITTEN();
    for (int64_t x = 0; x < rows; x += 16) {
      LT_EACH_TILE(_tile_zero);
      for (int64_t j = 0; j < parts; j++)
        lt_add_products((const uint16_t *)&packed[x][j], sizeof(packed[0]),
                        (const uint16_t *)turned[j], tiles);
      lt_keep_sums(scores[x] + k - begin, sizeof(lt_scores), tiles);
    }
    for (int64_t x = 0; x < count; x++)
      for (int64_t t = 0; t < tiles; t++) *((lt_vec *)(scores[x] + k - begin) + t) *= scale;
  }
}

/* As add_bf16, with weights rounded to bfloat16. Padding of the last 32 keys has weight 0. */
static void lt_add_tiles(const lt_scores *restrict weights, const uint16_t *restrict values,
                         int64_t stride, const lt_seen *seen, int64_t begin, int64_t end,
                         const float *shrink, lt_vec (*restrict sums)[8], int64_t count,
                         int64_t dim) {
  const int64_t rows = lt_shape_for_rows(count);
  const int64_t keys = end - begin, steps = (keys + 31) / 32;
  uint16_t rounded[LT_RUN_HEADS][LT_BLOCK] __attribute__((aligned(64)));
  lt_u32 pairs[LT_BLOCK / 32][4][16] __attribute__((aligned(64))); /* [32 keys][of dim][pair] */
  static const uint16_t nothing[128];
  for (int64_t x = 0; x < rows; x++) {
    for (int64_t k = 0; k < 32 * steps; k += 16)
      *(lt_u16 *)(rounded[x] + k) =
          x < count && k < keys
              ? lt_narrowed(*(const lt_vec *)(weights[x] + k))
              : (lt_u16){0};
    for (int64_t j = 0; j < dim / 16 && x < count; j++) sums[x][j] *= shrink[x];
  }
  for (int64_t d = 0; d < dim; d += 64) {
    const int64_t tiles = dim - d >= 64 ? 4 : (dim - d) / 16;
    for (int64_t s = 0; s < steps; s++) {
      const uint16_t *value[32];
      lt_find(values, stride, seen, begin + 32 * s, end, nothing, value, 32);
      for (int i = 0; i < 32; i += 2) {
        LT_FETCH(value[i] + LT_AHEAD * stride + d, 64);
        LT_FETCH(value[i + 1] + LT_AHEAD * stride + d, 64);
        lt_pair(value[i] + d, value[i + 1] + d, tiles, pairs[s][0] + i / 2);
      }
    }
    LT_WRITTEN();
    for (int64_t x = 0; x < rows; x += 16) {
      float *at = (float *)sums[x] + d;
      lt_load_sums(at, sizeof(*sums), tiles);
      for (int64_t s = 0; s < steps; s++)
        lt_add_products(rounded[x] + 32 * s, sizeof(*rounded), (const uint16_t *)pairs[s], tiles);
      lt_keep_sums(at, sizeof(*sums), tiles);
    }
  }
}
#endif

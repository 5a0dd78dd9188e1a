/* Causal attention within sequences that lie end to end, and its gradients, for training.
 *
 * Included by kernels.c, once per element type. Elements are converted to float32 once per sequence
 * and head of keys. All five products are made of one: tiles of 6 rows by up to 4 vectors, which stay
 * in registers. A tile of scores ends at the last key that one of its rows sees.
 */
#ifndef LT_PACKED
#define LT_PACKED
#include <omp.h>

#define LT_ROWS 6   /* of a tile */
#define LT_QUERIES 48 /* of a block: 8 tiles */

/* c (+)= a b, where a[i][k] is a[i * a_row + k * a_step], and vector j of b[k] is at
 * b + k * b_step + j * b_vec. */
LT_INLINE void lt_multiply(const float *restrict a, int64_t a_row, int64_t a_step,
                           const float *restrict b, int64_t b_vec, int64_t b_step, int64_t depth,
                           float *restrict c, int64_t c_row, int add, const int vectors) {
  lt_vec sum[LT_ROWS][4];
#pragma GCC unroll 6
  for (int i = 0; i < LT_ROWS; i++)
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++)
      sum[i][j] = add ? *(const lt_vec *)(c + i * c_row + j * LT_LANES) : (lt_vec){0};
  for (int64_t k = 0; k < depth; k++, a += a_step, b += b_step) {
    lt_vec row[4];
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++) row[j] = *(const lt_vec *)(b + j * b_vec);
#pragma GCC unroll 6
    for (int i = 0; i < LT_ROWS; i++)
#pragma GCC unroll 4
      for (int j = 0; j < vectors; j++)
        sum[i][j] = lt_fma((lt_vec){0} + a[i * a_row], row[j], sum[i][j]);
  }
#pragma GCC unroll 6
  for (int i = 0; i < LT_ROWS; i++)
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++) *(lt_vec *)(c + i * c_row + j * LT_LANES) = sum[i][j];
}

/* The same for any number of vectors. */
static __attribute__((noinline)) void lt_tile(const float *a, int64_t a_row, int64_t a_step,
                                              const float *b, int64_t b_vec, int64_t b_step,
                                              int64_t depth, float *c, int64_t c_row, int add,
                                              int64_t vectors) {
#if LT_LANES == 8 /* 16 registers */
  for (; vectors >= 2; vectors -= 2, b += 2 * b_vec, c += 2 * LT_LANES)
    lt_multiply(a, a_row, a_step, b, b_vec, b_step, depth, c, c_row, add, 2);
#else
  for (; vectors >= 4; vectors -= 4, b += 4 * b_vec, c += 4 * LT_LANES)
    lt_multiply(a, a_row, a_step, b, b_vec, b_step, depth, c, c_row, add, 4);
#endif
  if (vectors == 3) lt_multiply(a, a_row, a_step, b, b_vec, b_step, depth, c, c_row, add, 3);
  if (vectors == 2) lt_multiply(a, a_row, a_step, b, b_vec, b_step, depth, c, c_row, add, 2);
  if (vectors == 1) lt_multiply(a, a_row, a_step, b, b_vec, b_step, depth, c, c_row, add, 1);
}

/* One sequence: its length, the same up to whole blocks, the size of a head, and the number of
 * positions that a token sees (its own included). */
typedef struct {
  int64_t length, padded, dim, window;
} lt_sequence;

/* Whole vectors of keys that the rows from `first` to `first + LT_ROWS - 1` may see: [from, to). */
LT_INLINE int64_t lt_vectors_from(lt_sequence s, int64_t first) {
  return first < s.window ? 0 : (first - s.window + 1) / LT_LANES;
}
LT_INLINE int64_t lt_vectors_to(int64_t first) { return (first + LT_ROWS - 1) / LT_LANES + 1; }
/* First key of the first tile of keys that a block of queries may see. */
LT_INLINE int64_t lt_first_tile(lt_sequence s, int64_t start) {
  return lt_vectors_from(s, start) * LT_LANES / LT_ROWS * LT_ROWS;
}

/* 2^x of lanes up to 126, with 0 from -127 down; NaN stays NaN. */
LT_INLINE lt_vec lt_power(lt_vec x) {
  x = lt_max((lt_vec){0} - 127.0f, x);
  const lt_index n = __builtin_convertvector(x - 0.5f, lt_index);
  const lt_vec f = x - __builtin_convertvector(n, lt_vec);
  return (lt_vec)((n + 127) << 23) * LT_EXP2(f);
}

/* The highest and the sum of all lanes. */
LT_INLINE float lt_top_lane(lt_vec v) {
#pragma GCC unroll 4
  for (int step = 0; step < LT_FOLDS; step++) v = lt_max(lt_half(v, v, step, 0), lt_half(v, v, step, 1));
  return v[0];
}
LT_INLINE float lt_lane_sum(lt_vec v) {
#pragma GCC unroll 4
  for (int step = 0; step < LT_FOLDS; step++) v = lt_fold(v, v, step);
  return v[0];
}

/* Weights of a tile's scores, in place: exp(score - log sum), 0 where the row does not see the key.
 * `logs` is given (backward), or with `sums` computed (forward: weights are relative to the highest
 * score, and `sums` are their sums). */
static void lt_tile_weights(float *scores, int64_t row_size, lt_sequence s, int64_t first,
                            float *logs, float *sums) {
  const lt_index lane = LT_NUMBERS;
  const int64_t from = lt_vectors_from(s, first) * LT_LANES, to = lt_vectors_to(first) * LT_LANES;
  for (int64_t i = 0; i < LT_ROWS; i++, scores += row_size) {
    const int64_t row = first + i, low = row < s.window ? 0 : row - s.window + 1;
    if (row >= s.length) {
      memset(scores + from, 0, (size_t)(to - from) * sizeof(float));
      if (sums) logs[i] = 0.0f, sums[i] = 1.0f;
      continue;
    }
    lt_vec top = (lt_vec){0} - INFINITY, sum = {0};
    for (int64_t k = from; k < to; k += LT_LANES) { /* the first and the last ones are cut */
      const lt_index seen =
          (lt_index)(lane <= (int32_t)(row - k)) & (lt_index)(lane >= (int32_t)(low - k));
      lt_vec *at = (lt_vec *)(scores + k);
      *at = lt_select(seen, *at, (lt_vec){0} - INFINITY);
      top = lt_max(*at, top);
    }
    top = (lt_vec){0} + (sums ? lt_top_lane(top) : logs[i]);
    for (int64_t k = from; k < to; k += LT_LANES) {
      const lt_vec weight = lt_power((*(lt_vec *)(scores + k) - top) * LT_LOG2E);
      *(lt_vec *)(scores + k) = weight, sum += weight;
    }
    if (sums) sums[i] = lt_lane_sum(sum), logs[i] = top[0] + logf(sums[i]);
  }
}
#endif

/* Rows of `dim` elements as float32, times `scale`; rows from `count` to `padded` are 0. */
static void NAME(packed_rows)(const T *restrict from, int64_t stride, int64_t count, int64_t padded,
                              int64_t dim, float scale, float *restrict to) {
  for (int64_t r = 0; r < count; r++)
    for (int64_t i = 0; i < dim; i++) to[r * dim + i] = LOAD(from[r * stride + i]) * scale;
  memset(to + count * dim, 0, (size_t)((padded - count) * dim) * sizeof(float));
}

/* Transposed: panels [16 rows][dim][16]. */
static void NAME(packed_columns)(const T *restrict from, int64_t stride, int64_t count,
                                 int64_t padded, int64_t dim, float *restrict to) {
  for (int64_t r = 0; r < padded; r++) {
    float *panel = to + r / LT_LANES * LT_LANES * dim + r % LT_LANES;
    for (int64_t i = 0; i < dim; i++)
      panel[i * LT_LANES] = r < count ? LOAD(from[r * stride + i]) : 0.0f;
  }
}

/* Scores of a tile of rows: their products with the columns that they may see. */
LT_INLINE void NAME(packed_scores)(const float *rows, const float *columns, lt_sequence s,
                                   int64_t first, float *scores) {
  const int64_t from = lt_vectors_from(s, first), to = lt_vectors_to(first), panel = LT_LANES * s.dim;
  lt_tile(rows, s.dim, 1, columns + from * panel, panel, LT_LANES, s.dim, scores + from * LT_LANES,
          s.padded, 0, to - from);
}

/* Weighted sums of a tile: weights times the rows of the keys that it may see. */
LT_INLINE void NAME(packed_sums)(const float *weights, const float *rows, lt_sequence s,
                                 int64_t first, float *sums) {
  const int64_t from = lt_vectors_from(s, first) * LT_LANES, to = lt_vectors_to(first) * LT_LANES;
  lt_tile(weights + from, s.padded, 1, rows + from * s.dim, LT_LANES, s.dim, to - from, sums, s.dim,
          0, s.dim / LT_LANES);
}

/* One head of queries over one sequence: out, and the log of each row's sum of exponentials. */
static void NAME(packed_head)(const T *queries, int64_t stride, const float *columns,
                              const float *values, lt_sequence s, float *scratch, T *out,
                              int64_t out_stride, float *logs, int64_t log_stride) {
  float *rows = scratch, *scores = rows + LT_QUERIES * s.dim, *sums = scores + LT_ROWS * s.padded;
  const float scale = 1.0f / sqrtf((float)s.dim);
  for (int64_t start = 0; start < s.length; start += LT_QUERIES) {
    const int64_t left = s.length - start, count = left < LT_QUERIES ? left : LT_QUERIES;
    NAME(packed_rows)(queries + start * stride, stride, count, LT_QUERIES, s.dim, scale, rows);
    for (int64_t t = 0; t < count; t += LT_ROWS) {
      float log_sums[LT_ROWS], totals[LT_ROWS];
      NAME(packed_scores)(rows + t * s.dim, columns, s, start + t, scores);
      lt_tile_weights(scores, s.padded, s, start + t, log_sums, totals);
      NAME(packed_sums)(scores, values, s, start + t, sums);
      for (int64_t i = 0; i < LT_ROWS && t + i < count; i++) {
        T *restrict at = out + (start + t + i) * out_stride;
        const float share = 1.0f / totals[i];
        for (int64_t d = 0; d < s.dim; d++) at[d] = STORE(sums[i * s.dim + d] * share);
        logs[(start + t + i) * log_stride] = log_sums[i];
      }
    }
  }
}

/* One sequence and one head of keys with its `group` heads of queries. */
static void NAME(packed_task)(const T *queries, const T *keys, const T *values, int64_t stride,
                              lt_sequence s, int64_t group, float *scratch, T *out,
                              int64_t out_stride, float *logs, int64_t log_stride) {
  float *columns = scratch, *rows = columns + s.padded * s.dim;
  NAME(packed_columns)(keys, stride, s.length, s.padded, s.dim, columns);
  NAME(packed_rows)(values, stride, s.length, s.padded, s.dim, 1.0f, rows);
  for (int64_t g = 0; g < group; g++)
    NAME(packed_head)(queries + g * s.dim, stride, columns, rows, s, rows + s.padded * s.dim,
                      out + g * s.dim, out_stride, logs + g, log_stride);
}

LT_INLINE lt_sequence NAME(packed_sequence)(const int64_t *starts, int64_t index, int64_t dim,
                                            int64_t window) {
  const int64_t length = starts[index + 1] - starts[index];
  const int64_t padded = (length + LT_QUERIES - 1) / LT_QUERIES * LT_QUERIES;
  return (lt_sequence){length, padded, dim, window > 0 ? window : length};
}

/* Attend within each of `count` sequences of starts[i] to starts[i + 1]. Tokens of queries, keys and
 * values are `stride` elements apart; out is [tokens][heads][dim], logs [tokens][heads]. `scratch` has
 * `room` floats per thread. */
void NAME(attend_packed)(const T *queries, const T *keys, const T *values, int64_t stride,
                         const int64_t *starts, int64_t count, T *out, float *logs, float *scratch,
                         int64_t room, int64_t heads, int64_t kv_heads, int64_t dim,
                         int64_t window, int threads) {
  const int64_t group = heads / kv_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t task = 0; task < count * kv_heads; task++) {
    const int64_t index = task / kv_heads, h = task % kv_heads, start = starts[index];
    const lt_sequence s = NAME(packed_sequence)(starts, index, dim, window);
    NAME(packed_task)(queries + start * stride + h * group * dim, keys + start * stride + h * dim,
                      values + start * stride + h * dim, stride, s, group,
                      scratch + omp_get_thread_num() * room, out + (start * heads + h * group) * dim,
                      heads * dim, logs + start * heads + h * group, heads);
  }
}

/* A block of queries in the backward pass: float32 rows, weights, and gradients of scores. */
typedef struct {
  float *rows, *outer, *weights, *grads, *sums; /* outer: gradient of the output */
  float logs[LT_QUERIES];
} NAME(packed_block);

/* Weights P = exp(S - log sum) and gradients dS = P (dP - sum P dP) of a tile, where dP = dO V^T. (The
 * sum is that of dO with the output, too, but the stored output is rounded.) */
static void NAME(packed_grads)(NAME(packed_block) *b, const float *keys, const float *values,
                               lt_sequence s, int64_t start, int64_t t) {
  float *weights = b->weights + t * s.padded, *grads = b->grads + t * s.padded;
  const int64_t first = start + t, begin = lt_first_tile(s, start);
  const int64_t from = lt_vectors_from(s, first) * LT_LANES, to = lt_vectors_to(first) * LT_LANES;
  NAME(packed_scores)(b->rows + t * s.dim, keys, s, first, weights);
  NAME(packed_scores)(b->outer + t * s.dim, values, s, first, grads);
  lt_tile_weights(weights, s.padded, s, first, b->logs + t, NULL);
  for (int64_t i = 0; i < LT_ROWS; i++) {
    float *restrict w = weights + i * s.padded, *restrict g = grads + i * s.padded;
    lt_vec sums = {0};
    for (int64_t k = from; k < to; k += LT_LANES)
      sums = lt_fma(*(lt_vec *)(w + k), *(lt_vec *)(g + k), sums);
    const float sum = lt_lane_sum(sums);
    for (int64_t k = from; k < to; k++) g[k] = w[k] * (g[k] - sum);
    for (int64_t k = begin; k < from; k++) w[k] = g[k] = 0.0f; /* rows before this one saw them */
  }
}

/* grad_keys += dS^T Q and grad_values += P^T dO, over the keys that a block may see. */
static void NAME(packed_collect)(const NAME(packed_block) *b, lt_sequence s, int64_t start,
                                 int64_t tiled, float *grad_keys, float *grad_values) {
  const int64_t vectors = s.dim / LT_LANES;
  for (int64_t k = lt_first_tile(s, start); k < start + tiled; k += LT_ROWS) {
    const int64_t r = k > start ? k - start : 0, depth = tiled - r;
    const int64_t at = r * s.padded + k, row = r * s.dim;
    lt_tile(b->weights + at, 1, s.padded, b->outer + row, LT_LANES, s.dim, depth,
            grad_values + k * s.dim, s.dim, 1, vectors);
    lt_tile(b->grads + at, 1, s.padded, b->rows + row, LT_LANES, s.dim, depth,
            grad_keys + k * s.dim, s.dim, 1, vectors);
  }
}

/* Arrays of one head of queries: tokens `stride` apart (grads of the output and logs: by heads). */
typedef struct {
  const T *queries, *grad_out;
  const float *logs;
  T *grad_queries;
  int64_t stride, out_stride, log_stride, grad_stride;
} NAME(packed_arrays);

static void NAME(packed_head_backward)(NAME(packed_arrays) a, const float *key_columns,
                                       const float *key_rows, const float *value_columns,
                                       lt_sequence s, float *scratch, float *grad_keys,
                                       float *grad_values) {
  const float scale = 1.0f / sqrtf((float)s.dim);
  NAME(packed_block) b = {.rows = scratch};
  b.outer = b.rows + LT_QUERIES * s.dim, b.sums = b.outer + LT_QUERIES * s.dim;
  b.weights = b.sums + LT_ROWS * s.dim, b.grads = b.weights + LT_QUERIES * s.padded;
  for (int64_t start = 0; start < s.length; start += LT_QUERIES) {
    const int64_t left = s.length - start, count = left < LT_QUERIES ? left : LT_QUERIES;
    const int64_t tiled = (count + LT_ROWS - 1) / LT_ROWS * LT_ROWS;
    NAME(packed_rows)(a.queries + start * a.stride, a.stride, count, LT_QUERIES, s.dim, scale, b.rows);
    NAME(packed_rows)(a.grad_out + start * a.out_stride, a.out_stride, count, LT_QUERIES, s.dim, 1.0f,
                      b.outer);
    for (int64_t i = 0; i < LT_QUERIES; i++)
      b.logs[i] = i < count ? a.logs[(start + i) * a.log_stride] : 0.0f;
    for (int64_t t = 0; t < tiled; t += LT_ROWS) {
      NAME(packed_grads)(&b, key_columns, value_columns, s, start, t);
      NAME(packed_sums)(b.grads + t * s.padded, key_rows, s, start + t, b.sums);
      for (int64_t i = 0; i < LT_ROWS && t + i < count; i++) {
        T *at = a.grad_queries + (start + t + i) * a.grad_stride;
        for (int64_t d = 0; d < s.dim; d++) at[d] = STORE(b.sums[i * s.dim + d] * scale);
      }
    }
    NAME(packed_collect)(&b, s, start, tiled, grad_keys, grad_values);
  }
}

/* Gradients of `attend_packed`. Those of queries, keys and values have tokens `grad_stride` apart. */
void NAME(attend_packed_backward)(const T *queries, const T *keys, const T *values, int64_t stride,
                                  const int64_t *starts, int64_t count, const float *logs,
                                  const T *grad_out, T *grad_queries, T *grad_keys,
                                  T *grad_values, int64_t grad_stride,
                                  float *scratch, int64_t room, int64_t heads, int64_t kv_heads,
                                  int64_t dim, int64_t window, int threads) {
  const int64_t group = heads / kv_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t task = 0; task < count * kv_heads; task++) {
    const int64_t index = task / kv_heads, h = task % kv_heads, start = starts[index];
    const lt_sequence s = NAME(packed_sequence)(starts, index, dim, window);
    const int64_t size = s.padded * dim, kv = start * stride + h * dim;
    float *part[6]; /* columns of keys and values, rows of keys, their gradients, the rest */
    for (int i = 0; i < 6; i++) part[i] = scratch + omp_get_thread_num() * room + i * size;
    NAME(packed_columns)(keys + kv, stride, s.length, s.padded, dim, part[0]);
    NAME(packed_columns)(values + kv, stride, s.length, s.padded, dim, part[1]);
    NAME(packed_rows)(keys + kv, stride, s.length, s.padded, dim, 1.0f, part[2]);
    memset(part[3], 0, (size_t)(2 * size) * sizeof(float));
    for (int64_t head = h * group; head < (h + 1) * group; head++) {
      const int64_t at = (start * heads + head) * dim;
      const NAME(packed_arrays) a = {
          .queries = queries + start * stride + head * dim, .stride = stride,
          .grad_out = grad_out + at, .out_stride = heads * dim,
          .logs = logs + start * heads + head, .log_stride = heads,
          .grad_queries = grad_queries + start * grad_stride + head * dim,
          .grad_stride = grad_stride,
      };
      NAME(packed_head_backward)(a, part[0], part[2], part[1], s, part[5], part[3], part[4]);
    }
    for (int64_t r = 0; r < s.length; r++) {
      T *key = grad_keys + (start + r) * grad_stride + h * dim;
      T *value = grad_values + (start + r) * grad_stride + h * dim;
      for (int64_t i = 0; i < dim; i++) key[i] = STORE(part[3][r * dim + i]);
      for (int64_t i = 0; i < dim; i++) value[i] = STORE(part[4][r * dim + i]);
    }
  }
}

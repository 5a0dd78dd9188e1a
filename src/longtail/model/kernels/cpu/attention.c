/* Attention of tokens over rows of a cache, with bits that are independent of the batch.
 *
 * Included by kernels.c, once per element type. The tokens of a draft see nearly the same keys, so
 * a key is read once for as many query heads as registers allow.
 */
#ifndef LT_ATTENTION
#define LT_ATTENTION
#include "vectors.c"

/* Prefetch `count` elements, or the lines that begin in bytes `from` to `to`; the rows of other heads
 * in between defeat the hardware's prefetch. A key takes less time than memory needs, so what is read
 * next comes to the second cache a block before:
 * values while keys are scored, and the next keys while values are added. From there LT_AHEAD keys
 * suffice. */
#define LT_AHEAD 16
#define LT_PREFETCH(p, from, to, locality)                                       \
  for (size_t line = ((from) + 63) / 64 * 64; line < (size_t)(to); line += 64) \
  __builtin_prefetch((const char *)(p) + line, 0, locality)
#define LT_FETCH(p, count) LT_PREFETCH(p, 0, (count) * sizeof(*(p)), 3)
#define LT_FETCH_NEXT(p, count) LT_PREFETCH(p, 0, (count) * sizeof(*(p)), 2)

/* Keys that a token sees: the first `context`, then some of the following, listed one by one (its
 * ancestors in a draft). Every sum runs in the order in which the token sees the keys, which depends
 * neither on their slots nor on other tokens: with and without drafting, in a run or alone, the bits
 * are the same. */
typedef struct {
  int64_t context, count, picked[64];
} lt_seen;

LT_INLINE int64_t lt_place(const lt_seen *seen, int64_t number) {
  return number < seen->context ? number : seen->picked[number - seen->context];
}

/* Turn `count` more scores into weights, in place: 2^(score - maximum so far), 0 up to the next 16.
 * Returns the factor of the earlier weights. Base 2: scores carry log2(e). */
static __attribute__((noinline)) float lt_weigh(float *scores, int64_t count, float *highest,
                                                lt_vec *total) {
  const lt_index lane = LT_NUMBERS;
  const int64_t last = (count - 1) / LT_LANES;
  lt_vec *at = (lt_vec *)scores, top = (lt_vec){0} + *highest;
  at[last] = lt_select(lane < (int32_t)(count - last * LT_LANES), at[last], (lt_vec){0} - INFINITY);
  for (int64_t k = 0; k <= last; k++) top = lt_max(at[k], top);
#pragma GCC unroll 4
  for (int step = 0; step < LT_FOLDS; step++)
    top = lt_max(lt_half(top, top, step, 0), lt_half(top, top, step, 1));
  const float now = top[0], shrink = lt_exp2(*highest - now);
  lt_vec sum = *total * shrink;
  for (int64_t k = 0; k <= last; k++) { /* lt_exp2 of x <= 0: at -127, the power's bits are 0 */
    const lt_vec x = lt_max((lt_vec){0} - 127.0f, at[k] - now);
    const lt_index n = __builtin_convertvector(x - 0.5f, lt_index);
    const lt_vec f = x - __builtin_convertvector(n, lt_vec);
    at[k] = (lt_vec)((n + 127) << 23) * LT_EXP2(f);
    sum += at[k];
  }
  *highest = now, *total = sum;
  return shrink;
}

/* CALL(heads, size), both literals, for `count` heads x, x + 1, ...: at most `most` at a time, so that
 * all intermediate values stay in registers. */
#define LT_BY_HEADS(size, most)                                                           \
  for (int64_t x = 0, left; (left = count - x) > 0;)                                      \
    if ((most) >= 6 && left >= 6) { CALL(6, size); x += 6; }                              \
    else if ((most) >= 4 && left >= 4) { CALL(4, size); x += 4; }                         \
    else if (left >= 3) { CALL(3, size); x += 3; }                                        \
    else if (left >= 2) { CALL(2, size); x += 2; }                                        \
    else { CALL(1, size); x += 1; }
#define LT_PARTS (128 / LT_LANES) /* vectors of a head, at most */
#define LT_SCORED (LT_LANES == 8 ? 3 : 4) /* heads, by 4 keys */
#define LT_SUMMED (LT_LANES == 8 ? 3 : 6) /* heads, by 4 vectors */
#define LT_BLOCK 256 /* keys, scored before their values are added */
#define LT_RUN_HEADS 32
#define LT_RUN_TOKENS 16
#define LT_CUT_TOKENS 512 /* number of tokens that are cut into runs at a time */
#define LT_TOGETHER 32 /* a run shares a multiple of this number of keys */
typedef float lt_scores[LT_BLOCK];

#include "tiles.c"
#endif

/* Compute the scores of keys `begin` to `end`, up to whole vectors, for the heads that see them: 4 keys
 * at a time, by all heads. Number k of `next` is prefetched with key k. */
LT_INLINE void NAME(score_heads)(const T *const *query, const T *keys, const T *next, int64_t stride,
                                 const lt_seen *seen, int64_t begin, int64_t end, float scale,
                                 lt_scores *restrict scores, const int64_t dim, const int64_t heads) {
  const int64_t parts = NAME(lt_parts)(dim);
  T gathered[LT_LANES * 128];
  lt_vec q[LT_PARTS + 1][LT_SCORED], four[LT_SCORED][4];
#pragma GCC unroll 4
  for (int64_t j = 0; j < parts; j += 2)
#pragma GCC unroll 4
    for (int64_t g = 0; g < heads; g++) {
      lt_vec part[2] = {{0}};
      NAME(lt_split)(query[g], j, j + 1 < parts, dim, part);
      q[j][g] = part[0], q[j + 1][g] = part[1];
    }
  for (int64_t k = begin; k < end; k += LT_LANES) {
    const T *at = keys + k * stride;
    int64_t step = stride;
    if (k + LT_LANES > seen->context) { /* gather them; the last one pads */
      for (int64_t i = 0; i < LT_LANES; i++)
        memcpy(gathered + i * dim, keys + lt_place(seen, k + i < end ? k + i : end - 1) * stride,
               (size_t)dim * sizeof(T));
      at = gathered, step = dim;
    }
#pragma GCC unroll 4
    for (int64_t i = 0; i < LT_LANES; i += 4, at += 4 * step) {
      lt_vec dots[LT_SCORED][4];
#pragma GCC unroll 4
      for (int side = 0; side < 4; side++)
#pragma GCC unroll 4
        for (int64_t g = 0; g < heads; g++) dots[g][side] = (lt_vec){0};
#pragma GCC unroll 4
      for (int64_t j = 0; j < parts; j += 2) {
        const int both = j + 1 < parts;
        const size_t from = j * dim * sizeof(T) / parts;
        const size_t to = both ? (j + 2) * dim * sizeof(T) / parts : dim * sizeof(T);
#pragma GCC unroll 4
        for (int side = 0; side < 4; side++) {
          lt_vec key[2];
          LT_PREFETCH(at + (LT_AHEAD + side) * step, from, to, 3);
          LT_PREFETCH(next + (k + i + side) * stride, from, to, 2);
          NAME(lt_split)(at + side * step, j, both, dim, key);
#pragma GCC unroll 4
          for (int64_t g = 0; g < heads; g++) {
            dots[g][side] = NAME(lt_dot)(q[j][g], key[0], dots[g][side]);
            if (both) dots[g][side] = NAME(lt_dot)(q[j + 1][g], key[1], dots[g][side]);
          }
        }
      }
#pragma GCC unroll 4
      for (int64_t g = 0; g < heads; g++)
        four[g][i / 4] = lt_fold(lt_fold(dots[g][0], dots[g][1], 0),
                                 lt_fold(dots[g][2], dots[g][3], 0), 1);
    }
#pragma GCC unroll 4
    for (int64_t g = 0; g < heads; g++) {
#if LT_LANES == 16
      four[g][0] = lt_fold(lt_fold(four[g][0], four[g][1], 2), lt_fold(four[g][2], four[g][3], 2), 3);
#elif LT_LANES == 8
      four[g][0] = lt_fold(four[g][0], four[g][1], 2);
#endif
      *(lt_vec *)(scores[g] + k - begin) = four[g][0] * scale;
    }
  }
}

static __attribute__((noinline)) void NAME(score)(const T *const *query, const T *keys,
                                                  const T *next, int64_t stride,
                                                  const lt_seen *seen, int64_t begin, int64_t end,
                                                  float scale, float *scores, int64_t count,
                                                  int64_t dim) {
  if (begin >= end) return;
#if defined(LT_TILES) && defined(T_TILES)
  if (lt_tiles_granted())
    return lt_score_tiles(query, keys, stride, seen, begin, end, scale, (lt_scores *)scores, count,
                          dim);
#endif
#define CALL(heads, size)                                                   \
  NAME(score_heads)(query + x, keys, next, stride, seen, begin, end, scale, \
                    (lt_scores *)scores + x, size, heads)
  switch (dim) {
    case 16: LT_BY_HEADS(16, LT_SCORED) break;
    case 32: LT_BY_HEADS(32, LT_SCORED) break;
    case 64: LT_BY_HEADS(64, LT_SCORED) break;
    case 80: LT_BY_HEADS(80, LT_SCORED) break;
    case 96: LT_BY_HEADS(96, LT_SCORED) break;
    default: LT_BY_HEADS(128, LT_SCORED)
  }
#undef CALL
}

/* sums = sums * shrink + weighted values of keys `begin` to `end`, in order, for `parts` vectors of a
 * head from number `first` on. Those of number k of `next` are prefetched with value k. */
LT_INLINE void NAME(add_heads)(const lt_scores *restrict weights, const T *restrict values,
                               const T *next, int64_t stride, const lt_seen *seen, int64_t begin,
                               int64_t end, const float *shrink,
                               lt_vec (*restrict sums)[LT_PARTS], int64_t first,
                               const int64_t parts, const int64_t heads) {
  lt_vec sum[LT_SUMMED][4];
  values += first * LT_LANES, next += first * LT_LANES;
#pragma GCC unroll 8
  for (int64_t g = 0; g < heads; g++)
#pragma GCC unroll 4
    for (int64_t j = 0; j < parts; j++) sum[g][j] = sums[g][first + j] * shrink[g];
  for (int64_t k = begin; k < end; k++) {
    const T *at = values + lt_place(seen, k) * stride;
    LT_FETCH(at + LT_AHEAD * stride, parts * LT_LANES);
    LT_FETCH_NEXT(next + k * stride, parts * LT_LANES);
#pragma GCC unroll 2
    for (int64_t j = 0; j < parts; j += 2) {
      lt_vec value[2];
      NAME(lt_spread)(at + j * LT_LANES, j + 1 < parts, value);
#pragma GCC unroll 8
      for (int64_t g = 0; g < heads; g++) {
        const lt_vec weight = lt_all_lanes(weights[g] + k - begin);
        sum[g][j] = lt_fma(weight, value[0], sum[g][j]);
        if (j + 1 < parts) sum[g][j + 1] = lt_fma(weight, value[1], sum[g][j + 1]);
      }
    }
  }
#pragma GCC unroll 8
  for (int64_t g = 0; g < heads; g++)
#pragma GCC unroll 4
    for (int64_t j = 0; j < parts; j++) sums[g][first + j] = sum[g][j];
}

static __attribute__((noinline)) void NAME(add)(const float *weights, const T *values,
                                                const T *next, int64_t stride,
                                                const lt_seen *seen, int64_t begin, int64_t end,
                                                const float *shrink, lt_vec (*sums)[LT_PARTS],
                                                int64_t count, int64_t dim) {
#if defined(LT_TILES) && defined(T_TILES)
  if (lt_tiles_granted())
    return lt_add_tiles((const lt_scores *)weights, values, stride, seen, begin, end, shrink, sums,
                        count, dim);
#endif
  const int64_t parts = dim / LT_LANES;
  for (int64_t first = 0, here; first < parts; first += here) {
    here = parts - first >= 4 ? 4 : parts - first >= 2 ? 2 : 1;
#define CALL(heads, size)                                                                 \
  NAME(add_heads)((const lt_scores *)weights + x, values, next, stride, seen, begin, end, \
                  shrink + x, sums + x, first, size, heads)
    if (here == 4) LT_BY_HEADS(4, LT_SUMMED)
    else if (here == 2) LT_BY_HEADS(2, LT_SUMMED)
    else LT_BY_HEADS(1, LT_SUMMED)
#undef CALL
  }
}

/* Attend `group` query heads of each token of a run: consecutive tokens that see the same row from
 * the same slot on. Keys that all see are read for several heads at once; the others token by token.
 * Sums are rescaled block by block, so the scores of one block are in memory at a time. `next` are
 * the keys of the run after this one. */
static void NAME(attend_run)(const T *queries, int64_t token_stride, const T *keys,
                             const T *values, const T *next, int64_t stride, T *out,
                             int64_t out_stride, const lt_seen *seen, int64_t tokens,
                             int64_t group, int64_t dim) {
  const float scale = LT_LOG2E / sqrtf((float)dim);
  const int64_t heads = tokens * group, parts = dim / LT_LANES;
  lt_scores scores[LT_RUN_HEADS];
  float highest[LT_RUN_HEADS], shrink[LT_RUN_HEADS];
  lt_vec sums[LT_RUN_HEADS][LT_PARTS], totals[LT_RUN_HEADS];
  const T *query[LT_RUN_HEADS];
  int64_t shared = tokens > 1 ? seen->context : 0, longest = 0;
  for (int64_t t = 0; t < tokens; t++) {
    shared = seen[t].context < shared ? seen[t].context : shared;
    longest = seen[t].count > longest ? seen[t].count : longest;
  }
  shared -= shared % LT_TOGETHER;
  for (int64_t x = 0; x < heads; x++) {
    query[x] = queries + x / group * token_stride + x % group * dim;
    highest[x] = -INFINITY, totals[x] = (lt_vec){0};
    memset(sums[x], 0, sizeof(sums[x]));
  }
  for (int64_t first = 0; first < longest; first += LT_BLOCK) {
    const int64_t block_end = first + LT_BLOCK;
    const int64_t split = shared < first ? first : shared < block_end ? shared : block_end;
    const T *coming = block_end < longest ? keys + LT_BLOCK * stride : next - first * stride;
    NAME(score)(query, keys, values, stride, seen, first, split, scale, scores[0], heads, dim);
    for (int64_t t = 0, x = 0; t < tokens; t++, x += group) {
      const int64_t end = seen[t].count < block_end ? seen[t].count : block_end;
      float *own = scores[x] + split - first;
      NAME(score)(query + x, keys, values, stride, seen + t, split, end, scale, own, group, dim);
      for (int64_t g = x; g < x + group && first < end; g++)
        shrink[g] = lt_weigh(scores[g], end - first, highest + g, totals + g);
    }
    if (first < split) {
      NAME(add)(scores[0], values, coming, stride, seen, first, split, shrink, sums, heads, dim);
      for (int64_t x = 0; x < heads; x++) shrink[x] = 1.0f;
    }
    for (int64_t t = 0, x = 0; t < tokens; t++, x += group) {
      const int64_t end = seen[t].count < block_end ? seen[t].count : block_end;
      const float *own = scores[x] + split - first;
      if (split < end)
        NAME(add)(own, values, coming, stride, seen + t, split, end, shrink + x, sums + x, group,
                  dim);
    }
  }
  for (int64_t x = 0; x < heads; x++) {
    float total = 0.0f;
    for (int i = 0; i < LT_LANES; i++) total += totals[x][i];
    NAME(lt_gather)(sums[x], parts, 1.0f / total, out + x / group * out_stride + x % group * dim);
  }
}

/* Return the first slot that token t sees; with a window it sees the last `window` positions. */
LT_INLINE int64_t NAME(first_seen)(const int64_t *contexts, const int64_t *depths, int64_t t,
                                   int64_t window) {
  const int64_t first = contexts[t] + depths[t] - window;
  return window <= 0 || first < 0 ? 0 : first < contexts[t] ? first : contexts[t];
}

/* Cut the tokens [begin, end) into runs [starts[i], starts[i + 1]) of at most `most` tokens of one
 * row, which see it from the same slot on. Returns the number of runs. */
static int64_t NAME(cut_runs)(const int64_t *rows, const int64_t *contexts, const int64_t *depths,
                              int64_t begin, int64_t end, int64_t window, int64_t most,
                              int64_t *starts) {
  int64_t count = 0, row = -1, first = -1;
  for (int64_t t = begin; t < end; t++) {
    const int64_t own = NAME(first_seen)(contexts, depths, t, window);
    if (rows[t] != row || own != first || t - starts[count - 1] == most) starts[count++] = t;
    row = rows[t], first = own;
  }
  starts[count] = end;
  return count;
}

/* Each of `tokens` queries sees the first contexts[t] slots of its row (with a window, those of the
 * last `window` positions), then the following slots whose bits are set in visible[t]. depths[t] is
 * the token's number of positions after its context. */
void NAME(attend_rows)(const T *restrict queries, int64_t token_stride,
                       const T *restrict key_cache, const T *restrict value_cache,
                       int64_t row_stride, const int64_t *restrict rows,
                       const int64_t *restrict contexts, const int64_t *restrict depths,
                       const int64_t *restrict visible, T *restrict out, int64_t tokens,
                       int64_t heads, int64_t kv_heads, int64_t dim, int64_t window,
                       int threads) {
  const int64_t group = heads / kv_heads, stride = kv_heads * dim;
  int64_t most = LT_RUN_HEADS / group, share = tokens * kv_heads / (threads > 1 ? threads : 1);
  most = most < LT_RUN_TOKENS ? most : LT_RUN_TOKENS;
  most = most < share ? most : share; /* short enough that every thread has a run */
  most = most > 1 ? most : 1;
  for (int64_t begin = 0; begin < tokens; begin += LT_CUT_TOKENS) {
    int64_t starts[LT_CUT_TOKENS + 1];
    const int64_t end = tokens - begin < LT_CUT_TOKENS ? tokens : begin + LT_CUT_TOKENS;
    const int64_t runs = NAME(cut_runs)(rows, contexts, depths, begin, end, window, most, starts);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(dynamic, 1)
      for (int64_t task = 0; task < runs * kv_heads; task++) {
        const int64_t t = starts[task / kv_heads], h = task % kv_heads;
        const int64_t run = starts[task / kv_heads + 1] - t;
        const int64_t first = NAME(first_seen)(contexts, depths, t, window);
        lt_seen seen[LT_RUN_TOKENS];
        for (int64_t i = 0; i < run; i++) {
          uint64_t mask = (uint64_t)visible[t + i];
          int64_t context = contexts[t + i] - first;
          for (; mask & 1; mask >>= 1) context++; /* consecutive slots are context, too */
          seen[i].context = seen[i].count = context;
          for (int64_t at = context + 1; mask >>= 1; at++)
            if (mask & 1) seen[i].picked[seen[i].count++ - context] = at;
        }
        const int64_t start = rows[t] * row_stride + first * stride + h * dim;
        const int64_t after = starts[(task + 1) / kv_heads], after_head = (task + 1) % kv_heads;
        const T *next = key_cache + start; /* with several threads another one takes the next */
        if (threads == 1 && task + 1 < runs * kv_heads)
          next = key_cache + rows[after] * row_stride + after_head * dim +
                 NAME(first_seen)(contexts, depths, after, window) * stride;
        for (int64_t g = 0, taken; g < group; g += taken) {
          taken = group - g < LT_RUN_HEADS ? group - g : LT_RUN_HEADS;
          const int64_t head = h * group + g;
          NAME(attend_run)(queries + t * token_stride + head * dim, token_stride,
                           key_cache + start, value_cache + start, next, stride,
                           out + (t * heads + head) * dim, heads * dim, seen, run, taken, dim);
        }
      }
#ifdef LT_TILES
      lt_release_tiles();
#endif
    }
  }
}

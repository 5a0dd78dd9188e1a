/* Partial selection: the prefix of a row's weights in falling order, by their number or by their sum.
 *
 * Included by draws.c, once. No weights are sorted but those around the end of the prefix.
 */
#ifndef LT_SELECT
#define LT_SELECT
#include <float.h>
#include <stdlib.h>
#include "noise.c"

#define LT_BLOCK 128
typedef double lt_doubles __attribute__((vector_size(8 * LT_LANES)));
typedef struct {
  float weight;
  int32_t entry;
} lt_listed;

/* How a row is sampled. */
typedef struct {
  int64_t vocab, top_k;
  double temperature, top_p, min_p;
  lt_key key;
  float *weights, *some; /* scratch, whole blocks */
  lt_listed *listed;     /* scratch, one per entry */
} lt_row;

/* Number and sum of the weights from `least` on. */
typedef struct {
  int64_t count;
  double mass;
} lt_part;

/* Some weights, and zeros up to a whole block. */
typedef struct {
  const float *at;
  int64_t size;
} lt_weights;

static lt_part lt_from(lt_weights all, float least) {
  lt_index count = {0};
  lt_doubles mass = {0};
  for (int64_t start = 0; start < all.size; start += LT_BLOCK) {
    lt_vec sum = {0};
#pragma GCC unroll 8
    for (int64_t i = 0; i < LT_BLOCK; i += LT_LANES) {
      const lt_vec w = *(const lt_vec *)(all.at + start + i);
      const lt_index in = w >= least;
      count -= in, sum += (lt_vec)(in & (lt_index)w);
    }
    mass += __builtin_convertvector(sum, lt_doubles);
  }
  lt_part part = {0, 0.0};
  for (int i = 0; i < LT_LANES; i++) part.count += count[i], part.mass += mass[i];
  return part;
}

static inline float lt_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline uint32_t lt_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

/* What a truncation keeps. */
typedef struct {
  int known;          /* 0: only the definition can tell */
  double mass;        /* sum of the weights kept */
  float least, sure;  /* entries from `least` on may be kept, from `sure` on they are */
  int64_t from, to;   /* entries of `listed` that are not kept */
} lt_kept;

static int lt_falling(const void *a, const void *b) {
  const lt_listed *x = a, *y = b;
  return x->weight != y->weight ? (x->weight < y->weight ? 1 : -1) : (x->entry < y->entry ? -1 : 1);
}

LT_INLINE lt_weights lt_all(const lt_row *row) { return (lt_weights){row->weights, row->vocab}; }

/* Weights from `low` to `high`, as bits: those of positive floats rise with them. */
typedef struct {
  uint32_t low, high;
  lt_part from_low, from_high;
} lt_bracket;

/* Where the prefix of falling weights ends: at a number of entries, or at a sum give or take `near`. */
typedef struct {
  double want, near;
  int by_mass;
} lt_end;

/* Halve the bracket until it holds at most `many` entries, or weights within `apart` bits. `before`
 * is what lies above `weights`. */
static void lt_narrow(lt_bracket *at, lt_weights weights, lt_part before, lt_end end, uint32_t start,
                      int64_t many, uint32_t apart) {
  while (at->from_low.count - at->from_high.count > many && at->high - at->low > apart) {
    const uint32_t half = at->low + (at->high - at->low) / 2;
    const uint32_t middle = start > at->low && start < at->high ? start : half;
    lt_part from = lt_from(weights, lt_float(middle));
    from.count += before.count, from.mass += before.mass, start = 0;
    const double value = end.by_mass ? from.mass : (double)from.count;
    if (value >= end.want + end.near) at->low = middle, at->from_low = from;
    else if (value < end.want - end.near) at->high = middle, at->from_high = from;
    else break; /* too near to the end */
  }
}

/* List the entries of the bracket, in order of their number. */
static int64_t lt_list(const lt_row *row, const lt_bracket *at) {
  const float low = lt_float(at->low), high = lt_float(at->high);
  int64_t many = 0;
  for (int64_t start = 0; start < row->vocab; start += LT_LANES) {
    const lt_vec w = *(const lt_vec *)(row->weights + start);
    const lt_index in = (lt_index)(w >= low) & (lt_index)(w < high);
    if (!lt_any(in)) continue;
    for (int64_t i = 0; i < LT_LANES; i++) { /* no branches; weights beyond the vocabulary are 0 */
      row->listed[many] = (lt_listed){w[i], (int32_t)(start + i)};
      many -= in[i];
    }
  }
  return many;
}

/* List in falling order the entries of a bracket around the end; returns their number. */
static int64_t lt_search(const lt_row *row, lt_part all, lt_end end, lt_bracket *at) {
  *at = (lt_bracket){lt_bits(FLT_MIN), lt_bits(1.0f) + 1, all, {0, 0.0}};
  /* entries below `tail` cannot hold what lies behind the end */
  const double tail = end.by_mass ? (all.mass - end.want - 2 * end.near) / (double)row->vocab : 0.0;
  lt_narrow(at, lt_all(row), (lt_part){0, 0.0}, end, lt_bits(tail > 1e-9 ? (float)tail : 1e-9f), 256,
            1 << 13);
  int64_t many = lt_list(row, at), kept = 0;
  for (int64_t i = 0; i < many; i++) row->some[i] = row->listed[i].weight;
  memset(row->some + many, 0, LT_BLOCK * sizeof(float));
  lt_narrow(at, (lt_weights){row->some, many}, at->from_high, end, 0, 64, 1);
  for (int64_t i = 0; i < many; i++)
    if (lt_bits(row->listed[i].weight) >= at->low && lt_bits(row->listed[i].weight) < at->high)
      row->listed[kept++] = row->listed[i];
  if (at->high - at->low > 1) qsort(row->listed, (size_t)kept, sizeof(lt_listed), lt_falling);
  return kept;
}
#endif

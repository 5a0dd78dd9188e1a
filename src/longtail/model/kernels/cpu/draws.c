/* Sampling with keyed noise, one pass per row: noise, token and logprob.
 *
 * The token is argmax(s + g) with s = logit / temperature and g = -log(E), E = -log1p(-u). With
 * w = exp(s - max) this is the entry of the smallest E / w. E is above u, so only an entry with
 *
 *     u < w (smallest E / w so far)
 *
 * can be a new best: one multiplication and one comparison. Logs are taken for the dozen entries of a
 * row that pass. The noise is never stored.
 *
 * The token is the definition's (sampling.py, `draw`), which rounds to float32 at each operation: if
 * the best two scores, or an entry and the edge of a truncation, are closer than LT_NEAR, the row is
 * marked and the caller computes it by the definition.
 *
 * Compiled without -ffast-math, which would break the comparisons and the division. Every sum runs in
 * an order that depends on the vocabulary's size alone.
 */
#ifndef LT_DRAWS
#define LT_DRAWS
#include <float.h>
#include <omp.h>
#include "select.c"

#define LT_SLACK 1.001 /* above the errors of w and of LT_NEAR */
#define LT_NEAR 1e-4   /* the definition errs by less than 2e-5: 4 roundings of numbers below 64 */
#define LT_EDGE 4e-6   /* share of w, or of the sum kept, by which the definition's cut may differ */
#define LT_VAGUE 2e-3  /* share of the sum kept that is left to the definition if in doubt */

/* The best scores s - max + g so far, and the bound on u / w that a better one keeps. */
typedef struct {
  double best, second;
  float bound;
  int64_t token;
} lt_race;

static inline void lt_try(lt_race *race, int64_t entry, float behind, float u) {
  const double score = (double)behind + lt_gumbel(u);
  if (score > race->best) {
    race->second = race->best, race->best = score, race->token = entry;
    const double bound = exp(-score) * LT_SLACK;
    race->bound = bound < FLT_MAX ? (float)bound : FLT_MAX;
  } else if (score > race->second) {
    race->second = score;
  }
}

#endif

LT_INLINE float NAME(lt_behind)(const T *logits, int64_t entry, float heat, float highest) {
  return LOAD(logits[entry]) / heat - highest;
}

/* s of a block's entries, -inf beyond the vocabulary. */
static inline void NAME(lt_scores)(const T *logits, int64_t many, float heat, float *scores) {
  if (many >= LT_BLOCK) {
    for (int64_t i = 0; i < LT_BLOCK; i++) scores[i] = LOAD(logits[i]);
  } else {
    for (int64_t i = 0; i < LT_BLOCK; i++) scores[i] = i < many ? LOAD(logits[i]) : -INFINITY;
  }
  if (heat != 1.0f)
    for (int64_t i = 0; i < LT_BLOCK; i += LT_LANES) *(lt_vec *)(scores + i) /= heat;
}

/* The highest s, NaN if any is NaN. */
static float NAME(lt_highest)(const T *logits, int64_t vocab, float heat) {
  float scores[LT_BLOCK] __attribute__((aligned(64)));
  lt_vec top = (lt_vec){0} - INFINITY;
  lt_index wrong = {0};
  for (int64_t start = 0; start < vocab; start += LT_BLOCK) {
    NAME(lt_scores)(logits + start, vocab - start, heat, scores);
#pragma GCC unroll 8
    for (int64_t i = 0; i < LT_BLOCK; i += LT_LANES) {
      const lt_vec s = *(const lt_vec *)(scores + i);
      top = lt_max(s, top), wrong |= s != s;
    }
  }
  float highest = top[0];
  for (int i = 1; i < LT_LANES; i++) highest = top[i] > highest ? top[i] : highest;
  return lt_any(wrong) ? NAN : highest;
}

static int64_t NAME(lt_first)(const T *logits, int64_t vocab, float value) {
  float scores[LT_BLOCK] __attribute__((aligned(64)));
  for (int64_t start = 0; start < vocab; start += LT_BLOCK) {
    NAME(lt_scores)(logits + start, vocab - start, 1.0f, scores);
    lt_index equal = {0};
    for (int64_t i = 0; i < LT_BLOCK; i += LT_LANES)
      equal |= *(const lt_vec *)(scores + i) == value;
    if (!lt_any(equal)) continue;
    for (int64_t i = 0; i < LT_BLOCK; i++)
      if (scores[i] == value) return start + i;
  }
  return -1;
}

/* One pass over all entries (`floor` 0), or over those of the stored weights from `floor` on. Returns
 * the sum of all weights. */
static double NAME(lt_run)(const lt_row *row, const T *logits, float highest, float floor,
                           lt_race *race) {
  const float heat = (float)row->temperature;
  float own[LT_BLOCK] __attribute__((aligned(64))), uniforms[LT_BLOCK] __attribute__((aligned(64)));
  lt_doubles total = {0};
  for (int64_t start = 0; start < row->vocab; start += LT_BLOCK) {
    const float *weights = floor > 0.0f ? row->weights + start : own;
    lt_index won = {0};
    if (floor > 0.0f) {
      for (int64_t i = 0; i < LT_BLOCK; i += LT_LANES)
        won |= *(const lt_vec *)(weights + i) >= floor;
      if (!lt_any(won)) continue;
      won = (lt_index){0};
    } else {
      lt_vec sum = {0};
      NAME(lt_scores)(logits + start, row->vocab - start, heat, own);
#pragma GCC unroll 8
      for (int64_t i = 0; i < LT_BLOCK; i += LT_LANES) {
        const lt_vec w = lt_exp(*(const lt_vec *)(own + i) - highest);
        sum += w, *(lt_vec *)(own + i) = w;
      }
      total += __builtin_convertvector(sum, lt_doubles);
    }
#pragma GCC unroll 8
    for (int64_t i = 0; i < LT_BLOCK; i += LT_LANES) {
      const lt_vec u = lt_uniforms(row->key, lt_count(start + i));
      const lt_vec w = *(const lt_vec *)(weights + i);
      *(lt_vec *)(uniforms + i) = u;
      won |= (lt_index)(u < w * race->bound) & (lt_index)(w >= floor);
    }
    if (!lt_any(won)) continue;
    const int64_t end = row->vocab - start < LT_BLOCK ? row->vocab - start : LT_BLOCK;
    for (int64_t i = 0; i < end; i++)
      if (uniforms[i] < weights[i] * race->bound && weights[i] >= floor)
        lt_try(race, start + i, NAME(lt_behind)(logits, start + i, heat, highest), uniforms[i]);
  }
  double sum = 0.0;
  for (int i = 0; i < LT_LANES; i++) sum += total[i];
  return sum;
}

/* Store all weights; their number and sum. */
static lt_part NAME(lt_store)(const lt_row *row, const T *logits, float highest) {
  lt_doubles total = {0};
  for (int64_t start = 0; start < row->vocab; start += LT_BLOCK) {
    float *weights = row->weights + start;
    lt_vec sum = {0};
    NAME(lt_scores)(logits + start, row->vocab - start, (float)row->temperature, weights);
#pragma GCC unroll 8
    for (int64_t i = 0; i < LT_BLOCK; i += LT_LANES) {
      const lt_vec w = lt_exp(*(const lt_vec *)(weights + i) - highest);
      sum += w, *(lt_vec *)(weights + i) = w;
    }
    total += __builtin_convertvector(sum, lt_doubles);
  }
  const int64_t over = (row->vocab + LT_BLOCK - 1) / LT_BLOCK * LT_BLOCK - row->vocab;
  memset(row->weights + row->vocab, 0, (size_t)over * sizeof(float));
  lt_part all = {row->vocab, 0.0};
  for (int i = 0; i < LT_LANES; i++) all.mass += total[i];
  return all;
}

/* Cut after `count` entries, or, if `mass` is given, where the weights before reach it, give or take
 * `near`. */
static lt_kept NAME(lt_cut)(const lt_row *row, const T *logits, lt_part all, int64_t count,
                            double mass, double near) {
  const int by_mass = mass > 0.0;
  lt_bracket at;
  const int64_t many =
      lt_search(row, all, (lt_end){by_mass ? mass : (double)count, near, by_mass}, &at);
  double before = at.from_high.mass, least = before;
  lt_kept kept = {.mass = before, .least = lt_float(at.low), .to = many};
  int64_t end = 0, ties = 0;
  for (; end < many && at.from_high.count + end < count; end++) {
    if (by_mass && before >= mass + near) break;
    const double after = before + row->listed[end].weight;
    if (!by_mass || before < mass) kept.mass = after;
    if (!by_mass || before < mass - near) least = after;
    before = after;
  }
  kept.known = end > 0 && before - least <= LT_VAGUE * kept.mass &&
               !(by_mass && at.from_high.count + end >= count);
  if (!kept.known) return kept;
  const lt_listed last = row->listed[end - 1];
  const float low = last.weight * (float)(1.0 - LT_EDGE), high = last.weight * (float)(1.0 + LT_EDGE);
  for (int64_t i = 0; i < many; i++)
    ties += LOAD(logits[row->listed[i].entry]) == LOAD(logits[last.entry]);
  kept.from = end;
  if (lt_from(lt_all(row), low).count - lt_from(lt_all(row), high).count != ties)
    kept.least = low, kept.sure = high, kept.from = kept.to; /* the definition's order may differ */
  return kept;
}

/* Whether the entry is kept by top_p for certain: `mass` is not reached before it. */
static int NAME(lt_is_inside)(const lt_row *row, const T *logits, int64_t entry, double mass,
                              double near) {
  const float weight = row->weights[entry];
  const lt_part low = lt_from(lt_all(row), weight * (float)(1.0 - LT_EDGE));
  if (low.mass - weight < mass - near) return 1;
  const lt_part high = lt_from(lt_all(row), weight * (float)(1.0 + LT_EDGE));
  int64_t ties = 0, earlier = 0;
  for (int64_t i = 0; i < row->vocab; i++)
    if (row->weights[i] == weight && LOAD(logits[i]) == LOAD(logits[entry])) {
      ties++, earlier += i < entry;
    }
  return low.count - high.count == ties && high.mass + (double)earlier * weight < mass - near;
}

/* Race among the entries that the truncation keeps. Returns the sum of their weights; 0 if only the
 * definition can tell. */
static double NAME(lt_truncated)(const lt_row *row, const T *logits, float highest, lt_race *race) {
  const float heat = (float)row->temperature, min_p = (float)row->min_p;
  const lt_part all = NAME(lt_store)(row, logits, highest);
  const int64_t count = row->top_k > 0 && row->top_k < row->vocab ? row->top_k : row->vocab + 1;
  lt_kept kept = {.known = 1, .mass = all.mass};
  if (count <= row->vocab) kept = NAME(lt_cut)(row, logits, all, count, 0.0, 0.0);
  const double mass = row->top_p * kept.mass, near = LT_EDGE * kept.mass;
  if (row->top_p < 1.0 && kept.known) kept = NAME(lt_cut)(row, logits, all, count, mass, near);
  if (!kept.known) return 0.0;
  for (int64_t i = kept.from; i < kept.to; i++) row->weights[row->listed[i].entry] = 0.0f;
  const float least = min_p * (float)(1.0 - LT_EDGE), sure = min_p * (float)(1.0 + LT_EDGE);
  if (min_p > 0.0f) {
    const double most = lt_from(lt_all(row), least).mass;
    kept.mass = most < kept.mass ? most : kept.mass;
    if (most - lt_from(lt_all(row), sure).mass > LT_VAGUE * kept.mass) return 0.0;
  }
  const float floor = least > kept.least ? least : kept.least;
  NAME(lt_run)(row, logits, highest, floor > FLT_MIN ? floor : FLT_MIN, race);
  const float weight = row->weights[race->token];
  const int is_best = NAME(lt_behind)(logits, race->token, heat, highest) == 0.0f;
  if (weight < kept.sure || (weight < sure && !is_best)) return 0.0;
  if (row->top_p < 1.0 && !NAME(lt_is_inside)(row, logits, race->token, mass, near)) return 0.0;
  return kept.mass;
}

/* Sample one row. Returns the token, and its logprob by pointer; -1 if only the definition can tell. */
static int64_t NAME(lt_draw)(const lt_row *row, const T *logits, float *logprob) {
  const float heat = row->temperature > 0.0 ? (float)row->temperature : 1.0f;
  const float highest = NAME(lt_highest)(logits, row->vocab, heat);
  if (!(highest - highest == 0.0f)) return -1; /* NaN, or infinite */
  *logprob = 0.0f;
  if (row->temperature == 0.0) return NAME(lt_first)(logits, row->vocab, highest);
  lt_race race = {-INFINITY, -INFINITY, FLT_MAX, 0};
  const int whole = !(row->top_k > 0 || row->top_p < 1.0 || row->min_p > 0.0);
  const double sum = whole ? NAME(lt_run)(row, logits, highest, 0.0f, &race)
                           : NAME(lt_truncated)(row, logits, highest, &race);
  if (!(sum > 0.0) || !(race.best - race.second > LT_NEAR)) return -1;
  *logprob = NAME(lt_behind)(logits, race.token, heat, highest) - (float)log(sum);
  return race.token;
}

/* Sample rows. `numbers` are [key, position, top_k][rows], `shares` [temperature, top_p, min_p][rows];
 * scratch has `room` floats per thread. A token of -1 is left to the definition. */
void NAME(draw_rows)(const T *logits, int64_t stride, int64_t rows, int64_t vocab,
                     const int64_t *numbers, const double *shares, float *scratch, int64_t room,
                     int64_t *tokens, float *logprobs, int threads) {
  const int64_t padded = (vocab + LT_BLOCK - 1) / LT_BLOCK * LT_BLOCK;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; r++) {
    float *own = scratch + omp_get_thread_num() * room;
    const lt_row row = {
        .vocab = vocab, .top_k = numbers[2 * rows + r], .temperature = shares[r],
        .top_p = shares[rows + r], .min_p = shares[2 * rows + r],
        .key = lt_row_key(numbers[r], numbers[rows + r]),
        .weights = own, .some = own + padded, .listed = (lt_listed *)(own + 2 * padded + LT_BLOCK),
    };
    tokens[r] = NAME(lt_draw)(&row, logits + r * stride, logprobs + r);
  }
}

/* Find the best two entries of a drafter's scores, logit * inverse + noise, and return the margin
 * between them. `noise` is key and position, null without noise; `draft_ids` are the target's ids of
 * the entries, null if equal. An entry of score s exceeds b only if u < exp(s - b). */
float NAME(best_two)(const T *logits, int64_t vocab, float inverse, const int64_t *draft_ids,
                     const int64_t *noise, int64_t *best) {
  const int noisy = noise && inverse > 0.0f;
  const float scale = inverse > 0.0f ? inverse : 1.0f, most_noise = noisy ? 22.2f : 0.0f;
  const lt_key key = noisy ? lt_row_key(noise[0], noise[1]) : (lt_key){0, 0};
  float scores[LT_BLOCK] __attribute__((aligned(64))), uniforms[LT_BLOCK] __attribute__((aligned(64)));
  float first = -INFINITY, second = -INFINITY;
  best[0] = best[1] = 0;
  for (int64_t start = 0; start < vocab; start += LT_BLOCK) {
    const int64_t many = vocab - start < LT_BLOCK ? vocab - start : LT_BLOCK;
    lt_vec top = (lt_vec){0} - INFINITY;
    lt_index may = {0};
    NAME(lt_scores)(logits + start, many, 1.0f, scores);
    for (int64_t i = 0; i < LT_BLOCK; i += LT_LANES) {
      *(lt_vec *)(scores + i) *= scale;
      top = lt_max(*(lt_vec *)(scores + i), top);
    }
    if (!lt_any((lt_index)(top + most_noise > second))) continue; /* few blocks go on */
    for (int64_t i = 0; noisy && i < LT_BLOCK; i += LT_LANES) {
      lt_u32 entries = lt_count(start + i);
      for (int64_t j = i; draft_ids && j < i + LT_LANES && j < many; j++)
        entries[j - i] = (uint32_t)draft_ids[start + j];
      const lt_vec u = lt_uniforms(key, entries), lead = *(lt_vec *)(scores + i) - second;
      const lt_vec cap = (lt_vec){0} + 80.0f;
      *(lt_vec *)(uniforms + i) = u;
      may |= u < lt_exp(lt_select((lt_index)(lead < cap), lead, cap)) * (float)LT_SLACK;
    }
    if (noisy && !lt_any(may)) continue;
    for (int64_t v = 0; v < many; v++) {
      if (!(scores[v] + most_noise > second)) continue;
      const float score = noisy ? scores[v] + (float)lt_gumbel(uniforms[v]) : scores[v];
      if (score > first) {
        second = first, best[1] = best[0];
        first = score, best[0] = start + v;
      } else if (score > second) {
        second = score, best[1] = start + v;
      }
    }
  }
  return first - second;
}

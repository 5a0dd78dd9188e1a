/* Fused small operations of the decoder for inference on a CPU (float32 and bfloat16).
 *
 * Compiled at first use by model/native.py, which includes this file once per element type:
 *   T       element type             NAME(f)  name of f for this type
 *   LOAD(v) element -> float         STORE(v) float -> element        LOAD_VEC(p) lanes at p
 * All arithmetic is in float32. Every function is the twin of a method of TorchKernels, and
 * tests/parity holds them together. Arrays are dense in their last dimension.
 */
#ifndef LT_COMMON
#define LT_COMMON
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#define LT_THREAD omp_get_thread_num()
#else
#define LT_THREAD 0
#endif

static inline float lt_from_bf16(uint16_t v) {
  uint32_t bits = (uint32_t)v << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

/* Round to nearest even, like PyTorch; NaN stays NaN. */
static inline uint16_t lt_to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? (uint16_t)0x7fc0 : (uint16_t)rounded;
}

/* 2^x: 2^round(x) from the exponent bits, times a polynomial on [-1/2, 1/2] (relative error 2e-7).
 * Without branches, so that loops over it become vector code. */
static inline float lt_exp2(float x) {
  const float clamped = x < -125.0f ? -125.0f : x > 126.0f ? 126.0f : x;
  const float n = rintf(clamped), f = clamped - n;
  float p = 1.5353362e-4f;
  p = p * f + 1.3398874e-3f;
  p = p * f + 9.6184373e-3f;
  p = p * f + 5.5503325e-2f;
  p = p * f + 2.4022648e-1f;
  p = p * f + 6.9314720e-1f;
  p = p * f + 1.0f;
  const int32_t bits = ((int32_t)n + 127) << 23;
  float power;
  memcpy(&power, &bits, 4);
  return x < -125.0f ? 0.0f : power * p; /* 0, not a denormal: those stall the adder */
}

#define LT_LOG2E 1.44269504f
#define LT_LANES 16
typedef float lt_vec __attribute__((vector_size(4 * LT_LANES), aligned(4), may_alias));

typedef int32_t lt_index __attribute__((vector_size(4 * LT_LANES)));
typedef uint32_t lt_u32 __attribute__((vector_size(4 * LT_LANES)));
typedef uint16_t lt_u16 __attribute__((vector_size(2 * LT_LANES), aligned(2), may_alias));

/* Sums of the lanes of four vectors, each in the same order: interleave and add in pairs, then fold
 * 16, 8, 4. */
static inline void lt_sum4(lt_vec a, lt_vec b, lt_vec c, lt_vec d, float *out) {
  const lt_index low = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
  const lt_index high = {2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31};
  const lt_index first = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
  const lt_index second = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
  const lt_vec ab = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
  const lt_vec cd = __builtin_shuffle(c, d, low) + __builtin_shuffle(c, d, high);
  lt_vec v = __builtin_shuffle(ab, cd, first) + __builtin_shuffle(ab, cd, second);
  v += __builtin_shuffle(v, (lt_index){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  v += __builtin_shuffle(v, (lt_index){4, 5, 6, 7, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7});
  memcpy(out, &v, 4 * sizeof(float));
}

/* Ask for `count` elements, which the rows of other heads keep the hardware from foreseeing. */
#define LT_AHEAD 16
#define LT_FETCH(p, count) \
  for (size_t b = 0; b < (size_t)(count) * sizeof(*(p)); b += 64) \
  __builtin_prefetch((const char *)(p) + b)

static inline lt_vec lt_load_f32(const float *p) {
  return *(const lt_vec *)p;
}

static inline lt_vec lt_load_bf16(const uint16_t *p) {
  return (lt_vec)(__builtin_convertvector(*(const lt_u16 *)p, lt_u32) << 16);
}

/* The keys that one token sees: `context` of them in a row, then some of the slots behind those,
 * picked one by one (its ancestors in a draft). A token's sums are taken in the order of what it
 * sees, not of where that lies: drafted or decoded plainly, it gets the same bits. */
typedef struct {
  int64_t context, num_picked, stride;
  const int64_t *picked; /* slots from the first key on */
} lt_seen;
#endif

/* x += delta (if any); out = x / rms(x) * weight. */
void NAME(add_norm)(T *restrict x, const T *restrict delta, const T *restrict weight,
                    T *restrict out, int64_t rows, int64_t size, float eps) {
  for (int64_t r = 0; r < rows; r++, x += size, out += size) {
    float sum = 0.0f;
    if (delta) {
      for (int64_t i = 0; i < size; i++) x[i] = STORE(LOAD(x[i]) + LOAD(delta[i]));
      delta += size;
    }
    for (int64_t i = 0; i < size; i++) sum += LOAD(x[i]) * LOAD(x[i]);
    const float scale = 1.0f / sqrtf(sum / (float)size + eps);
    for (int64_t i = 0; i < size; i++) out[i] = STORE(LOAD(x[i]) * scale * LOAD(weight[i]));
  }
}

/* Norm (if a weight is given) and rotate the query and key heads of qkv, in place.
 * cos and sin are [rows, dim], sin with the sign of rotate_half folded in. */
void NAME(rotate)(T *restrict qkv, const T *restrict q_weight, const T *restrict k_weight,
                  const float *restrict cos, const float *restrict sin, int64_t rows,
                  int64_t heads, int64_t kv_heads, int64_t dim, float eps) {
  const int64_t half = dim / 2, stride = (heads + 2 * kv_heads) * dim;
  float buffer[1024];
  for (int64_t r = 0; r < rows; r++, qkv += stride, cos += dim, sin += dim) {
    for (int64_t h = 0; h < heads + kv_heads; h++) {
      T *head = qkv + h * dim;
      const T *weight = h < heads ? q_weight : k_weight;
      for (int64_t i = 0; i < dim; i++) buffer[i] = LOAD(head[i]);
      if (weight) {
        float sum = 0.0f;
        for (int64_t i = 0; i < dim; i++) sum += buffer[i] * buffer[i];
        const float scale = 1.0f / sqrtf(sum / (float)dim + eps);
        for (int64_t i = 0; i < dim; i++) buffer[i] *= scale * LOAD(weight[i]);
      }
      for (int64_t i = 0; i < half; i++) {
        head[i] = STORE(buffer[i] * cos[i] + buffer[i + half] * sin[i]);
        head[i + half] = STORE(buffer[i + half] * cos[i + half] + buffer[i] * sin[i + half]);
      }
    }
  }
}

/* out = silu(gate) * up, where a row of gate_up is all gates, then all ups. */
void NAME(swiglu)(const T *restrict gate_up, T *restrict out, int64_t rows, int64_t size) {
  for (int64_t r = 0; r < rows; r++, gate_up += 2 * size, out += size)
    for (int64_t i = 0; i < size; i++) {
      const float gate = LOAD(gate_up[i]);
      out[i] = STORE(gate / (1.0f + lt_exp2(-LT_LOG2E * gate)) * LOAD(gate_up[size + i]));
    }
}

/* The `group` query heads that share one key head. Softmax in base 2: scores carry log2(e).
 * `group` and `dim` are constants where it is inlined: queries and sums then live in registers. */
static inline __attribute__((always_inline)) void NAME(attend_heads)(
    const T *restrict query, const T *restrict keys, const T *restrict values, T *restrict out,
    const lt_seen seen, const int64_t group, const int64_t dim, float scale,
    float *restrict scores) {
  const int64_t parts = dim / LT_LANES, stride = seen.stride;
  const int64_t num_keys = seen.context + seen.num_picked;
  lt_vec q[4][8], acc[4][8]; /* literal sizes: the compiler keeps what is used in registers */
  float total[4];
#pragma GCC unroll 16
  for (int64_t g = 0; g < group; g++) {
    total[g] = 0.0f;
#pragma GCC unroll 16
    for (int64_t j = 0; j < parts; j++) {
      q[g][j] = LOAD_VEC(query + g * dim + j * LT_LANES) * (scale * LT_LOG2E);
      acc[g][j] = (lt_vec){0};
    }
  }
  int64_t done = 0;
  for (; done + 4 <= seen.context; done += 4) { /* four keys at a time: their sums fold together */
    lt_vec dot[4][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const T *at = keys + (done + i) * stride;
      lt_vec key[8];
      LT_FETCH(at + LT_AHEAD * stride, dim);
#pragma GCC unroll 16
      for (int64_t j = 0; j < parts; j++) key[j] = LOAD_VEC(at + j * LT_LANES);
#pragma GCC unroll 16
      for (int64_t g = 0; g < group; g++) {
        dot[g][i] = q[g][0] * key[0];
#pragma GCC unroll 16
        for (int64_t j = 1; j < parts; j++) dot[g][i] += q[g][j] * key[j];
      }
    }
#pragma GCC unroll 16
    for (int64_t g = 0; g < group; g++)
      lt_sum4(dot[g][0], dot[g][1], dot[g][2], dot[g][3], scores + g * num_keys + done);
  }
  for (; done < num_keys; done++) {
    const T *at = keys + (done < seen.context ? done : seen.picked[done - seen.context]) * stride;
#pragma GCC unroll 16
    for (int64_t g = 0; g < group; g++) {
      lt_vec dot = q[g][0] * LOAD_VEC(at);
      float sums[4];
#pragma GCC unroll 16
      for (int64_t j = 1; j < parts; j++) dot += q[g][j] * LOAD_VEC(at + j * LT_LANES);
      lt_sum4(dot, dot, dot, dot, sums);
      scores[g * num_keys + done] = sums[0];
    }
  }
#pragma GCC unroll 16
  for (int64_t g = 0; g < group; g++) {
    float *s = scores + g * num_keys, highest = -INFINITY, sum = 0.0f;
    for (int64_t k = 0; k < num_keys; k++) highest = s[k] > highest ? s[k] : highest;
    for (int64_t k = 0; k < num_keys; k++) {
      s[k] = lt_exp2(s[k] - highest);
      sum += s[k];
    }
    total[g] = sum;
  }
  for (int64_t k = 0; k < num_keys; k++) {
    const T *at = values + (k < seen.context ? k : seen.picked[k - seen.context]) * stride;
    lt_vec value[8];
    LT_FETCH(at + LT_AHEAD * stride, dim);
#pragma GCC unroll 16
    for (int64_t j = 0; j < parts; j++) value[j] = LOAD_VEC(at + j * LT_LANES);
#pragma GCC unroll 16
    for (int64_t g = 0; g < group; g++)
#pragma GCC unroll 16
      for (int64_t j = 0; j < parts; j++) acc[g][j] += scores[g * num_keys + k] * value[j];
  }
#pragma GCC unroll 16
  for (int64_t g = 0; g < group; g++)
#pragma GCC unroll 16
    for (int64_t j = 0; j < parts; j++)
      for (int i = 0; i < LT_LANES; i++)
        out[g * dim + j * LT_LANES + i] = STORE(acc[g][j][i] / total[g]);
}

/* Take up to four heads at a time; dim is one of the usual head dimensions. */
static void NAME(attend_group)(const T *restrict q, const T *restrict k, const T *restrict v,
                               T *restrict out, const lt_seen seen, int64_t group, int64_t dim,
                               float scale, float *restrict scores) {
#define LT_ATTEND(heads, size) NAME(attend_heads)(q, k, v, out, seen, heads, size, scale, scores)
#define LT_EVERY_DIM(heads)                     \
  do {                                          \
    if (dim == 16) LT_ATTEND(heads, 16);        \
    else if (dim == 32) LT_ATTEND(heads, 32);   \
    else if (dim == 64) LT_ATTEND(heads, 64);   \
    else if (dim == 80) LT_ATTEND(heads, 80);   \
    else if (dim == 96) LT_ATTEND(heads, 96);   \
    else LT_ATTEND(heads, 128);                 \
  } while (0)
  while (group > 0) {
    const int64_t taken = group >= 4 ? 4 : group;
    if (taken == 4) LT_EVERY_DIM(4);
    else if (taken == 3) LT_EVERY_DIM(3);
    else if (taken == 2) LT_EVERY_DIM(2);
    else LT_EVERY_DIM(1);
    group -= taken, q += taken * dim, out += taken * dim;
  }
#undef LT_EVERY_DIM
#undef LT_ATTEND
}

/* Store every token's key and value at (row, slot) of a contiguous cache. */
void NAME(store_kv)(const T *restrict keys, const T *restrict values, int64_t token_stride,
                    T *restrict key_cache, T *restrict value_cache, int64_t row_stride,
                    const int64_t *restrict rows, const int64_t *restrict slots, int64_t tokens,
                    int64_t width) {
  for (int64_t t = 0; t < tokens; t++) {
    const int64_t at = rows[t] * row_stride + slots[t] * width;
    memcpy(key_cache + at, keys + t * token_stride, (size_t)width * sizeof(T));
    memcpy(value_cache + at, values + t * token_stride, (size_t)width * sizeof(T));
  }
}

/* Each of `tokens` queries sees the first contexts[t] slots of its row (with a window, those of the
 * last `window` places), then the slots behind them that have their bit in visible[t]. depths[t] is
 * how many places it is behind its context. scores holds, for each thread, four heads of a row. */
void NAME(attend_rows)(const T *restrict queries, int64_t token_stride,
                       const T *restrict key_cache, const T *restrict value_cache,
                       int64_t row_stride, const int64_t *restrict rows,
                       const int64_t *restrict contexts, const int64_t *restrict depths,
                       const int64_t *restrict visible, T *restrict out, int64_t tokens,
                       int64_t heads, int64_t kv_heads, int64_t dim, int64_t window,
                       float *restrict scores, int64_t scores_stride, int threads) {
  const int64_t group = heads / kv_heads, stride = kv_heads * dim;
  const float scale = 1.0f / sqrtf((float)dim);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t task = 0; task < tokens * kv_heads; task++) {
    const int64_t t = task / kv_heads, h = task % kv_heads;
    const int64_t reach = contexts[t] + depths[t];
    int64_t first = window > 0 && reach > window ? reach - window : 0;
    first = first < contexts[t] ? first : contexts[t];
    int64_t picked[64];
    lt_seen seen = {.context = contexts[t] - first, .stride = stride, .picked = picked};
    uint64_t mask = (uint64_t)visible[t];
    for (; mask & 1; mask >>= 1) seen.context++; /* what follows on is context, too */
    for (int64_t at = seen.context + 1; mask >>= 1; at++)
      if (mask & 1) picked[seen.num_picked++] = at;
    const int64_t start = rows[t] * row_stride + first * stride + h * dim;
    NAME(attend_group)(queries + t * token_stride + h * group * dim, key_cache + start,
                       value_cache + start, out + (t * heads + h * group) * dim, seen, group, dim,
                       scale, scores + LT_THREAD * scores_stride);
  }
}

/* ---- Training: the same operations out of place, and their gradients. ---- */

/* stream = x + delta (delta may be absent); normed = stream / rms(stream) * weight. */
void NAME(add_norm_forward)(const T *restrict x, const T *restrict delta,
                            const T *restrict weight, T *restrict stream, T *restrict normed,
                            int64_t rows, int64_t size, float eps) {
  memcpy(stream, x, (size_t)(rows * size) * sizeof(T));
  NAME(add_norm)(stream, delta, weight, normed, rows, size, eps);
}

/* With r = 1 / rms and u = weight * grad_normed:
 *   grad = grad_stream + r u - stream r^3 / size * sum(u stream)     grad_weight += grad_normed r stream */
void NAME(add_norm_backward)(const T *restrict stream, const T *restrict weight,
                             const T *restrict grad_stream, const T *restrict grad_normed,
                             T *restrict grad, float *restrict grad_weight, int64_t rows,
                             int64_t size, float eps) {
  for (int64_t r = 0; r < rows; r++) {
    const T *s = stream + r * size, *gs = grad_stream + r * size, *gn = grad_normed + r * size;
    T *g = grad + r * size;
    float square = 0.0f, dot = 0.0f;
    for (int64_t i = 0; i < size; i++) square += LOAD(s[i]) * LOAD(s[i]);
    for (int64_t i = 0; i < size; i++) dot += LOAD(weight[i]) * LOAD(gn[i]) * LOAD(s[i]);
    const float scale = 1.0f / sqrtf(square / (float)size + eps);
    const float pull = scale * scale * scale / (float)size * dot;
    for (int64_t i = 0; i < size; i++) {
      g[i] = STORE(LOAD(gs[i]) + scale * LOAD(weight[i]) * LOAD(gn[i]) - pull * LOAD(s[i]));
      grad_weight[i] += LOAD(gn[i]) * LOAD(s[i]) * scale;
    }
  }
}

/* Gradient of `rotate` on `heads` heads that share a norm weight (or have none): the rotation is
 * undone, then the norm as above. The input is the projection before `rotate`, at `stride`. */
void NAME(rotate_backward)(const T *restrict input, int64_t stride, const T *restrict weight,
                           const float *restrict cos, const float *restrict sin,
                           const T *restrict grad_out, T *restrict grad_in,
                           float *restrict grad_weight, int64_t rows, int64_t heads, int64_t dim,
                           float eps) {
  const int64_t half = dim / 2;
  float g[1024];
  for (int64_t r = 0; r < rows; r++, cos += dim, sin += dim)
    for (int64_t h = 0; h < heads; h++) {
      const T *x = input + r * stride + h * dim, *go = grad_out + (r * heads + h) * dim;
      T *gi = grad_in + r * stride + h * dim;
      for (int64_t i = 0; i < half; i++) {
        g[i] = LOAD(go[i]) * cos[i] + LOAD(go[i + half]) * sin[i + half];
        g[i + half] = LOAD(go[i + half]) * cos[i + half] + LOAD(go[i]) * sin[i];
      }
      if (!weight) {
        for (int64_t i = 0; i < dim; i++) gi[i] = STORE(g[i]);
        continue;
      }
      float square = 0.0f, dot = 0.0f;
      for (int64_t i = 0; i < dim; i++) square += LOAD(x[i]) * LOAD(x[i]);
      for (int64_t i = 0; i < dim; i++) dot += LOAD(weight[i]) * g[i] * LOAD(x[i]);
      const float scale = 1.0f / sqrtf(square / (float)dim + eps);
      const float pull = scale * scale * scale / (float)dim * dot;
      for (int64_t i = 0; i < dim; i++) {
        gi[i] = STORE(scale * LOAD(weight[i]) * g[i] - pull * LOAD(x[i]));
        grad_weight[i] += g[i] * LOAD(x[i]) * scale;
      }
    }
}

/* d silu(a) b: with s = sigmoid(a), grad_a = g b s (1 + a (1 - s)), grad_b = g a s. */
void NAME(swiglu_backward)(const T *restrict gate_up, const T *restrict grad_out,
                           T *restrict grad, int64_t rows, int64_t size) {
  for (int64_t r = 0; r < rows; r++, gate_up += 2 * size, grad += 2 * size, grad_out += size)
    for (int64_t i = 0; i < size; i++) {
      const float a = LOAD(gate_up[i]), b = LOAD(gate_up[size + i]), g = LOAD(grad_out[i]);
      const float s = 1.0f / (1.0f + lt_exp2(-LT_LOG2E * a));
      grad[i] = STORE(g * b * s * (1.0f + a * (1.0f - s)));
      grad[size + i] = STORE(g * a * s);
    }
}

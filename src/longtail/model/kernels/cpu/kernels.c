/* Fused small operations of the decoder for inference on a CPU (float32 and bfloat16).
 *
 * Compiled at first use by model/kernels/native.py, which includes this file once per element type:
 *   T       element type             NAME(f)  name of f for this type
 *   LOAD(v) element -> float         STORE(v) float -> element
 * All arithmetic is in float32. Every function computes what a method of TorchKernels computes;
 * tests/parity compares them. Arrays are dense in their last dimension.
 */
#include "common.c"

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
  float buffer[1536]; /* a head and its first half again, so that rotating is one loop */
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
      memcpy(buffer + dim, buffer, (size_t)half * sizeof(float));
      for (int64_t i = 0; i < dim; i++)
        head[i] = STORE(buffer[i] * cos[i] + buffer[i + half] * sin[i]);
    }
  }
}

/* out = silu(gate) * up, where a row of gate_up is all gates, then all ups. */
void NAME(swiglu)(const T *gate_up, T *out, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 1)
  for (int64_t r = 0; r < rows; r++) {
    const T *restrict gates = gate_up + 2 * r * size, *restrict ups = gates + size;
    T *restrict to = out + r * size;
    for (int64_t i = 0; i < size; i++) {
      const float gate = LOAD(gates[i]);
      to[i] = STORE(gate / (1.0f + lt_exp2(-LT_LOG2E * gate)) * LOAD(ups[i]));
    }
  }
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

#include "attention.c"
#include "packed.c"

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

/* The same with a float32 stream beside elements of T: as autocast, without its copies. */
void NAME(stream_norm)(const float *restrict x, const T *restrict delta,
                       const float *restrict weight, float *restrict stream, T *restrict normed,
                       int64_t rows, int64_t size, float eps) {
  for (int64_t r = 0; r < rows; r++, x += size, stream += size, normed += size) {
    float sum = 0.0f;
    if (delta) {
      for (int64_t i = 0; i < size; i++) stream[i] = x[i] + LOAD(delta[i]);
      delta += size;
    } else {
      memcpy(stream, x, (size_t)size * sizeof(float));
    }
    for (int64_t i = 0; i < size; i++) sum += stream[i] * stream[i];
    const float scale = 1.0f / sqrtf(sum / (float)size + eps);
    for (int64_t i = 0; i < size; i++) normed[i] = STORE(stream[i] * scale * weight[i]);
  }
}

/* Its gradients: `grad` of x, and the same as T for delta, if there is one. */
void NAME(stream_norm_backward)(const float *restrict stream, const float *restrict weight,
                                const float *restrict grad_stream, const T *restrict grad_normed,
                                float *restrict grad, T *restrict grad_delta,
                                float *restrict grad_weight, int64_t rows, int64_t size,
                                float eps) {
  for (int64_t r = 0; r < rows; r++) {
    const float *s = stream + r * size, *gs = grad_stream + r * size;
    const T *gn = grad_normed + r * size;
    float *g = grad + r * size, square = 0.0f, dot = 0.0f;
    for (int64_t i = 0; i < size; i++) square += s[i] * s[i];
    for (int64_t i = 0; i < size; i++) dot += weight[i] * LOAD(gn[i]) * s[i];
    const float scale = 1.0f / sqrtf(square / (float)size + eps);
    const float pull = scale * scale * scale / (float)size * dot;
    for (int64_t i = 0; i < size; i++) {
      g[i] = gs[i] + scale * weight[i] * LOAD(gn[i]) - pull * s[i];
      grad_weight[i] += LOAD(gn[i]) * s[i] * scale;
    }
    for (int64_t i = 0; grad_delta && i < size; i++) grad_delta[r * size + i] = STORE(g[i]);
  }
}

/* sum += part * 2^40, rounded to even; `largest` becomes the largest magnitude of a part, infinite
 * if one is not finite. Parts of 2^22 and more are not added. */
void NAME(add_fixed)(int64_t *restrict sum, const T *restrict part, int64_t size, float *largest,
                     int threads) {
  float most = 0.0f;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1) reduction(max : most)
  for (int64_t start = 0; start < size; start += 4096) {
    const int64_t end = size - start < 4096 ? size : start + 4096;
    for (int64_t i = start; i < end; i++) {
      const float x = LOAD(part[i]), magnitude = fabsf(x);
      sum[i] += (int64_t)rintf(magnitude < 0x1p22f ? x * 0x1p40f : 0.0f);
      const float seen = magnitude < INFINITY ? magnitude : INFINITY;
      most = seen > most ? seen : most;
    }
  }
  *largest = most;
}

/* out = sum * step. */
void NAME(from_fixed)(const int64_t *restrict sum, T *restrict out, int64_t size, double step,
                      int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < size; i++) out[i] = STORE((float)((double)sum[i] * step));
}

/* Gradient of `rotate` on `heads` heads that share a norm weight (or have none): the inverse
 * rotation, then the norm as above. The input is the projection before `rotate`, at `stride`. */
void NAME(rotate_backward)(const T *restrict input, int64_t stride, const T *restrict weight,
                           const float *restrict cos, const float *restrict sin,
                           const T *restrict grad_out, int64_t grad_stride,
                           T *restrict grad_in, float *restrict grad_weight, int64_t rows,
                           int64_t heads, int64_t dim, float eps) {
  const int64_t half = dim / 2;
  float g[1024];
  for (int64_t r = 0; r < rows; r++, cos += dim, sin += dim)
    for (int64_t h = 0; h < heads; h++) {
      const T *x = input + r * stride + h * dim, *go = grad_out + r * grad_stride + h * dim;
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
void NAME(swiglu_backward)(const T *gate_up, const T *grad_out, T *grad, int64_t rows,
                           int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 1)
  for (int64_t r = 0; r < rows; r++) {
    const T *restrict gates = gate_up + 2 * r * size, *restrict ups = gates + size;
    const T *restrict outer = grad_out + r * size;
    T *restrict to_gates = grad + 2 * r * size, *restrict to_ups = to_gates + size;
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
      const float a = LOAD(gates[i]), b = LOAD(ups[i]), g = LOAD(outer[i]);
      const float s = 1.0f / (1.0f + lt_exp2(-LT_LOG2E * a));
      to_gates[i] = STORE(g * b * s * (1.0f + a * (1.0f - s)));
      to_ups[i] = STORE(g * a * s);
    }
  }
}

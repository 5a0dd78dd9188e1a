/* Keyed noise (sampling.py, `gumbel_noise`): the hash, and the noise of one entry.
 *
 * Included by draws.c, once. The hash and the uniform are those of the definition to the bit;
 * the logs are taken in double precision, nearer to their true value than the definition's.
 */
#ifndef LT_NOISE
#define LT_NOISE
#include "common.c"

typedef struct {
  uint32_t low, high;
} lt_key;

LT_INLINE uint64_t lt_mix64(uint64_t x) { /* SplitMix64 */
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

LT_INLINE lt_key lt_row_key(int64_t key, int64_t position) {
  const uint64_t at = (uint64_t)position * 0x9e3779b97f4a7c15u;
  const uint64_t row = lt_mix64(lt_mix64((uint64_t)key + 0x1f83d9abfb41bd6bu) + at);
  return (lt_key){(uint32_t)row, (uint32_t)(row >> 32)};
}

/* The uniforms of 16 entries. */
LT_INLINE lt_vec lt_uniforms(lt_key key, lt_u32 entries) {
  const lt_vec most = (lt_vec){0} + 0.99999994f;
  lt_u32 x = entries * 0x9e3779b9u + key.low;
  x = (x ^ (x >> 16)) * 0x21f0aaadu + key.high;
  x = (x ^ (x >> 15)) * 0xd35a2d97u;
  x = (x ^ (x >> 15)) & 0x7fffffffu;
  const lt_vec u = (__builtin_convertvector((lt_index)x, lt_vec) + 0.5f) * 0x1p-31f;
  return lt_select((lt_index)(u > most), most, u);
}

/* The noise of an entry with uniform u; it falls as u rises and is below -log(u). */
static inline double lt_gumbel(float u) { return -log((double)(float)-log1p(-(double)u)); }

/* Only without -ffast-math: e^x for x <= 0, relative error 2e-7; 4e-38 below -86.6. NaN stays NaN. */
LT_INLINE lt_vec lt_exp(lt_vec x) {
  const lt_vec least = (lt_vec){0} - 86.6f, shift = (lt_vec){0} + 12582912.0f; /* 3 2^22: rounds */
  x = lt_select((lt_index)(x < least), least, x);
  const lt_vec t = x * LT_LOG2E + shift, n = t - shift;
  const lt_vec f = x - n * 0.693359375f + n * 2.12194440e-4f;
  const lt_vec p =
      ((((1.9875691500e-4f * f + 1.3981999507e-3f) * f + 8.3334519073e-3f) * f + 4.1665795894e-2f) * f +
       1.6666665459e-1f) * f + 5.0000001201e-1f;
  return (lt_vec)((lt_u32)(p * f * f + f + 1.0f) + ((lt_u32)t << 23));
}

LT_INLINE lt_u32 lt_count(int64_t first) {
  return (lt_u32)LT_NUMBERS + (uint32_t)first;
}

/* Whether any lane is set. */
LT_INLINE int lt_any(lt_index mask) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  union { lt_index whole; uint64_t part[LT_LANES / 2]; } m = {mask};
  uint64_t any = 0;
  for (int i = 0; i < LT_LANES / 2; i++) any |= m.part[i];
  return any != 0;
#endif
}
#endif

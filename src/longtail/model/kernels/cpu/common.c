/* What all units share: element types, vectors of as many lanes as a register has, and powers of 2. */
#ifndef LT_COMMON
#define LT_COMMON
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#define LT_INLINE static inline __attribute__((always_inline))

static inline float lt_from_bf16(uint16_t v) {
  uint32_t bits = (uint32_t)v << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

/* Round to nearest even, as PyTorch does; NaN stays NaN. */
static inline uint16_t lt_to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* 2^f for f in [-1/2, 1/2], a float or a vector of them: relative error 2e-7. */
#define LT_EXP2(f) \
  ((((((1.5353362e-4f * f + 1.3398874e-3f) * f + 9.6184373e-3f) * f + 5.5503325e-2f) * f + \
     2.4022648e-1f) * f + 6.9314720e-1f) * f + 1.0f)

/* 2^x: 2^round(x) from the exponent bits, times 2^f. There are no branches, so loops are
 * vectorised. */
static inline float lt_exp2(float x) {
  const float clamped = x < -125.0f ? -125.0f : x > 126.0f ? 126.0f : x;
  const float n = rintf(clamped), f = clamped - n;
  const int32_t bits = ((int32_t)n + 127) << 23;
  float power;
  memcpy(&power, &bits, 4);
  return x < -125.0f ? 0.0f : power * LT_EXP2(f); /* 0: a denormal would stall the adder */
}

#define LT_LOG2E 1.44269504f
/* GCC takes vectors that are wider than a register apart, into scalars. LT_FOLDS halvings reduce a
 * vector to one lane. */
#if defined(__AVX512F__) || defined(LT_EMULATED)
#define LT_LANES 16
#define LT_FOLDS 4
#define LT_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif defined(__AVX2__)
#define LT_LANES 8
#define LT_FOLDS 3
#define LT_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#else
#define LT_LANES 4
#define LT_FOLDS 2
#define LT_NUMBERS {0, 1, 2, 3}
#endif
typedef float lt_vec __attribute__((vector_size(4 * LT_LANES), aligned(4), may_alias));

typedef int32_t lt_index __attribute__((vector_size(4 * LT_LANES)));
typedef uint32_t lt_u32 __attribute__((vector_size(4 * LT_LANES), aligned(4), may_alias));
typedef uint16_t lt_u16 __attribute__((vector_size(2 * LT_LANES), aligned(2), may_alias));

LT_INLINE lt_vec lt_select(lt_index mask, lt_vec yes, lt_vec no) {
  return (lt_vec)((mask & (lt_index)yes) | (~mask & (lt_index)no));
}

/* The greater lanes; b's if one is NaN. */
LT_INLINE lt_vec lt_max(lt_vec a, lt_vec b) {
#ifdef __AVX512F__
  return (lt_vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (lt_vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return lt_select((lt_index)(a > b), a, b);
#endif
}

/* a b + c, rounded once: the compiler might round two loops over the same sum differently. On x86 the
 * instruction is written out, and LT_HELD keeps a value in a register, since with intrinsics GCC spills
 * sums, and loads a factor from memory for every use. */
#if LT_LANES == 16
#define LT_REGISTER "v"
#else
#define LT_REGISTER "x"
#endif
#ifdef __FMA__
#define LT_HELD(value) __asm__("" : "+" LT_REGISTER(value))
#else
#define LT_HELD(value) (void)0
#endif
LT_INLINE lt_vec lt_fma(lt_vec a, lt_vec b, lt_vec c) {
#if defined(__FMA__)
  __asm__("vfmadd231ps %2, %1, %0" : "+" LT_REGISTER(c) : LT_REGISTER(a), LT_REGISTER "m"(b));
  return c;
#elif defined(__aarch64__)
  return (lt_vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

/* A float in all lanes, loaded where it stands: with 16 registers it must not be kept for later. */
LT_INLINE lt_vec lt_all_lanes(const float *p) {
#if LT_LANES == 8
  lt_vec all;
  __asm__ volatile("vbroadcastss %1, %0" : "=x"(all) : "m"(*p));
  return all;
#else
  return (lt_vec){0} + *p;
#endif
}

/* LT_PAIRS: products of pairs of bfloat16, by AVX512-BF16. LT_EMULATED, by LONGTAIL_ISA, builds for
 * the oldest processor and lets plain C take the place of AVX512-BF16 and, if it is 2, of AMX, so that
 * every layout of weights and its tests run on every machine. Their sums have another order. */
#if defined(__AVX512BF16__) || defined(LT_EMULATED)
#define LT_PAIRS 1
#endif

LT_INLINE lt_vec lt_load_bf16(const uint16_t *p) {
  return (lt_vec)(__builtin_convertvector(*(const lt_u16 *)p, lt_u32) << 16);
}
LT_INLINE lt_u32 lt_rounded(lt_vec v) { /* lt_to_bf16 of every lane */
  const lt_u32 bits = (lt_u32)v, nan = (lt_u32)((bits & 0x7fffffffu) > 0x7f800000u);
  return (nan & 0x7fc0u) | (~nan & ((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16));
}
LT_INLINE lt_u16 lt_narrowed(lt_vec v) {
#ifdef __AVX512BF16__
  return (lt_u16)_mm512_cvtneps_pbh((__m512)v);
#else
  return __builtin_convertvector(lt_rounded(v), lt_u16);
#endif
}

#ifdef LT_PAIRS
/* sum + x y for pairs of each lane. */
LT_INLINE lt_vec lt_add_pairs(lt_vec sum, lt_vec x, lt_vec y) {
#ifdef __AVX512BF16__
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "vm"(y));
  return sum;
#else
  const lt_u32 a = (lt_u32)x, b = (lt_u32)y;
  sum = lt_fma((lt_vec)(a & 0xffff0000u), (lt_vec)(b & 0xffff0000u), sum);
  return lt_fma((lt_vec)(a << 16), (lt_vec)(b << 16), sum);
#endif
}
#endif
#endif

/* Checks of the native kernels for processors that run them under an emulator: products and attention
 * against double precision, and the bits of rows and tokens alone against those of a batch.
 *
 * tests/parity/test_portable.py compiles it with the kernels. Prints one line for each case; returns 1
 * if one fails.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int product_lanes(void);
int product_bf16_layout(void);
void product_f32(const float *, const float *, const float *, float *, int64_t, int64_t, int64_t, int);
void product_bf16(const uint16_t *, const uint16_t *, const uint16_t *, uint16_t *, int64_t, int64_t,
                  int64_t, int);
#define ATTENTION(T)                                                                                \
  (const T *, int64_t, const T *, const T *, int64_t, const int64_t *, const int64_t *,             \
   const int64_t *, const int64_t *, T *, int64_t, int64_t, int64_t, int64_t, int64_t, int)
void attend_rows_f32 ATTENTION(float);
void attend_rows_bf16 ATTENTION(uint16_t);

static uint64_t state = 88172645463325252ull;
static float random_float(void) { /* in [-1, 1), exact in bfloat16 */
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (float)((double)(state >> 56) / 128.0 - 1.0);
}
static uint16_t narrow(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return (uint16_t)(bits >> 16);
}
static float widen(uint16_t v) {
  const uint32_t bits = (uint32_t)v << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
/* The same numbers in both types; the caller frees both. */
static void fill(int64_t count, float **wide, uint16_t **half) {
  *wide = malloc((size_t)count * 4), *half = malloc((size_t)count * 2);
  for (int64_t i = 0; i < count; i++) (*wide)[i] = random_float(), (*half)[i] = narrow((*wide)[i]);
}
static int report(const char *what, int64_t a, int64_t b, double wide, double half, int differ) {
  const int bad = differ || !(wide < 2e-6) || !(half < 5e-3);
  printf("%s %ld x %ld: error %.1e, in bfloat16 %.1e, batches that change bits: %d%s\n", what, (long)a,
         (long)b, wide, half, differ, bad ? "  BAD" : "");
  return bad;
}

/* Where W[n][k] is in the layout of float32 (product.c, "inputs") and of bfloat16 ("halves"). */
static int64_t place(int64_t n, int64_t k, int64_t inputs) {
  return n / 32 * inputs * 32 + k * 32 + n % 32;
}
static int64_t halves_place(int64_t n, int64_t k, int64_t inputs) {
  const int64_t lanes = product_lanes(), j = n % 32, pair = j % (2 * lanes);
  return n / 32 * inputs * 32 + k * 32 + j - pair + pair % lanes * 2 + pair / lanes;
}

static int check_product(int64_t inputs, int64_t outputs) {
  enum { ROWS = 50 };
  const int64_t padded = (outputs + 31) / 32 * 32;
  float *w, *x, *bias, *packed = calloc((size_t)(padded * inputs), 4);
  uint16_t *w6, *x6, *bias6, *packed6 = calloc((size_t)(padded * inputs), 2);
  fill(outputs * inputs, &w, &w6), fill(ROWS * inputs, &x, &x6), fill(outputs, &bias, &bias6);
  for (int64_t n = 0; n < outputs; n++)
    for (int64_t k = 0; k < inputs; k++) {
      packed[place(n, k, inputs)] = w[n * inputs + k];
      packed6[halves_place(n, k, inputs)] = w6[n * inputs + k];
    }
  float *one = malloc(ROWS * (size_t)outputs * 4), *all = malloc(ROWS * (size_t)outputs * 4);
  uint16_t *one6 = malloc(ROWS * (size_t)outputs * 2), *all6 = malloc(ROWS * (size_t)outputs * 2);
  for (int64_t r = 0; r < ROWS; r++) {
    product_f32(x + r * inputs, packed, bias, one + r * outputs, 1, inputs, outputs, 1);
    product_bf16(x6 + r * inputs, packed6, bias6, one6 + r * outputs, 1, inputs, outputs, 1);
  }
  double worst = 0, worst6 = 0;
  for (int64_t r = 0; r < ROWS; r++)
    for (int64_t n = 0; n < outputs; n++) {
      double exact = bias[n], terms = fabs(exact) + 1;
      for (int64_t k = 0; k < inputs; k++) {
        const double term = (double)x[r * inputs + k] * w[n * inputs + k];
        exact += term, terms += fabs(term);
      }
      worst = fmax(worst, fabs(one[r * outputs + n] - exact) / terms);
      worst6 = fmax(worst6, fabs(widen(one6[r * outputs + n]) - exact) / terms);
    }
  int differ = 0;
  for (int64_t rows = 1; rows <= ROWS; rows++) {
    const int64_t r = ROWS - rows;
    product_f32(x + r * inputs, packed, bias, all, rows, inputs, outputs, 1);
    product_bf16(x6 + r * inputs, packed6, bias6, all6, rows, inputs, outputs, 1);
    differ += memcmp(all, one + r * outputs, (size_t)(rows * outputs) * 4) != 0;
    differ += memcmp(all6, one6 + r * outputs, (size_t)(rows * outputs) * 2) != 0;
  }
  void *own[] = {w, x, bias, packed, w6, x6, bias6, packed6, one, all, one6, all6};
  for (size_t i = 0; i < sizeof(own) / sizeof(*own); i++) free(own[i]);
  return report("product", inputs, outputs, worst, worst6, differ);
}

/* Five tokens over two rows of a cache: three of a draft tree, and two of another request. */
static int check_attention(int64_t dim) {
  enum { TOKENS = 5, HEADS = 9, KV = 3, SLOTS = 300 };
  const int64_t rows[] = {0, 0, 0, 1, 1}, contexts[] = {270, 270, 270, 1, 33};
  const int64_t depths[] = {1, 2, 2, 1, 1}, visible[] = {1, 3, 5, 1, 1};
  const int64_t row = SLOTS * KV * dim, width = HEADS * dim;
  float *q, *k, *v, *out = malloc((size_t)(TOKENS * width) * 4), *one = malloc((size_t)width * 4);
  uint16_t *q6, *k6, *v6, *out6 = malloc((size_t)(TOKENS * width) * 2), *one6 = malloc((size_t)width * 2);
  fill(TOKENS * width, &q, &q6), fill(2 * row, &k, &k6), fill(2 * row, &v, &v6);
  attend_rows_f32(q, width, k, v, row, rows, contexts, depths, visible, out, TOKENS, HEADS, KV, dim, 0, 1);
  attend_rows_bf16(q6, width, k6, v6, row, rows, contexts, depths, visible, out6, TOKENS, HEADS, KV, dim,
                   0, 1);
  double worst = 0, worst6 = 0;
  int differ = 0;
  for (int64_t t = 0; t < TOKENS; t++) {
    attend_rows_f32(q + t * width, width, k, v, row, rows + t, contexts + t, depths + t, visible + t, one,
                    1, HEADS, KV, dim, 0, 1);
    attend_rows_bf16(q6 + t * width, width, k6, v6, row, rows + t, contexts + t, depths + t, visible + t,
                     one6, 1, HEADS, KV, dim, 0, 1);
    differ += memcmp(one, out + t * width, (size_t)width * 4) != 0;
    differ += memcmp(one6, out6 + t * width, (size_t)width * 2) != 0;
    for (int64_t h = 0; h < HEADS; h++) {
      double score[SLOTS], top = -INFINITY, sum = 0;
      int64_t at[SLOTS], count = 0;
      for (int64_t s = 0; s < SLOTS; s++)
        if (s < contexts[t] || (s - contexts[t] < 3 && (visible[t] >> (s - contexts[t]) & 1)))
          at[count++] = rows[t] * row + s * KV * dim + h / (HEADS / KV) * dim;
      for (int64_t j = 0; j < count; j++) {
        score[j] = 0;
        for (int64_t d = 0; d < dim; d++) score[j] += (double)q[t * width + h * dim + d] * k[at[j] + d];
        score[j] /= sqrt((double)dim), top = fmax(top, score[j]);
      }
      for (int64_t j = 0; j < count; j++) sum += score[j] = exp(score[j] - top);
      for (int64_t d = 0; d < dim; d++) {
        double exact = 0;
        for (int64_t j = 0; j < count; j++) exact += score[j] / sum * v[at[j] + d];
        worst = fmax(worst, fabs(out[t * width + h * dim + d] - exact));
        worst6 = fmax(worst6, fabs(widen(out6[t * width + h * dim + d]) - exact));
      }
    }
  }
  void *own[] = {q, k, v, out, one, q6, k6, v6, out6, one6};
  for (size_t i = 0; i < sizeof(own) / sizeof(*own); i++) free(own[i]);
  return report("attention", dim, TOKENS, worst, worst6, differ);
}

int main(void) {
  const int64_t sizes[][2] = {{1, 1}, {7, 33}, {64, 64}, {576, 96}, {1537, 70}};
  const int64_t dims[] = {16, 32, 64, 80, 96, 128};
  int bad = 0;
  if (product_bf16_layout() != 0) return printf("not in the layout of halves\n"), 2;
  for (int i = 0; i < 5; i++) bad += check_product(sizes[i][0], sizes[i][1]);
  for (int i = 0; i < 6; i++) bad += check_attention(dims[i]);
  printf("%d lanes, %d failed\n", product_lanes(), bad);
  return bad != 0;
}

/* Scores of generated tokens, for training: logprob and entropy of a row of logits in one call, and
 * the gradient of the logits in their place.
 *
 * Included after draws.c, in its unit. With s = logit / temperature and w = exp(s - highest):
 *
 *     logprob = s(token) - highest - log(sum w)      entropy = log(sum w) - sum(w (s - highest)) / sum w
 *     gradient of logit v = grad / temperature (1 if v is the token, else 0, - exp(s(v) - log sum))
 */
#ifndef LT_SCORES
#define LT_SCORES
#define LT_LEAST -86.6f /* lt_exp does not distinguish less */
#define LT_NONE -60.0f  /* below, a share of the gradient is 0: subnormal numbers are slow */
#endif

/* Score one row; `log_sum` is that of exp(s). A row that is not finite has NaN. */
static void NAME(lt_measure)(const T *logits, int64_t vocab, int64_t token, float heat,
                             float *logprob, float *entropy, float *log_sum) {
  const float highest = NAME(lt_highest)(logits, vocab, heat);
  float scores[LT_BLOCK] __attribute__((aligned(64)));
  lt_doubles sums = {0}, dots = {0};
  for (int64_t start = 0; start < vocab; start += LT_BLOCK) {
    lt_vec sum = {0}, dot = {0};
    NAME(lt_scores)(logits + start, vocab - start, heat, scores);
#pragma GCC unroll 8
    for (int64_t i = 0; i < LT_BLOCK; i += LT_LANES) {
      const lt_vec s = lt_max((lt_vec){0} + LT_LEAST, *(const lt_vec *)(scores + i) - highest);
      const lt_vec w = lt_exp(s);
      sum += w, dot += w * s;
    }
    sums += __builtin_convertvector(sum, lt_doubles);
    dots += __builtin_convertvector(dot, lt_doubles);
  }
  double sum = 0.0, dot = 0.0;
  for (int i = 0; i < LT_LANES; i++) sum += sums[i], dot += dots[i];
  const double log_of_sum = log(sum);
  *log_sum = highest - highest == 0.0f ? (float)(highest + log_of_sum) : NAN;
  *logprob = (float)((double)NAME(lt_behind)(logits, token, heat, highest) - log_of_sum) +
             (*log_sum - *log_sum);
  *entropy = (float)(log_of_sum - dot / sum) + (*log_sum - *log_sum);
}

void NAME(measure_rows)(const T *logits, int64_t stride, int64_t rows, int64_t vocab,
                        const int64_t *tokens, float temperature, float *logprobs,
                        float *entropies, float *log_sums, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; r++)
    NAME(lt_measure)(logits + r * stride, vocab, tokens[r], temperature, logprobs + r,
                     entropies + r, log_sums + r);
}

LT_INLINE void NAME(lt_slope)(T *logits, int64_t vocab, int64_t token, float heat, float log_sum,
                              float grad) {
  const float share = grad / heat;
  const float own = expf(LOAD(logits[token]) / heat - log_sum);
  float slopes[LT_BLOCK] __attribute__((aligned(64)));
  for (int64_t start = 0; start < vocab; start += LT_BLOCK) {
    const int64_t count = vocab - start < LT_BLOCK ? vocab - start : LT_BLOCK;
    NAME(lt_scores)(logits + start, count, heat, slopes);
#pragma GCC unroll 8
    for (int64_t i = 0; i < LT_BLOCK; i += LT_LANES) {
      lt_vec *const at = (lt_vec *)(slopes + i), s = *at - log_sum;
      *at = (lt_vec)(~(lt_index)(s < LT_NONE) & (lt_index)(lt_exp(s) * -share));
    }
    for (int64_t i = 0; i < count; i++) logits[start + i] = STORE(slopes[i]);
  }
  logits[token] = STORE(share * (1.0f - own));
}

/* Replace each row of logits by its gradient, given that of its logprob. */
void NAME(grade_rows)(T *logits, int64_t stride, int64_t rows, int64_t vocab,
                      const int64_t *tokens, float temperature, const float *log_sums,
                      const float *grads, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; r++) {
    if (grads[r] == 0.0f)
      memset(logits + r * stride, 0, (size_t)vocab * sizeof(T));
    else
      NAME(lt_slope)(logits + r * stride, vocab, tokens[r], temperature, log_sums[r], grads[r]);
  }
}

/* A whole round of EAGLE drafting in one call: catch up, then chains of `depth` tokens.
 *
 * The same arithmetic as drafter/eagle.py and speculation/grow.py on a chain, which define it
 * (tests/parity/test_draft.py). A drafter's layer has some twenty small operations a level, and on a
 * small model calling them costs more than computing them: this is what makes a draft cheap.
 */
typedef struct {
  int64_t eagle3, hidden, inner, heads, kv_heads, dim, features, vocab, window;
  float eps;
  int threads;
  const T *embedding; /* [target's vocabulary][hidden] */
  const T *fc, *qkv, *output, *gate_up, *down, *head; /* as product.c wants them */
  const T *embedding_norm, *feature_norm, *feed_forward_norm, *norm;
  const float *cos, *sin; /* [positions][dim] */
  const int64_t *draft_ids; /* target's token of each entry of the vocabulary; null: the same */
} NAME(lt_eagle);

typedef struct {
  int64_t requests, pairs, depth;
  const int64_t *rows, *slots, *tokens, *positions; /* of the pairs that lack keys and values */
  const int64_t *lasts; /* of each request: which pair is its root's */
  const T *features; /* rows of windows, as the keys */
  T *keys, *values;
  int64_t feature_stride, kv_stride; /* from a row to the next */
  const float *noise; /* [requests][depth][vocab], null: none */
  const float *inverse_temperatures; /* of each request; 0: greedy, hears no noise */
  T *scratch;
  int64_t *places; /* 5 times requests, to work in */
  int64_t *drafted; /* [requests][depth] */
  float *margins; /* [requests][depth]: lead over the second best */
} NAME(lt_round);

/* Join features with embeddings and project: the layer's stream, and its heads, rotated. */
static void NAME(eagle_enter)(const NAME(lt_eagle) *e, const T *features, const int64_t *tokens,
                              const int64_t *positions, int64_t rows, T *stream, T *qkv, T *work) {
  const int64_t hidden = e->hidden, width = (e->heads + 2 * e->kv_heads) * e->dim;
  T *joined = work, *normed = work + rows * 2 * hidden;
  float *cos = (float *)(normed + rows * hidden), *sin = cos + rows * e->dim;
  for (int64_t r = 0; r < rows; r++) {
    memcpy(normed, e->embedding + tokens[r] * hidden, hidden * sizeof(T));
    if (e->eagle3)
      NAME(add_norm)(normed, 0, e->embedding_norm, joined + 2 * r * hidden, 1, hidden, e->eps);
    else
      memcpy(joined + 2 * r * hidden, normed, hidden * sizeof(T));
  }
  if (e->eagle3) {
    memcpy(stream, features, rows * hidden * sizeof(T));
    NAME(add_norm)(stream, 0, e->feature_norm, normed, rows, hidden, e->eps);
    features = normed;
  }
  for (int64_t r = 0; r < rows; r++)
    memcpy(joined + (2 * r + 1) * hidden, features + r * hidden, hidden * sizeof(T));
  if (e->eagle3) {
    NAME(product)(joined, e->qkv, 0, qkv, rows, 2 * hidden, width, e->threads);
  } else {
    NAME(product)(joined, e->fc, 0, stream, rows, 2 * hidden, hidden, e->threads);
    NAME(product)(stream, e->qkv, 0, qkv, rows, hidden, width, e->threads);
  }
  for (int64_t r = 0; r < rows; r++) {
    memcpy(cos + r * e->dim, e->cos + positions[r] * e->dim, e->dim * sizeof(float));
    memcpy(sin + r * e->dim, e->sin + positions[r] * e->dim, e->dim * sizeof(float));
  }
  NAME(rotate)(qkv, 0, 0, cos, sin, rows, e->heads, e->kv_heads, e->dim, e->eps);
}

/* Best entry of one request's scores and its lead over the second best. */
static void NAME(eagle_choose)(const T *logits, const float *noise, float inverse, int64_t vocab,
                               int64_t *best, float *margin) {
  float first = -INFINITY, second = -INFINITY;
  const float scale = inverse > 0.0f ? inverse : 1.0f, heard = inverse > 0.0f ? 1.0f : 0.0f;
  int64_t at = 0;
  for (int64_t v = 0; v < vocab; v++) {
    const float score = LOAD(logits[v]) * scale + (noise ? heard * noise[v] : 0.0f);
    if (score > first) second = first, first = score, at = v;
    else if (score > second) second = score;
  }
  *best = at;
  *margin = first - second;
}

void NAME(eagle_chains)(const NAME(lt_eagle) *e, const NAME(lt_round) *round) {
  const int64_t n = round->requests, pairs = round->pairs, hidden = e->hidden;
  const int64_t width = (e->heads + 2 * e->kv_heads) * e->dim, kv = e->kv_heads * e->dim;
  const int64_t most = pairs > n ? pairs : n, attended_width = e->heads * e->dim;
  T *gathered = round->scratch, *stream = gathered + most * e->features;
  T *qkv = stream + most * hidden, *attended = qkv + most * width;
  T *normed = attended + n * attended_width, *projected = normed + n * hidden;
  T *wide = projected + n * hidden, *inner = wide + n * 2 * e->inner;
  T *logits = inner + n * e->inner, *feature = logits + n * e->vocab, *work = feature + most * hidden;
  int64_t *rows = round->places, *contexts = rows + n, *none = contexts + n;
  int64_t *tokens = none + n, *positions = tokens + n;

  for (int64_t p = 0; p < pairs; p++)
    memcpy(gathered + p * e->features,
           round->features + round->rows[p] * round->feature_stride + round->slots[p] * e->features,
           e->features * sizeof(T));
  const T *entering = gathered;
  if (e->eagle3) {
    NAME(product)(gathered, e->fc, 0, feature, pairs, e->features, hidden, e->threads);
    entering = feature;
  }
  NAME(eagle_enter)(e, entering, round->tokens, round->positions, pairs, stream, qkv, work);
  NAME(store_kv)(qkv + attended_width, qkv + attended_width + kv, width, round->keys, round->values,
                 round->kv_stride, round->rows, round->slots, pairs, kv);
  for (int64_t i = 0; i < n; i++) { /* only the roots' pairs go on; lasts rise */
    const int64_t last = round->lasts[i];
    memmove(stream + i * hidden, stream + last * hidden, hidden * sizeof(T));
    memmove(qkv + i * width, qkv + last * width, width * sizeof(T));
    rows[i] = round->rows[last], contexts[i] = round->slots[last] + 1, none[i] = 0;
    positions[i] = round->positions[last];
  }
  for (int64_t depth = 0; depth < round->depth; depth++) {
    if (depth) {
      NAME(eagle_enter)(e, feature, tokens, positions, n, stream, qkv, work);
      NAME(store_kv)(qkv + attended_width, qkv + attended_width + kv, width, round->keys,
                     round->values, round->kv_stride, rows, contexts, n, kv);
      for (int64_t i = 0; i < n; i++) contexts[i]++;
    }
    NAME(attend_rows)(qkv, width, round->keys, round->values, round->kv_stride, rows, contexts,
                      none, none, attended, n, e->heads, e->kv_heads, e->dim, e->window,
                      e->threads);
    NAME(product)(attended, e->output, 0, projected, n, attended_width, hidden, e->threads);
    NAME(add_norm)(stream, projected, e->feed_forward_norm, normed, n, hidden, e->eps);
    NAME(product)(normed, e->gate_up, 0, wide, n, hidden, 2 * e->inner, e->threads);
    NAME(swiglu)(wide, inner, n, e->inner);
    NAME(product)(inner, e->down, 0, projected, n, e->inner, hidden, e->threads);
    const T *scored = stream;
    if (e->eagle3) {
      NAME(add_norm)(stream, projected, e->norm, normed, n, hidden, e->eps);
      scored = normed;
    } else {
      for (int64_t i = 0; i < n * hidden; i++)
        stream[i] = STORE(LOAD(stream[i]) + LOAD(projected[i]));
    }
    memcpy(feature, stream, n * hidden * sizeof(T));
    NAME(product)(scored, e->head, 0, logits, n, hidden, e->vocab, e->threads);
    for (int64_t i = 0; i < n; i++) {
      const int64_t at = i * round->depth + depth;
      int64_t best;
      NAME(eagle_choose)(logits + i * e->vocab, round->noise ? round->noise + at * e->vocab : 0,
                         round->inverse_temperatures[i], e->vocab, &best, round->margins + at);
      tokens[i] = round->drafted[at] = e->draft_ids ? e->draft_ids[best] : best;
      positions[i]++;
    }
  }
}

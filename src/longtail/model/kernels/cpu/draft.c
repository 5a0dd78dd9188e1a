/* A whole round of EAGLE drafting in one call: catch-up, then chains, with siblings at width 2.
 *
 *     root - 1 - 2 - 4 - 5        one node per level of each request is expanded
 *             \
 *              3                  after a level, requests without a likely enough node leave the
 *                                 batch, so the next pass has fewer rows; no row's arithmetic
 *                                 depends on the others
 *
 * The arithmetic is that of drafter/eagle/layer.py and speculation/grow.py, the reference
 * (tests/parity/test_draft.py). A drafter's layer has some twenty small operations per level, and for
 * a small model the calls cost more than the computation; one call per round avoids them.
 */
#ifndef LT_MOST_NODES
#define LT_MOST_NODES 128 /* nodes of a growing draft: two per level, one level per bit of a mask */
#endif

typedef struct {
  int64_t eagle3, hidden, inner, heads, kv_heads, dim, features, vocab, window;
  float eps;
  int threads;
  const T *embedding; /* [target's vocabulary][hidden] */
  const T *fc, *qkv, *output, *gate_up, *down, *head; /* in the layout of product.c */
  const T *embedding_norm, *feature_norm, *feed_forward_norm, *norm;
  const float *cos, *sin; /* [positions][dim] */
  const int64_t *draft_ids; /* target's token id of each vocabulary entry; null: equal */
} NAME(lt_eagle);

typedef struct {
  int64_t requests, pairs, depth, width; /* width: 1 or 2 */
  int64_t size; /* maximum nodes of a request; the most probable are kept */
  int64_t bins; /* bins of margins, below and between `edges` */
  double verify, extend, level; /* speculation/strategy.py, DraftThresholds */
  const int64_t *rows, *slots, *tokens, *positions; /* of the pairs without keys and values */
  const int64_t *lasts; /* per request: index of its root's pair */
  const int64_t *depths; /* per request: maximum depth */
  const T *features; /* rows of windows, like the keys */
  T *keys, *values;
  int64_t feature_stride, kv_stride; /* elements from one row to the next */
  const int64_t *noise; /* [key, position of depth 1][requests]; null: none */
  const float *inverse_temperatures; /* per request; 0: greedy, ignores the noise */
  const double *edges, *confidences; /* confidences[i]: of margins from edges[i - 1] to edges[i] */
  T *scratch;
  int64_t *places; /* scratch, 7 times requests */
  int64_t *counts; /* number of nodes per request; the nodes of all requests are concatenated: */
  int64_t *drafted, *parents; /* [requests][depth * width] while drafts grow */
  double *margins, *reach;
} NAME(lt_round);

/* The requests whose drafts still grow, row by row. */
typedef struct {
  int64_t *rows, *contexts, *none, *tokens, *positions;
  int64_t *owners; /* index of the request */
  int64_t *nodes; /* node to expand; 0: the root */
} NAME(lt_live);

/* Join features with embeddings and project: the layer's stream and its rotated heads. */
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

/* Run the layer after its attention, and the head; `stream` becomes the features. */
static void NAME(eagle_leave)(const NAME(lt_eagle) *e, const T *attended, int64_t n, T *stream,
                              T *normed, T *projected, T *wide, T *inner, T *logits) {
  const int64_t hidden = e->hidden;
  NAME(product)(attended, e->output, 0, projected, n, e->heads * e->dim, hidden, e->threads);
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
  NAME(product)(scored, e->head, 0, logits, n, hidden, e->vocab, e->threads);
}

/* In draws.c, which is compiled without -ffast-math. */
float NAME(best_two)(const T *logits, int64_t vocab, float inverse, const int64_t *draft_ids,
                     const int64_t *noise, int64_t *best);

/* Add the children of one row's node to its request's draft.
 *
 * Returns the number of the child to expand, the most probable; 0: none.
 */
static int64_t NAME(eagle_propose)(const NAME(lt_eagle) *e, const NAME(lt_round) *round,
                                   int64_t request, int64_t above, const int64_t *best,
                                   float lead) {
  const int64_t begin = request * round->depth * round->width;
  const double reached = above ? round->reach[begin + above - 1] : 1.0;
  double likeliest = -1.0;
  int64_t found = 0;
  for (int64_t child = 0; child < round->width; child++) {
    const double margin = child ? -lead : lead;
    int64_t bin = 0;
    while (bin < round->bins - 1 && round->edges[bin] <= margin) bin++;
    const double reach = reached * round->confidences[bin];
    if (reach < round->verify) continue;
    const int64_t at = begin + round->counts[request]++;
    round->drafted[at] = e->draft_ids ? e->draft_ids[best[child]] : best[child];
    round->parents[at] = above, round->margins[at] = margin, round->reach[at] = reach;
    if (reach > likeliest) likeliest = reach, found = at - begin + 1;
  }
  return likeliest >= round->extend ? found : 0;
}

/* Propose a level of nodes and compact the rows to expand. Returns their number. */
static int64_t NAME(eagle_level)(const NAME(lt_eagle) *e, const NAME(lt_round) *round,
                                 int64_t depth, int64_t n, const T *logits, const T *stream,
                                 T *feature, NAME(lt_live) *live) {
  int64_t kept = 0, best[2];
  double promised = 0.0;
  for (int64_t i = 0; i < n; i++) {
    const int64_t request = live->owners[i];
    int64_t noise[2];
    if (round->noise)
      noise[0] = round->noise[request], noise[1] = round->noise[round->requests + request] + depth;
    const float lead =
        NAME(best_two)(logits + i * e->vocab, e->vocab, round->inverse_temperatures[request],
                       e->draft_ids, round->noise ? noise : 0, best);
    const int64_t node = NAME(eagle_propose)(e, round, request, live->nodes[i], best, lead);
    if (!node || depth + 1 >= round->depths[request]) continue;
    const int64_t at = request * round->depth * round->width + node - 1;
    promised += round->reach[at] - round->extend;
    live->rows[kept] = live->rows[i], live->contexts[kept] = live->contexts[i];
    live->tokens[kept] = round->drafted[at], live->positions[kept] = live->positions[i] + 1;
    live->owners[kept] = request, live->nodes[kept] = node;
    memcpy(feature + kept * e->hidden, stream + i * e->hidden, e->hidden * sizeof(T));
    kept++;
  }
  return promised < round->level ? 0 : kept;
}

/* Keep each request's `size` most probable nodes in falling order; of equals the earlier first.
 *
 * A node is never more probable than its parent and comes after it, so the kept nodes are a tree.
 */
static void NAME(eagle_gather)(const NAME(lt_round) *round) {
  int64_t end = 0;
  for (int64_t request = 0; request < round->requests; request++) {
    const int64_t begin = request * round->depth * round->width, many = round->counts[request];
    int64_t tokens[LT_MOST_NODES], parents[LT_MOST_NODES], numbers[LT_MOST_NODES + 1];
    double margins[LT_MOST_NODES], reach[LT_MOST_NODES];
    memcpy(tokens, round->drafted + begin, many * sizeof *tokens);
    memcpy(parents, round->parents + begin, many * sizeof *parents);
    memcpy(margins, round->margins + begin, many * sizeof *margins);
    memcpy(reach, round->reach + begin, many * sizeof *reach);
    numbers[0] = 0;
    for (int64_t i = 0; i < many; i++) {
      numbers[i + 1] = 1;
      for (int64_t j = 0; j < many; j++)
        numbers[i + 1] += reach[j] > reach[i] || (reach[j] == reach[i] && j < i);
    }
    for (int64_t i = 0; i < many; i++) {
      if (numbers[i + 1] > round->size) continue;
      const int64_t at = end + numbers[i + 1] - 1;
      round->drafted[at] = tokens[i], round->parents[at] = numbers[parents[i]];
      round->margins[at] = margins[i], round->reach[at] = reach[i];
    }
    round->counts[request] = many < round->size ? many : round->size;
    end += round->counts[request];
  }
}

void NAME(eagle_chains)(const NAME(lt_eagle) *e, const NAME(lt_round) *round) {
  int64_t n = round->requests;
  const int64_t pairs = round->pairs, hidden = e->hidden, attended_width = e->heads * e->dim;
  const int64_t width = (e->heads + 2 * e->kv_heads) * e->dim, kv = e->kv_heads * e->dim;
  const int64_t most = pairs > n ? pairs : n;
  T *gathered = round->scratch, *stream = gathered + most * e->features;
  T *qkv = stream + most * hidden, *attended = qkv + most * width;
  T *normed = attended + n * attended_width, *projected = normed + n * hidden;
  T *wide = projected + n * hidden, *inner = wide + n * 2 * e->inner;
  T *logits = inner + n * e->inner, *feature = logits + n * e->vocab, *work = feature + most * hidden;
  int64_t *p = round->places;
  NAME(lt_live) live = {p, p + n, p + 2 * n, p + 3 * n, p + 4 * n, p + 5 * n, p + 6 * n};

  for (int64_t pair = 0; pair < pairs; pair++)
    memcpy(gathered + pair * e->features,
           round->features + round->rows[pair] * round->feature_stride +
               round->slots[pair] * e->features,
           e->features * sizeof(T));
  const T *entering = gathered;
  if (e->eagle3) {
    NAME(product)(gathered, e->fc, 0, feature, pairs, e->features, hidden, e->threads);
    entering = feature;
  }
  NAME(eagle_enter)(e, entering, round->tokens, round->positions, pairs, stream, qkv, work);
  NAME(store_kv)(qkv + attended_width, qkv + attended_width + kv, width, round->keys, round->values,
                 round->kv_stride, round->rows, round->slots, pairs, kv);
  for (int64_t i = 0; i < n; i++) { /* only the roots' pairs continue; lasts rise */
    const int64_t last = round->lasts[i];
    memmove(stream + i * hidden, stream + last * hidden, hidden * sizeof(T));
    memmove(qkv + i * width, qkv + last * width, width * sizeof(T));
    live.rows[i] = round->rows[last], live.contexts[i] = round->slots[last] + 1;
    live.positions[i] = round->positions[last];
    live.owners[i] = i, live.none[i] = live.nodes[i] = round->counts[i] = 0;
  }
  for (int64_t depth = 0; n > 0 && depth < round->depth; depth++) {
    if (depth) {
      NAME(eagle_enter)(e, feature, live.tokens, live.positions, n, stream, qkv, work);
      NAME(store_kv)(qkv + attended_width, qkv + attended_width + kv, width, round->keys,
                     round->values, round->kv_stride, live.rows, live.contexts, n, kv);
      for (int64_t i = 0; i < n; i++) live.contexts[i]++;
    }
    NAME(attend_rows)(qkv, width, round->keys, round->values, round->kv_stride, live.rows,
                      live.contexts, live.none, live.none, attended, n, e->heads, e->kv_heads,
                      e->dim, e->window, e->threads);
    NAME(eagle_leave)(e, attended, n, stream, normed, projected, wide, inner, logits);
    n = NAME(eagle_level)(e, round, depth, n, logits, stream, feature, &live);
  }
  NAME(eagle_gather)(round);
}

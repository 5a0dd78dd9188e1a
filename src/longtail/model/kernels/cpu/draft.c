/* A whole round of drafting in one call: chains, with siblings at width 2, for all requests.
 *
 *     root - 1 - 2 - 4 - 5        one node per level of each request is expanded
 *             \
 *              3                  after a level, requests without a likely enough node leave the
 *                                 batch, so the next pass has fewer rows; no row's arithmetic
 *                                 depends on the others
 *
 * The arithmetic is that of speculation/grow.py with drafter/eagle/layer.py or drafter/ridge/layer.py,
 * the reference (tests/parity/test_draft.py). A drafter has several small operations per level, and for
 * a small model the calls cost more than the computation; one call per round avoids them.
 */
#ifndef LT_MOST_NODES
#define LT_MOST_NODES 128 /* nodes of a growing draft: two per level, one level per bit of a mask */

typedef struct {
  int64_t requests, depth, width; /* width: 1 or 2 */
  int64_t size; /* maximum nodes of a request; the most probable are kept */
  int64_t vocab, bins; /* bins of margins, below and between `edges` */
  double verify, expand, level; /* speculation/strategy.py, DraftThresholds */
  const double *edges, *confidences; /* confidences[i]: of margins from edges[i - 1] to edges[i] */
  const int64_t *draft_ids; /* target's token id of each vocabulary entry; null: equal */
  const int64_t *depths; /* per request: maximum depth */
  const int64_t *keys, *positions; /* per request: noise of depth 1; null: none */
  const float *inverse_temperatures; /* per request; 0: greedy, ignores the noise */
  int64_t *live; /* scratch, 4 times requests */
  int64_t *counts; /* number of nodes per request; the nodes of all requests are concatenated: */
  int64_t *drafted, *parents; /* [requests][depth * width] while drafts grow */
  double *margins, *reach;
} lt_growth;

/* The requests whose drafts still grow, row by row. */
typedef struct {
  int64_t *owners; /* index of the request */
  int64_t *nodes, *tokens; /* node to expand; 0: the root, whose token is not set */
  int64_t *from; /* row in the level before; they rise */
} lt_live;

static lt_live lt_begin(const lt_growth *g) {
  const int64_t n = g->requests;
  const lt_live live = {g->live, g->live + n, g->live + 2 * n, g->live + 3 * n};
  for (int64_t i = 0; i < n; i++) live.owners[i] = i, live.nodes[i] = g->counts[i] = 0;
  return live;
}

/* Add the children of one row's node to its request's draft.
 *
 * Returns the number of the child to expand, the most probable; 0: none.
 */
static int64_t lt_propose(const lt_growth *g, int64_t request, int64_t above, const int64_t *best,
                          float lead) {
  const int64_t begin = request * g->depth * g->width;
  const double reached = above ? g->reach[begin + above - 1] : 1.0;
  double likeliest = -1.0;
  int64_t found = 0;
  for (int64_t child = 0; child < g->width; child++) {
    const double margin = child ? -lead : lead;
    int64_t bin = 0;
    while (bin < g->bins - 1 && g->edges[bin] <= margin) bin++;
    const double reach = reached * g->confidences[bin];
    if (reach < g->verify) continue;
    const int64_t at = begin + g->counts[request]++;
    g->drafted[at] = g->draft_ids ? g->draft_ids[best[child]] : best[child];
    g->parents[at] = above, g->margins[at] = margin, g->reach[at] = reach;
    if (reach > likeliest) likeliest = reach, found = at - begin + 1;
  }
  return likeliest >= g->expand ? found : 0;
}

/* Keep each request's `size` most probable nodes in falling order; of equals the earlier first.
 *
 * A node is never more probable than its parent and comes after it, so the kept nodes are a tree.
 */
static void lt_gather(const lt_growth *g) {
  int64_t end = 0;
  for (int64_t request = 0; request < g->requests; request++) {
    const int64_t begin = request * g->depth * g->width, many = g->counts[request];
    int64_t tokens[LT_MOST_NODES], parents[LT_MOST_NODES], numbers[LT_MOST_NODES + 1];
    double margins[LT_MOST_NODES], reach[LT_MOST_NODES];
    memcpy(tokens, g->drafted + begin, many * sizeof *tokens);
    memcpy(parents, g->parents + begin, many * sizeof *parents);
    memcpy(margins, g->margins + begin, many * sizeof *margins);
    memcpy(reach, g->reach + begin, many * sizeof *reach);
    numbers[0] = 0;
    for (int64_t i = 0; i < many; i++) {
      numbers[i + 1] = 1;
      for (int64_t j = 0; j < many; j++)
        numbers[i + 1] += reach[j] > reach[i] || (reach[j] == reach[i] && j < i);
    }
    for (int64_t i = 0; i < many; i++) {
      if (numbers[i + 1] > g->size) continue;
      const int64_t at = end + numbers[i + 1] - 1;
      g->drafted[at] = tokens[i], g->parents[at] = numbers[parents[i]];
      g->margins[at] = margins[i], g->reach[at] = reach[i];
    }
    g->counts[request] = many < g->size ? many : g->size;
    end += g->counts[request];
  }
}
#endif

/* In draws.c, which is compiled without -ffast-math. */
float NAME(best_two)(const T *logits, int64_t vocab, float inverse, const int64_t *draft_ids,
                     const int64_t *noise, int64_t *best);

/* Propose a level of nodes and compact the rows to expand. Returns their number. */
static int64_t NAME(lt_level)(const lt_growth *g, int64_t depth, int64_t n, const T *logits,
                              lt_live live) {
  int64_t kept = 0, best[2];
  double promised = 0.0;
  for (int64_t i = 0; i < n; i++) {
    const int64_t request = live.owners[i];
    int64_t noise[2];
    if (g->keys) noise[0] = g->keys[request], noise[1] = g->positions[request] + depth;
    const float lead =
        NAME(best_two)(logits + i * g->vocab, g->vocab, g->inverse_temperatures[request],
                       g->draft_ids, g->keys ? noise : 0, best);
    const int64_t node = lt_propose(g, request, live.nodes[i], best, lead);
    if (!node || depth + 1 >= g->depths[request]) continue;
    const int64_t at = request * g->depth * g->width + node - 1;
    promised += g->reach[at] - g->expand;
    live.owners[kept] = request, live.nodes[kept] = node, live.tokens[kept] = g->drafted[at];
    live.from[kept++] = i;
  }
  return promised < g->level ? 0 : kept;
}

static void NAME(lt_add)(T *sum, const T *more, int64_t count) {
  for (int64_t i = 0; i < count; i++) sum[i] = STORE(LOAD(sum[i]) + LOAD(more[i]));
}

/* ---- EAGLE: catch-up of the pairs without keys and values, then chains. ---- */
typedef struct {
  int64_t eagle3, hidden, inner, heads, kv_heads, dim, features, window;
  float eps;
  int threads;
  const T *embedding; /* [target's vocabulary][hidden] */
  const T *fc, *qkv, *output, *gate_up, *down, *head; /* in the layout of product.c */
  const T *embedding_norm, *feature_norm, *feed_forward_norm, *norm;
  const float *cos, *sin; /* [positions][dim] */
} NAME(lt_eagle);

typedef struct {
  int64_t pairs;
  const int64_t *rows, *slots, *tokens, *positions; /* of the pairs without keys and values */
  const int64_t *lasts; /* per request: index of its root's pair */
  const T *features; /* rows of windows, like the keys */
  T *keys, *values;
  int64_t feature_stride, kv_stride; /* elements from one row to the next */
  int64_t *places; /* scratch, 4 times requests */
  T *scratch;
} NAME(lt_pairs);

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
                              T *normed, T *projected, T *wide, T *inner, T *logits,
                              int64_t vocab) {
  const int64_t hidden = e->hidden;
  NAME(product)(attended, e->output, 0, projected, n, e->heads * e->dim, hidden, e->threads);
  NAME(add_norm)(stream, projected, e->feed_forward_norm, normed, n, hidden, e->eps);
  NAME(product)(normed, e->gate_up, 0, wide, n, hidden, 2 * e->inner, e->threads);
  NAME(swiglu)(wide, inner, n, e->inner, 1);
  NAME(product)(inner, e->down, 0, projected, n, e->inner, hidden, e->threads);
  const T *scored = stream;
  if (e->eagle3) {
    NAME(add_norm)(stream, projected, e->norm, normed, n, hidden, e->eps);
    scored = normed;
  } else {
    NAME(lt_add)(stream, projected, n * hidden);
  }
  NAME(product)(scored, e->head, 0, logits, n, hidden, vocab, e->threads);
}

void NAME(eagle_chains)(const lt_growth *g, const NAME(lt_eagle) *e, const NAME(lt_pairs) *p) {
  int64_t n = g->requests;
  const int64_t pairs = p->pairs, hidden = e->hidden, attended_width = e->heads * e->dim;
  const int64_t width = (e->heads + 2 * e->kv_heads) * e->dim, kv = e->kv_heads * e->dim;
  const int64_t most = pairs > n ? pairs : n;
  T *gathered = p->scratch, *stream = gathered + most * e->features;
  T *qkv = stream + most * hidden, *attended = qkv + most * width;
  T *normed = attended + n * attended_width, *projected = normed + n * hidden;
  T *wide = projected + n * hidden, *inner = wide + n * 2 * e->inner;
  T *logits = inner + n * e->inner, *feature = logits + n * g->vocab, *work = feature + most * hidden;
  int64_t *rows = p->places, *contexts = rows + n, *positions = contexts + n, *none = positions + n;
  const lt_live live = lt_begin(g);

  for (int64_t pair = 0; pair < pairs; pair++)
    memcpy(gathered + pair * e->features,
           p->features + p->rows[pair] * p->feature_stride + p->slots[pair] * e->features,
           e->features * sizeof(T));
  const T *entering = gathered;
  if (e->eagle3) {
    NAME(product)(gathered, e->fc, 0, feature, pairs, e->features, hidden, e->threads);
    entering = feature;
  }
  NAME(eagle_enter)(e, entering, p->tokens, p->positions, pairs, stream, qkv, work);
  NAME(store_kv)(qkv + attended_width, qkv + attended_width + kv, width, p->keys, p->values,
                 p->kv_stride, p->rows, p->slots, pairs, kv);
  for (int64_t i = 0; i < n; i++) { /* only the roots' pairs continue; lasts rise */
    const int64_t last = p->lasts[i];
    memmove(stream + i * hidden, stream + last * hidden, hidden * sizeof(T));
    memmove(qkv + i * width, qkv + last * width, width * sizeof(T));
    rows[i] = p->rows[last], contexts[i] = p->slots[last] + 1, positions[i] = p->positions[last];
    none[i] = 0;
  }
  for (int64_t depth = 0; n > 0 && depth < g->depth; depth++) {
    if (depth) {
      NAME(eagle_enter)(e, feature, live.tokens, positions, n, stream, qkv, work);
      NAME(store_kv)(qkv + attended_width, qkv + attended_width + kv, width, p->keys, p->values,
                     p->kv_stride, rows, contexts, n, kv);
      for (int64_t i = 0; i < n; i++) contexts[i]++;
    }
    NAME(attend_rows)(qkv, width, p->keys, p->values, p->kv_stride, rows, contexts, none, none,
                      attended, n, e->heads, e->kv_heads, e->dim, e->window, e->threads);
    NAME(eagle_leave)(e, attended, n, stream, normed, projected, wide, inner, logits, g->vocab);
    n = NAME(lt_level)(g, depth, n, logits, live);
    for (int64_t i = 0; i < n; i++) {
      const int64_t from = live.from[i];
      memcpy(feature + i * hidden, stream + from * hidden, hidden * sizeof(T));
      rows[i] = rows[from], contexts[i] = contexts[from], positions[i] = positions[from] + 1;
    }
  }
  lt_gather(g);
}

/* ---- Ridge: every level reads the pair before the root, and the embedding of its own parent. ---- */
typedef struct {
  int64_t hidden;
  int threads;
  const T *embedding, *head;
  const T *const *streams; /* per slot */
  const T *const *transitions; /* of the slots from the second on */
} NAME(lt_ridge);

/* `states` and `roots`: per request. `scratch` has room for 5 states and the scores of each. */
void NAME(ridge_chains)(const lt_growth *g, const NAME(lt_ridge) *r, const T *states,
                        const int64_t *roots, T *scratch) {
  int64_t n = g->requests;
  const int64_t hidden = r->hidden;
  const size_t row = hidden * sizeof(T);
  T *pairs = scratch, *stream = pairs + 2 * n * hidden, *before = stream + n * hidden;
  T *moved = before + n * hidden, *logits = moved + n * hidden;
  const lt_live live = lt_begin(g);
  for (int64_t i = 0; i < n; i++) {
    memcpy(pairs + 2 * i * hidden, states + i * hidden, row);
    memcpy(pairs + (2 * i + 1) * hidden, r->embedding + roots[i] * hidden, row);
  }
  for (int64_t depth = 0; n > 0 && depth < g->depth; depth++) {
    NAME(product)(pairs, r->streams[depth], 0, stream, n, 2 * hidden, hidden, r->threads);
    if (depth) {
      for (int64_t i = 0; i < n; i++)
        memcpy(before + i * hidden, r->embedding + live.tokens[i] * hidden, row);
      NAME(product)(before, r->transitions[depth - 1], 0, moved, n, hidden, hidden, r->threads);
      NAME(lt_add)(stream, moved, n * hidden);
    }
    NAME(product)(stream, r->head, 0, logits, n, hidden, g->vocab, r->threads);
    n = NAME(lt_level)(g, depth, n, logits, live);
    for (int64_t i = 0; i < n; i++)
      memmove(pairs + 2 * i * hidden, pairs + 2 * live.from[i] * hidden, 2 * row);
  }
  lt_gather(g);
}

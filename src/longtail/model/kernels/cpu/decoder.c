/* All layers of a decoder in one call. For few tokens the calls of some ten operations per layer cost
 * as much as the operations. These are the same functions in the same order as
 * model/transformer.py calls them through NativeKernels, with the same bits (tests/parity).
 */
typedef struct {
  const T *attention_norm, *q_norm, *k_norm, *feed_forward_norm;
  const T *qkv, *output, *gate_up, *down; /* in the layout of product.c */
  const T *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
  int64_t window;
} NAME(lt_layer);

typedef struct {
  int64_t layers, hidden, inner, heads, kv_heads, dim;
  const NAME(lt_layer) *layer;
  const T *norm;
  float eps;
} NAME(lt_decoder);

typedef struct {
  int64_t tokens, threads;
  T *stream, *normed; /* the embeddings, overwritten; the final hidden states */
  const float *cos, *sin;
  T *cache; /* [layers][keys, values][rows][slots][kv_heads][dim] */
  int64_t layer_stride, value_stride, row_stride;
  const int64_t *rows, *slots, *contexts, *depths, *visible; /* per token */
  const int64_t *taps;   /* layers whose input is a feature, in rising order */
  int64_t num_taps, feature_stride;
  T *features;
  T *scratch; /* per token: heads + 2 kv_heads heads, heads heads, hidden, 3 inner */
} NAME(lt_step);

void NAME(decode)(const NAME(lt_decoder) *d, const NAME(lt_step) *s) {
  const int64_t n = s->tokens, width = (d->heads + 2 * d->kv_heads) * d->dim;
  const int64_t attended_width = d->heads * d->dim, kv = d->kv_heads * d->dim;
  const int threads = (int)s->threads;
  T *qkv = s->scratch, *attended = qkv + n * width, *delta = attended + n * attended_width;
  T *wide = delta + n * d->hidden, *inner = wide + n * 2 * d->inner;
  for (int64_t i = 0, tap = 0; i < d->layers; i++) {
    const NAME(lt_layer) *l = d->layer + i;
    T *keys = s->cache + i * s->layer_stride, *values = keys + s->value_stride;
    NAME(add_norm)(s->stream, i ? delta : 0, l->attention_norm, s->normed, n, d->hidden, d->eps);
    if (tap < s->num_taps && s->taps[tap] == i) {
      for (int64_t t = 0; t < n; t++)
        memcpy(s->features + t * s->feature_stride + tap * d->hidden, s->stream + t * d->hidden,
               (size_t)d->hidden * sizeof(T));
      tap++;
    }
    NAME(product)(s->normed, l->qkv, l->qkv_bias, qkv, n, d->hidden, width, threads);
    NAME(rotate)(qkv, l->q_norm, l->k_norm, s->cos, s->sin, n, d->heads, d->kv_heads, d->dim, d->eps);
    NAME(store_kv)(qkv + attended_width, qkv + attended_width + kv, width, keys, values,
                   s->row_stride, s->rows, s->slots, n, kv);
    NAME(attend_rows)(qkv, width, keys, values, s->row_stride, s->rows, s->contexts, s->depths,
                      s->visible, attended, n, d->heads, d->kv_heads, d->dim, l->window, threads);
    NAME(product)(attended, l->output, l->output_bias, delta, n, attended_width, d->hidden, threads);
    NAME(add_norm)(s->stream, delta, l->feed_forward_norm, s->normed, n, d->hidden, d->eps);
    NAME(product)(s->normed, l->gate_up, l->gate_up_bias, wide, n, d->hidden, 2 * d->inner, threads);
    NAME(swiglu)(wide, inner, n, d->inner, threads);
    NAME(product)(inner, l->down, l->down_bias, delta, n, d->inner, d->hidden, threads);
  }
  NAME(add_norm)(s->stream, delta, d->norm, s->normed, n, d->hidden, d->eps);
}

/* A target's forward up to the final norm, in one parallel region. With a region for each operation, the dispatching
   thread might have to wait for other work of its process between two of them. */

/* Copy the embedding of each row's token and the rotation of its position. */
static void embed(const Forward *w, number *x, number *cosine, number *sine) {
  for (const Stretch *s = w->stretches; s < w->stretches + w->count; s++) {
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < s->B * s->T; i++) {
      const int64_t r = s->first + i, position = s->bases[i / s->T] + i % s->T;
      memcpy(x + r * w->D, w->embedding + w->tokens[r] * w->D, sizeof(number) * w->D);
      memcpy(cosine + r * w->K, w->cosine + position * w->K, sizeof(number) * w->K);
      memcpy(sine + r * w->K, w->sine + position * w->K, sizeof(number) * w->K);
    }
  }
#pragma omp barrier
}

static void tap(const Forward *w, const number *x, int layer) {
  for (int n = 0; n < w->tap_count; n++) {
    if (w->tapped[n] != layer) continue;
#pragma omp for schedule(static) nowait
    for (int r = 0; r < w->R; r++)
      memcpy(w->taps + ((int64_t)r * w->tap_count + n) * w->D, x + (int64_t)r * w->D, sizeof(number) * w->D);
  }
}

/* Attention of one stretch, given the projections of all rows [R, (H + 2 * G) * K]. */
static void attend_stretch(const Forward *w, const Layer *layer, const Stretch *s, number *projected, number *found) {
  const int64_t E = (int64_t)(w->H + 2 * w->G) * w->K;
  const number *rows = projected + s->first * E;
  const Heads queries = {rows, s->T * E, w->K, E};
  Heads keys = queries, values = queries;
  keys.first += w->H * w->K, values.first += (w->H + w->G) * w->K;
  const Attention work = {.queries = queries, .new_keys = keys, .new_values = values, .keys = layer->keys,
                          .values = layer->values, .found = found + s->first * w->H * w->K, .slots = s->slots,
                          .bases = s->bases, .B = (int)s->B, .T = (int)s->T, .H = w->H, .G = w->G, .K = w->K,
                          .columns = w->columns, .slot_stride = w->slot_stride, .head_stride = w->head_stride};
  attend_all(&work);
}

static void forward(const Forward *w, int threads) {
  const int R = w->R, D = w->D, A = w->H * w->K, E = A + 2 * w->G * w->K;
  number *x = w->scratch, *normed = x + (int64_t)R * D, *projected = normed + (int64_t)R * D, *attended = projected + (int64_t)R * E;
  number *hidden = attended + (int64_t)R * A, *inside = hidden + (int64_t)R * D;
  number *cosine = inside + (int64_t)R * w->F, *sine = cosine + (int64_t)R * w->K;
#pragma omp parallel num_threads(threads)
  {
    embed(w, x, cosine, sine);
    for (const Layer *layer = w->layers; layer < w->layers + w->N; layer++) {
      const Before projection = {.x = x, .norm = layer->norm, .weight = layer->queries_keys_values, .cosine = cosine,
                                 .sine = sine, .normed = normed, .out = projected, .R = R, .D = D, .E = E,
                                 .heads = w->H + w->G, .K = w->K, .eps = w->eps};
      const Behind rest = {.x = x, .attended = attended, .output = layer->output, .norm = layer->norm_inside,
                           .gate_up = layer->gate_up, .down = layer->down, .hidden = hidden, .normed = normed,
                           .inside = inside, .out = x, .R = R, .D = D, .A = A, .F = w->F, .eps = w->eps};
      tap(w, x, (int)(layer - w->layers));
      before(&projection);
      /* Stretches share no slot, so that a thread may begin the next while another ends the last. */
      for (int s = 0; s < w->count; s++) attend_stretch(w, layer, &w->stretches[s], projected, attended);
#pragma omp barrier
      behind(&rest);
    }
    normalise(x, w->norm, w->eps, R, D, w->out);
  }
}

/* A SPIRe draft: its memory, its passes, its round. A draft is so small that torch would spend most of a pass on
   dispatch. Keys and values of a round's own positions are stored apart from the slots, and slots are read in place. */

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* Copy one position's keys or values, a row of G heads, to its place in [G, places, K]. */
static void remember(const number *row, int G, int K, int64_t places, int64_t place, number *memory) {
  for (int g = 0; g < G; g++) memcpy(memory + (g * places + place) * K, row + g * K, sizeof(number) * K);
}

/* Return the place of a position: the sink comes first, then the window, which is a ring. -1: in neither. */
static int64_t place_of(const Absorbed *work, int r) {
  const int64_t position = work->positions[r], sink = work->sink;
  if (position < sink) return position;
  return position >= work->ends[r] - work->window ? sink + (position - sink) % work->window : -1;
}

static void absorb(const Absorbed *work, int threads) {
  const int R = work->R, N = work->N, D = work->D, H = work->H, G = work->G, K = work->K, S = work->S;
  number *input = work->scratch, *normed = input + (int64_t)R * D, *projected = normed + (int64_t)R * D;
#pragma omp parallel num_threads(threads)
  for (int i = 0; i < N; i++) {
    const Layer *layer = &work->layers[i];
    const Before keys_values = {.x = input, .norm = layer->norm, .weight = outputs_from(layer->queries_keys_values, H * K, D),
                                .cosine = work->cosine, .sine = work->sine, .normed = normed, .out = projected,
                                .R = R, .D = D, .E = 2 * G * K, .heads = G, .K = K, .eps = work->eps};
#pragma omp for schedule(static)
    for (int r = 0; r < R; r++)
      memcpy(input + (int64_t)r * D, work->taps + ((int64_t)r * N + i) * D, sizeof(number) * D);
    before(&keys_values);
#pragma omp for schedule(static)
    for (int r = 0; r < R; r++) {
      const number *row = projected + (int64_t)r * 2 * G * K;
      const int64_t place = place_of(work, r), slot = work->slots[r] * G * S * K;
      if (place < 0) continue;
      if (i == 0) work->held[work->slots[r] * S + place] = work->positions[r];
      remember(row, G, K, S, place, layer->keys + slot);
      remember(row + G * K, G, K, S, place, layer->values + slot);
    }
  }
}

#define ROW(a) (rows ? rows[a] : (a)) /* the sequence of row a of a pass */

/* --- a pass ------------------------------------------------------------------------------------------------------- */

/* Keys and values of one sequence and head: S places of the slot, then the positions of the round. */
typedef struct {
  const number *keys, *values, *own_keys, *own_values;
  int S;
} Past;

static inline const number *at(const number *held, const number *own, int S, int s, int K) {
  return s < S ? held + (int64_t)s * K : own + (int64_t)(s - S) * K;
}

/* List the places that a position attends to: the sink, the window before it and, if the draft does so, itself.
   Return their number. */
static int visible(const DraftRound *round, int b, int pass, int *places) {
  const int64_t query = round->bases[b] + pass, last = query - !round->attends_self;
  int count = 0;
  for (int s = 0; s < round->S + round->k; s++) {
    int64_t key = s < round->S ? round->positions[round->slots[b] * round->S + s] : round->bases[b] + s - round->S;
    if (key >= 0 && key <= last && (key < round->sink || key >= query - round->window)) places[count++] = s;
  }
  return count;
}

/* Attention of one query [K] over `count` places. */
static void attend_places(const number *query, const Past *past, const int *places, int count, int K, number *found) {
  float weights[count + LANES], sums[K], largest = -INFINITY;
  for (int i = 0; i < count; i++) {
    const number *key = at(past->keys, past->own_keys, past->S, places[i], K);
    lanes products = every(0.0f);
    for (int k = 0; k < K; k += LANES) products = multiply_add(load(query + k), load(key + k), products);
    weights[i] = sum_of(products) / sqrtf((float)K);
    if (!(weights[i] <= largest)) largest = weights[i];
  }
  for (int i = count; i < count + LANES; i++) weights[i] = -1e30f;
  lanes totals = every(0.0f);
  for (int i = 0; i < count; i += LANES) {
    lanes some = exponential(load_wide(weights + i) - every(largest));
    totals += some;
    store_wide(weights + i, some);
  }
  memset(sums, 0, sizeof sums);
  for (int i = 0; i < count; i++) {
    const number *value = at(past->values, past->own_values, past->S, places[i], K);
    lanes weight = every(weights[i]);
    for (int k = 0; k < K; k += LANES)
      store_wide(sums + k, multiply_add(weight, load(value + k), load_wide(sums + k)));
  }
  lanes share = every(1.0f / sum_of(totals));
  for (int k = 0; k < K; k += LANES) store(found + k, load_wide(sums + k) * share);
}

/* Feedback memory: m = sum of w_l x^l over the inputs of all layers and the output of the last (SPIRe, section 3.3). */
static void mix(const number *passed, const float *weights, int N, int64_t numbers, number *out) {
#pragma omp for schedule(static)
  for (int64_t at = 0; at < numbers; at += LANES) {
    lanes sum = every(0.0f);
    for (int l = 0; l <= N; l++) sum = multiply_add(every(weights[l]), load(passed + l * numbers + at), sum);
    store(out + at, sum);
  }
}

/* One pass over A sequences of the round: those in `rows`, or all if NULL. Tokens and logits are [A]. */
static void pass_over(const DraftRound *round, const int64_t *rows, int A, int pass, const int64_t *tokens, int threads) {
  const int B = round->B, N = round->N, D = round->D, H = round->H, G = round->G, K = round->K, S = round->S;
  const int F = round->F, row = (H + 2 * G) * K;
  const int64_t held = (int64_t)G * S * K, own = (int64_t)G * round->k * K;
  number *passed = round->scratch, *hidden = passed + (int64_t)A * D * (N + 1), *normed = hidden + A * D;
  number *projected = normed + A * D, *attended = projected + A * row, *inside = attended + A * H * K;
  number *cosine = inside + A * F, *sine = cosine + A * K;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int a = 0; a < A; a++) {
      const int64_t position = round->bases[ROW(a)] + pass;
      memcpy(passed + a * D, round->embedding + tokens[a] * D, sizeof(number) * D);
      memcpy(cosine + a * K, round->cosine + position * K, sizeof(number) * K);
      memcpy(sine + a * K, round->sine + position * K, sizeof(number) * K);
    }
    Before projection = {.cosine = cosine, .sine = sine, .normed = normed, .out = projected,
                         .R = A, .D = D, .K = K, .eps = round->eps};
    for (int i = 0; i < N; i++) {
      const Layer *layer = &round->layers[i];
      number *own_keys = round->own + (int64_t)i * 2 * B * own, *own_values = own_keys + B * own;
      projection.x = passed + (int64_t)i * A * D, projection.norm = layer->norm;
      projection.weight = layer->queries_keys_values, projection.E = row, projection.heads = H + G;
      before(&projection);
#pragma omp for schedule(static)
      for (int a = 0; a < A; a++) {
        const int64_t b = ROW(a);
        const number *new = projected + a * row;
        int places[S + round->k], count = visible(round, b, pass, places);
        remember(new + H * K, G, K, round->k, pass, own_keys + b * own);
        remember(new + (H + G) * K, G, K, round->k, pass, own_values + b * own);
        for (int h = 0; h < H; h++) {
          int64_t g = h / (H / G), slot = round->slots[b] * held + g * S * K, mine = b * own + g * round->k * K;
          Past past = {layer->keys + slot, layer->values + slot, own_keys + mine, own_values + mine, S};
          attend_places(new + h * K, &past, places, count, K, attended + ((int64_t)a * H + h) * K);
        }
      }
      const Behind rest = {.x = projection.x, .attended = attended, .output = layer->output,
                           .norm = layer->norm_inside, .gate_up = layer->gate_up, .down = layer->down,
                           .hidden = hidden, .normed = normed, .inside = inside,
                           .out = passed + (int64_t)(i + 1) * A * D, .R = A, .D = D, .A = H * K, .F = F,
                           .eps = round->eps};
      behind(&rest);
    }
    for (int i = 0; round->feedback && pass + 1 < round->k && i < N; i++) {
      const Layer *layer = &round->layers[i];
      number *own_keys = round->own + (int64_t)i * 2 * B * own, *own_values = own_keys + B * own;
      mix(passed, round->feedback + i * (N + 1), N, (int64_t)A * D, hidden);
      projection.x = hidden, projection.norm = layer->norm, projection.heads = G;
      projection.weight = outputs_from(layer->queries_keys_values, H * K, D), projection.E = 2 * G * K;
      before(&projection);
#pragma omp for schedule(static)
      for (int a = 0; a < A; a++) {
        const int64_t b = ROW(a);
        remember(projected + a * 2 * G * K, G, K, round->k, pass, own_keys + b * own);
        remember(projected + (a * 2 + 1) * G * K, G, K, round->k, pass, own_values + b * own);
      }
    }
    normalise(passed + (int64_t)N * A * D, round->norm, round->eps, A, D, normed);
    product(normed, round->unembedding, A, D, round->V, WIDE, NULL, round->logits);
  }
}

static void draft_pass(const DraftRound *round, int pass, const int64_t *tokens, int threads) {
  pass_over(round, NULL, round->B, pass, tokens, threads);
}

/* --- a round ------------------------------------------------------------------------------------------------------ */

/* Return the final hidden states [A, D] of the last pass, over A sequences. */
static const number *final_states(const DraftRound *round, int A) {
  return round->scratch + (int64_t)A * round->D * (round->N + 2);
}

/* out [A, W] = inputs [A, D] * weights [W, D] + bias, in fp32. */
static void affine(const float *inputs, const float *weights, const float *bias, int A, int D, int W, float *out) {
#pragma omp for schedule(static)
  for (int w = 0; w < W; w++)
    for (int a = 0; a < A; a++) {
      lanes sum = every(0.0f);
      int d = 0;
      for (; d + LANES <= D; d += LANES)
        sum = multiply_add(load_wide(inputs + (int64_t)a * D + d), load_wide(weights + (int64_t)w * D + d), sum);
      float rest = bias[w];
      for (; d < D; d++) rest += inputs[(int64_t)a * D + d] * weights[(int64_t)w * D + d];
      out[(int64_t)a * W + w] = sum_of(sum) + rest;
    }
}

/* Compute a stop head's inputs for a token, except for the temperature, from logits [V] at temperature 1: log q of
   the token, the entropy of q, log q of the two most probable tokens. */
static void told_of(const float *logits, int64_t place, int V, float *told) {
  lanes most = every(-INFINITY), next = most, total = every(0.0f), weighted = every(0.0f);
  for (int v = 0; v < V; v += LANES) {
    const lanes here = load_wide(logits + v);
    next = larger(smaller(here, most), next);
    most = larger(here, most);
  }
  float in_lanes[2 * LANES], largest = -INFINITY, second = -INFINITY;
  store_wide(in_lanes, most), store_wide(in_lanes + LANES, next);
  for (int at = 0; at < 2 * LANES; at++) {
    second = fmaxf(second, fminf(in_lanes[at], largest));
    largest = fmaxf(largest, in_lanes[at]);
  }
  for (int v = 0; v < V; v += LANES) {
    lanes below = load_wide(logits + v) - every(largest), share = exponential(below);
    total += share;
    weighted = multiply_add(share, below, weighted);
  }
  const float sum = sum_of(total), log_sum = logf(sum);
  told[0] = logits[place] - largest - log_sum;
  told[1] = log_sum - sum_of(weighted) / sum;
  told[2] = -log_sum;
  told[3] = second - largest - log_sum;
}

/* Multiply the probability that each block is accepted by that of its newest token. `before`: logits [A, V] before
   sampling. */
static void judge_newest(const DraftRound *round, const Stop *stop, const int64_t *rows, int A, const Draw *drawn,
                         int threads) {
  const int D = round->D, W = stop->W, V = round->V;
  float *before = stop->scratch, *states = before + (int64_t)round->B * V, *x = states + (int64_t)round->B * D;
  float *inside = x + (int64_t)round->B * W, *told = inside + (int64_t)round->B * W;
  const number *hidden = final_states(round, A);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int a = 0; a < A; a++) {
      for (int d = 0; d < D; d += LANES) store_wide(states + (int64_t)a * D + d, load(hidden + (int64_t)a * D + d));
      told_of(before + (int64_t)a * V, place_among(drawn->vocabulary, V, drawn->tokens[rows[a]]), V, told + a * TOLD);
      told[a * TOLD + TOLD - 1] = drawn->sampling.temperatures[rows[a]];
    }
    affine(states, stop->enter, stop->enter_bias, A, D, W, x);
#pragma omp for schedule(static)
    for (int a = 0; a < A; a++)
      for (int f = 0; f < TOLD; f++)
        for (int w = 0; w < W; w++) x[(int64_t)a * W + w] += told[a * TOLD + f] * stop->enter_told[(int64_t)f * W + w];
    for (int i = 0; i < stop->depth; i++) {
      affine(x, stop->residual + (int64_t)i * W * W, stop->residual_bias + (int64_t)i * W, A, W, W, inside);
#pragma omp for schedule(static)
      for (int64_t at = 0; at < (int64_t)A * W; at++) x[at] += inside[at] / (1.0f + expf(-inside[at]));
    }
#pragma omp for schedule(static)
    for (int a = 0; a < A; a++) {
      float logit = stop->leave[W];
      for (int w = 0; w < W; w++) logit += x[(int64_t)a * W + w] * stop->leave[w];
      stop->stands[rows[a]] /= 1.0f + expf(-logit);
    }
  }
}

/* Run all passes, each fed the tokens drawn from the pass before; tokens are [k, B]. With `stop`, a sequence leaves
   the round once its block is too likely to be rejected. The tokens drawn so far are kept: dropping one for its
   value would change the distribution. */
static void draft_round(const DraftRound *round, const int64_t *tokens, const Draw *drawn, const Stop *stop, int threads) {
  const int B = round->B;
  int64_t rows[B], fed[B];
  int alive = B;
  Draw next = *drawn;
  for (int b = 0; b < B; b++) rows[b] = b, fed[b] = tokens[b];
  next.rows = rows;
  for (int pass = 0; pass < round->k && alive; pass++) {
    pass_over(round, rows, alive, pass, fed, threads);
    if (stop) memcpy(stop->scratch, round->logits, sizeof(float) * alive * round->V);
    next.B = alive;
    draw(&next, threads);
    if (stop) judge_newest(round, stop, rows, alive, &next, threads);
    int on = 0;
    for (int a = 0; a < alive; a++) {
      const int64_t b = rows[a];
      if (stop) stop->counts[b] = pass + 1;
      if (!stop || stop->stands[b] >= stop->least[b]) fed[on] = next.tokens[b], rows[on++] = b;
    }
    alive = on;
    next.tokens += B, next.uniforms++, next.q += round->V, next.step++;
  }
}

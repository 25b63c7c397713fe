/* A SPIRe draft by the matrix tiles (AMX) of x86 processors: what it remembers, a pass over it, and what it draws.

   A draft is so small that its passes are mostly dispatch where torch computes them. Keys and values of a round's own
   positions lie beside the slots', and nothing is copied: a slot is read where it is. */

#include "_tiles.h"

#ifdef HAVE_TILES
#include <math.h>

WITH_TILES

#define BLOCK 32

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* One position's keys or values, a row of G heads, to its place in [G, places, K]. */
static void remember(const uint16_t *row, int G, int K, int64_t places, int64_t place, uint16_t *memory) {
  for (int g = 0; g < G; g++) memcpy(memory + (g * places + place) * K, row + g * K, sizeof(uint16_t) * K);
}

/* Where a position is held: the sink has places of its own, the window is a ring. -1 where it is in neither. */
static int64_t place_of(const Absorbed *work, int r) {
  const int64_t position = work->positions[r], sink = work->sink;
  if (position < sink) return position;
  return position >= work->ends[r] - work->window ? sink + (position - sink) % work->window : -1;
}

void absorb(const Absorbed *work, int threads) {
  const int R = work->R, N = work->N, D = work->D, H = work->H, G = work->G, K = work->K, S = work->S;
  uint16_t *input = work->scratch, *normed = input + (int64_t)R * D, *projected = normed + (int64_t)R * D;
#pragma omp parallel num_threads(threads)
  for (int i = 0; i < N; i++) {
    const DraftLayer *layer = &work->layers[i];
#pragma omp for schedule(static)
    for (int r = 0; r < R; r++)
      memcpy(input + (int64_t)r * D, work->taps + ((int64_t)r * N + i) * D, sizeof(uint16_t) * D);
    before_attention(input, layer->norm, work->eps, layer->queries_keys_values + (int64_t)H * K * D, R, D, 2 * G * K,
                     work->cosine, work->sine, G, K, normed, projected);
#pragma omp for schedule(static)
    for (int r = 0; r < R; r++) {
      const uint16_t *row = projected + (int64_t)r * 2 * G * K;
      const int64_t place = place_of(work, r), slot = work->slots[r] * G * S * K;
      if (place < 0) continue;
      if (i == 0) work->held[work->slots[r] * S + place] = work->positions[r];
      remember(row, G, K, S, place, layer->keys + slot);
      remember(row + G * K, G, K, S, place, layer->values + slot);
    }
  }
}

/* --- a pass ------------------------------------------------------------------------------------------------------- */

/* Keys and values of one sequence and head: those of its slot's places, and behind them the round's own. */
typedef struct {
  const uint16_t *keys, *values, *own_keys, *own_values;
  int S;
} Past;

static inline const uint16_t *at(const uint16_t *held, const uint16_t *own, int S, int s, int K) {
  return s < S ? held + (int64_t)s * K : own + (int64_t)(s - S) * K;
}

/* Which places a position attends: the sink, the window before it, and itself if the draft does. Returns how many. */
static int visible(const DraftRound *round, int b, int pass, int *places) {
  const int64_t query = round->bases[b] + pass, last = query - !round->attends_self;
  int count = 0;
  for (int s = 0; s < round->S + round->k; s++) {
    int64_t key = s < round->S ? round->positions[round->slots[b] * round->S + s] : round->bases[b] + s - round->S;
    if (key >= 0 && key <= last && (key < round->sink || key >= query - round->window)) places[count++] = s;
  }
  return count;
}

/* What one query [K] finds in `count` places. */
static void attend_places(const uint16_t *query, const Past *past, const int *places, int count, int K,
                          uint16_t *found) {
  float weights[count + 1], sums[K], largest = -INFINITY, total = 0;
  for (int i = 0; i < count; i++) {
    const uint16_t *key = at(past->keys, past->own_keys, past->S, places[i], K);
    __m512 products = _mm512_setzero_ps();
    for (int k = 0; k < K; k += 16) products = _mm512_fmadd_ps(load16(query + k), load16(key + k), products);
    weights[i] = _mm512_reduce_add_ps(products) / sqrtf((float)K);
    if (!(weights[i] <= largest)) largest = weights[i];
  }
  memset(sums, 0, sizeof sums);
  for (int i = 0; i < count; i++) {
    const uint16_t *value = at(past->values, past->own_values, past->S, places[i], K);
    __m512 weight = exponential(_mm512_set1_ps(weights[i] - largest));
    total += _mm512_cvtss_f32(weight);
    for (int k = 0; k < K; k += 16)
      _mm512_storeu_ps(sums + k, _mm512_fmadd_ps(weight, load16(value + k), _mm512_loadu_ps(sums + k)));
  }
  __m512 share = _mm512_set1_ps(1.0f / total);
  for (int k = 0; k < K; k += 16) store16(found + k, _mm512_mul_ps(_mm512_loadu_ps(sums + k), share));
}

/* m = sum of w_l x^l over what entered the layers and left the last one (paper section 3.3). */
static void mix(const uint16_t *passed, const float *weights, int N, int64_t numbers, uint16_t *out) {
#pragma omp for schedule(static)
  for (int64_t at = 0; at < numbers; at += 16) {
    __m512 sum = _mm512_setzero_ps();
    for (int l = 0; l <= N; l++)
      sum = _mm512_fmadd_ps(_mm512_set1_ps(weights[l]), load16(passed + l * numbers + at), sum);
    store16(out + at, sum);
  }
}

void draft_pass(const DraftRound *round, int pass, const int64_t *tokens, int threads) {
  const int B = round->B, N = round->N, D = round->D, H = round->H, G = round->G, K = round->K, S = round->S;
  const int F = round->F, row = (H + 2 * G) * K;
  const int64_t held = (int64_t)G * S * K, own = (int64_t)G * round->k * K;
  const uint16_t *cosine = round->cosine + (int64_t)pass * B * K, *sine = round->sine + (int64_t)pass * B * K;
  uint16_t *passed = round->scratch, *hidden = passed + (int64_t)B * D * (N + 1), *normed = hidden + B * D;
  uint16_t *projected = normed + B * D, *attended = projected + B * row, *inside = attended + B * H * K;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int b = 0; b < B; b++)
      memcpy(passed + b * D, round->embedding + tokens[b] * D, sizeof(uint16_t) * D);
    for (int i = 0; i < N; i++) {
      const DraftLayer *layer = &round->layers[i];
      const uint16_t *x = passed + (int64_t)i * B * D;
      uint16_t *own_keys = round->own + (int64_t)i * 2 * B * own, *own_values = own_keys + B * own;
      before_attention(x, layer->norm, round->eps, layer->queries_keys_values, B, D, row, cosine, sine, H + G, K,
                       normed, projected);
#pragma omp for schedule(static)
      for (int b = 0; b < B; b++) {
        const uint16_t *new = projected + b * row;
        int places[S + round->k], count = visible(round, b, pass, places);
        remember(new + H * K, G, K, round->k, pass, own_keys + b * own);
        remember(new + (H + G) * K, G, K, round->k, pass, own_values + b * own);
        for (int h = 0; h < H; h++) {
          int64_t g = h / (H / G), slot = round->slots[b] * held + g * S * K, mine = b * own + g * round->k * K;
          Past past = {layer->keys + slot, layer->values + slot, own_keys + mine, own_values + mine, S};
          attend_places(new + h * K, &past, places, count, K, attended + (b * H + h) * K);
        }
      }
      after_attention(x, attended, layer->output, layer->norm_inside, round->eps, layer->gate_up, layer->down, B, D,
                      H * K, F, hidden, normed, inside, passed + (int64_t)(i + 1) * B * D);
    }
    for (int i = 0; round->feedback && pass + 1 < round->k && i < N; i++) {
      const DraftLayer *layer = &round->layers[i];
      uint16_t *own_keys = round->own + (int64_t)i * 2 * B * own, *own_values = own_keys + B * own;
      mix(passed, round->feedback + i * (N + 1), N, (int64_t)B * D, hidden);
      before_attention(hidden, layer->norm, round->eps, layer->queries_keys_values + (int64_t)H * K * D, B, D,
                       2 * G * K, cosine, sine, G, K, normed, projected);
#pragma omp for schedule(static)
      for (int b = 0; b < B; b++) {
        remember(projected + b * 2 * G * K, G, K, round->k, pass, own_keys + b * own);
        remember(projected + (b * 2 + 1) * G * K, G, K, round->k, pass, own_values + b * own);
      }
    }
    normalise(passed + (int64_t)N * B * D, round->norm, round->eps, B, D, normed);
    wide_product(normed, round->unembedding, B, D, round->V, round->logits);
  }
}

/* --- what is drawn ------------------------------------------------------------------------------------------------ */

static int64_t likeliest(const float *logits, int V) {
  int64_t best = 0;
  for (int v = 1; v < V; v++)
    if (logits[v] > logits[best]) best = v;
  return best;
}

/* The softmax of a row, rounded to bfloat16 where it is stored. */
static void distribute(float *logits, float temperature, int V, uint16_t *q) {
  __m512 most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
  for (int v = 0; v < V; v += 16) most = _mm512_max_ps(_mm512_loadu_ps(logits + v), most);
  __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(most)), divisor = _mm512_set1_ps(temperature);
  for (int v = 0; v < V; v += 16) {
    __m512 share = exponential(_mm512_div_ps(_mm512_sub_ps(_mm512_loadu_ps(logits + v), largest), divisor));
    total = _mm512_add_ps(total, share);
    _mm512_storeu_ps(logits + v, share);
  }
  __m512 whole = _mm512_set1_ps(_mm512_reduce_add_ps(total));
  for (int v = 0; v < V; v += 16) store16(q + v, _mm512_div_ps(_mm512_loadu_ps(logits + v), whole));
}

/* The first token at which the sum of q is above its share of the whole: inverse CDF. None of probability zero. */
static int64_t inverse(const uint16_t *q, double uniform, int V) {
  double sums[V / BLOCK], total = 0, passed = 0;
  for (int block = 0; block < V / BLOCK; block++) {
    __m512 first = load16(q + block * BLOCK), last = load16(q + block * BLOCK + 16);
    __m512d low = _mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(first)),
                                _mm512_cvtps_pd(_mm512_extractf32x8_ps(first, 1)));
    __m512d high = _mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(last)),
                                 _mm512_cvtps_pd(_mm512_extractf32x8_ps(last, 1)));
    sums[block] = _mm512_reduce_add_pd(_mm512_add_pd(low, high));
    total += sums[block];
  }
  double threshold = fmin(uniform * total, nextafter(total, 0));
  int block = 0;
  while (block < V / BLOCK - 1 && !(passed + sums[block] > threshold)) passed += sums[block++];
  int64_t found = block * BLOCK;
  for (int v = block * BLOCK; v < (block + 1) * BLOCK && !(passed > threshold); v++) {
    uint32_t bits = (uint32_t)q[v] << 16;
    float share;
    memcpy(&share, &bits, sizeof share);
    if (share > 0) found = v;
    passed += share;
  }
  return found;
}

void draw(float *logits, const float *temperatures, const double *uniforms, int B, int V, int64_t *tokens, uint16_t *q,
          long long q_row, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int b = 0; b < B; b++) {
    float *row = logits + (int64_t)b * V;
    if (temperatures[b] == 0) {
      tokens[b] = likeliest(row, V);
    } else {
      distribute(row, temperatures[b], V, q + b * q_row);
      tokens[b] = inverse(q + b * q_row, uniforms[b], V);
    }
  }
}

void widen(const int64_t *rows, int B, int K, int V, float *wide, float *sums, float *leasts, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int row = 0; row < B * K; row++) {
    const uint16_t *narrow = (const uint16_t *)(uintptr_t)rows[row / K] + (int64_t)(row % K) * V;
    float *to = wide + (int64_t)row * V;
    __m512 sum = _mm512_setzero_ps(), least = _mm512_set1_ps(INFINITY);
    for (int v = 0; v < V; v += 16) {
      __m512 values = load16(narrow + v);
      _mm512_storeu_ps(to + v, values);
      sum = _mm512_add_ps(sum, values);
      least = _mm512_min_ps(values, least);
    }
    sums[row] = _mm512_reduce_add_ps(sum);
    leasts[row] = _mm512_reduce_min_ps(least);
  }
}
WITHOUT_TILES
#endif

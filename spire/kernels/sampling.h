/* Sampling and verification, from logits to tokens (`spire.decoding`), with the vectors of the file that includes
   this. V is a multiple of SHARES. Logits are overwritten by shares: probabilities up to a common factor. */

#include <stdlib.h>

#include "randomness.h"

#define SHARES 32 /* shares that are summed together */

/* Less probable tokens are rare, as in `spire.decoding.sampling`: they have no noise of their own. */
#define NOT_RARE 0x1p-14f
#define BLOCK_OF_IDS 64

static int64_t likeliest(const float *logits, int V) {
  int64_t best = 0;
  for (int v = 1; v < V; v++)
    if (logits[v] > logits[best]) best = v;
  return best;
}

/* Replace logits by exp((x - largest) / temperature). Return their sum. */
static float soften(float *logits, float temperature, int V) {
  lanes most = every(-INFINITY), total = every(0.0f);
  for (int v = 0; v < V; v += LANES) most = larger(load_wide(logits + v), most);
  lanes largest = every(largest_of(most)), divisor = every(temperature);
  for (int v = 0; v < V; v += LANES) {
    lanes share = exponential((load_wide(logits + v) - largest) / divisor);
    total += share;
    store_wide(logits + v, share);
  }
  return sum_of(total);
}

typedef struct {
  float share;
  int32_t place;
} Candidate;

/* For qsort: largest share first, ties by id. */
static int in_order(const void *one, const void *other) {
  const Candidate *a = one, *b = other;
  if (a->share != b->share) return a->share < b->share ? 1 : -1;
  return a->place - b->place;
}

/* Return the number of shares that are at least `least`, and set their sum. */
static int count_from(const float *shares, float least, int V, double *sum) {
  lanes sums = every(0.0f), counts = every(0.0f);
  for (int v = 0; v < V; v += LANES) {
    const lanes here = load_wide(shares + v);
    sums += zero_below(least, here, here);
    counts += zero_below(least, here, every(1.0f));
  }
  *sum = exact_sum_of(sums);
  return (int)sum_of(counts);
}

/* Set to zero the shares that top_k, then top_p, then min_p exclude (`spire.decoding.sampling`). Return the new sum. */
static float keep_likeliest(float *shares, float total, int64_t top_k, float top_p, float min_p, int V) {
  const float floor = min_p; /* the largest share is 1 */
  double sum;
  int count;
  if (top_k <= 0 || top_k >= V) top_k = V;
  if (top_k == V && top_p >= 1) {
    count_from(shares, floor, V, &sum);
    for (int v = 0; v < V; v += LANES) store_wide(shares + v, zero_below(floor, load_wide(shares + v), load_wide(shares + v)));
    return (float)sum;
  }
  /* Sort only the largest shares, as many as top_k and top_p may keep, and none that is zero. */
  float least = total * 0x1p-7f;
  while (1) {
    count = count_from(shares, least, V, &sum);
    if (least <= 0x1p-126f || (top_k < V ? count >= top_k : sum >= (double)top_p * total)) break;
    least = fmaxf(least * 0x1p-5f, 0x1p-126f); /* shares are zero, or at least e^-87 */
  }
  Candidate *all = malloc(sizeof(Candidate) * (count + 1));
  if (!all) abort();
  int found = 0;
  for (int v = 0; v < V; v++)
    if (shares[v] >= least && found < count) all[found++] = (Candidate){shares[v], v};
  qsort(all, found, sizeof(Candidate), in_order);
  double whole = 0, before = 0, left = 0;
  for (int rank = 0; rank < found && rank < top_k; rank++) whole += all[rank].share;
  if (top_k == V) whole = total;
  memset(shares, 0, sizeof(float) * V);
  for (int rank = 0; rank < found && rank < top_k; rank++) {
    const float share = all[rank].share;
    if (rank && ((top_p < 1 && before >= top_p * whole) || share < floor)) break;
    before += share, left += share;
    shares[all[rank].place] = share;
  }
  free(all);
  return (float)left;
}

/* Replace logits by the shares of the distribution that sequence b draws from. Return their sum. */
static float shares_of(const Sampling *how, int b, float *logits, int V) {
  const float total = soften(logits, how->temperatures[b], V);
  const int whole = how->top_k[b] <= 0 && how->top_p[b] >= 1 && how->min_p[b] <= 0;
  return whole ? total : keep_likeliest(logits, total, how->top_k[b], how->top_p[b], how->min_p[b], V);
}

/* Draw by inverse CDF: return the first token at which the cumulative sum exceeds `uniform` of the total. A token of
   share zero is never drawn. */
static int64_t inverse(const float *shares, double uniform, int V) {
  double sums[V / SHARES], total = 0, passed = 0;
  for (int block = 0; block < V / SHARES; block++) {
    sums[block] = 0;
    for (int i = 0; i < SHARES; i += LANES) sums[block] += exact_sum_of(load_wide(shares + block * SHARES + i));
    total += sums[block];
  }
  double threshold = fmin(uniform * total, nextafter(total, 0));
  int block = 0;
  while (block < V / SHARES - 1 && !(passed + sums[block] > threshold)) passed += sums[block++];
  int64_t found = block * SHARES;
  for (int v = block * SHARES; v < (block + 1) * SHARES && !(passed > threshold); v++) {
    if (shares[v] > 0) found = v;
    passed += shares[v];
  }
  return found;
}

/* Return the token of a column: `vocabulary` is ascending, or NULL for all tokens. */
static inline int64_t token_at(const int64_t *vocabulary, int64_t place) {
  return vocabulary ? vocabulary[place] : place;
}

/* Return the column of a token, or of a neighbour if the vocabulary does not contain it. */
static int64_t place_among(const int64_t *vocabulary, int V, int64_t token) {
  int first = 0, end = V;
  if (!vocabulary) return token;
  while (end - first > 1) {
    const int middle = (first + end) / 2;
    if (vocabulary[middle] <= token) first = middle; else end = middle;
  }
  return first;
}

/* Return the column of a rare token, drawn by Gumbel noise: first a block of ids, then an id of this block. */
static int64_t pick_rare(const float *shares, float total, const int64_t *vocabulary, int V, int ids, uint64_t bits) {
  double best = -INFINITY;
  int first = 0, end = 0;
  int64_t found = 0;
  for (int v = 0, from = 0; v < V; from = v) {
    const int64_t block = token_at(vocabulary, v) / BLOCK_OF_IDS;
    float sum = 0;
    for (; v < V && token_at(vocabulary, v) / BLOCK_OF_IDS == block; v++)
      if (shares[v] / total < NOT_RARE) sum += shares[v] / total;
    const double score = log(sum) + gumbel(bits, ids + block); /* the keys of blocks follow those of ids */
    if (score > best) best = score, first = from, end = v;
  }
  best = -INFINITY;
  for (int v = first; v < end; v++) {
    if (!(shares[v] / total < NOT_RARE)) continue;
    const double score = log(shares[v] / total) + gumbel(bits, token_at(vocabulary, v));
    if (score > best) best = score, found = v;
  }
  return found;
}

/* Return the column that the invariant rule picks for sequence b: the argmax of log p + Gumbel noise
   (`spire.decoding.sampling.pick`). The shares sum to `total`. */
static int64_t pick(const Sampling *how, int b, int step, const float *shares, float total, const int64_t *vocabulary,
                    int V) {
  const uint64_t seed = how->seeds[b], choice = how->choices[b], position = how->bases[b] + step + 1;
  const uint64_t bits = random_bits(seed, choice, position, NOISE, 0);
  double best = -INFINITY, rest = 0;
  int64_t found = 0;
  lanes whole = every(total), rare = every(0.0f);
  for (int v = 0; v < V; v += LANES) {
    const lanes p = load_wide(shares + v) / whole;
    if (largest_of(p) < NOT_RARE) {
      rare += p;
      continue;
    }
    float in_lanes[LANES];
    store_wide(in_lanes, p);
    for (int i = 0; i < LANES; i++) {
      if (in_lanes[i] < NOT_RARE) {
        rest += in_lanes[i];
        continue;
      }
      const double score = log(in_lanes[i]) + gumbel(bits, token_at(vocabulary, v + i));
      if (score > best) best = score, found = v + i;
    }
  }
  rest += exact_sum_of(rare);
  /* All rare tokens compete as one, whose key follows that of the last id. */
  if (log(rest) + gumbel(bits, how->ids) < best) return found;
  return pick_rare(shares, total, vocabulary, V, how->ids, random_bits(seed, choice, position, TAIL, 0));
}

static void draw(const Draw *work, int threads) {
  const int V = work->V;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int a = 0; a < work->B; a++) {
    const int64_t b = work->rows ? work->rows[a] : a;
    float *row = work->logits + (int64_t)a * V;
    uint16_t *q = work->q + b * work->q_row;
    const float temperature = work->sampling.temperatures[b];
    const float total = temperature ? shares_of(&work->sampling, b, row, V) : 0;
    if (!temperature || work->sampling.rules[b] == INVARIANT) {
      const int64_t place =
          temperature ? pick(&work->sampling, b, work->step, row, total, work->vocabulary, V) : likeliest(row, V);
      work->tokens[b] = token_at(work->vocabulary, place);
      continue;
    }
    lanes whole = every(total);
    for (int v = 0; v < V; v += LANES) {
      store_narrow(q + v, load_wide(row + v) / whole);
      store_wide(row + v, load_narrow(q + v));
    }
    work->tokens[b] = token_at(work->vocabulary, inverse(row, work->uniforms[b * work->uniforms_row], V));
  }
}

static int all_numbers(const float *logits, int V) {
  lanes sum = every(0.0f);
  for (int v = 0; v < V; v += LANES) sum += load_wide(logits + v);
  return isfinite(sum_of(sum));
}

/* The distributions of one position: shares of p that sum to `total`, and a row of q over W tokens that sums to
   `q_sum`. */
typedef struct {
  float *p, total;
  const uint16_t *q;
  float q_sum;
  const int64_t *vocabulary; /* [W], ascending; NULL: all tokens */
  int W;
} Pair;

static inline float of_narrow(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

/* max(0, weight * p - q), if q covers all tokens */
#define LEFT(v) \
  larger(weight *(load_wide(pair->p + (v)) / whole) - load_narrow(pair->q + (v)) / q_whole, every(0.0f))

/* Return the sum of max(0, weight * p - q). */
static float sum_left(const Pair *pair, float weight_of_p, int V) {
  lanes whole = every(pair->total), q_whole = every(pair->q_sum), weight = every(weight_of_p), sum = every(0.0f);
  if (pair->vocabulary) { /* the weight, which weight * p sums to, less the part that q covers */
    double taken = 0;
    for (int w = 0; w < pair->W; w++)
      taken += fminf(weight_of_p * (pair->p[pair->vocabulary[w]] / pair->total), of_narrow(pair->q[w]) / pair->q_sum);
    return (float)fmax(weight_of_p - taken, 0);
  }
  for (int v = 0; v < V; v += LANES) sum += LEFT(v);
  return sum_of(sum);
}

/* `leave` for a q that covers only some tokens. */
static void leave_of_vocabulary(const Pair *pair, float weight_of_p, int V) {
  if (!(sum_left(pair, weight_of_p, V) > 0)) return;
  lanes whole = every(pair->total), weight = every(weight_of_p);
  for (int v = 0; v < V; v += LANES) store_wide(pair->p + v, weight * (load_wide(pair->p + v) / whole));
  for (int w = 0; w < pair->W; w++) {
    float *p = pair->p + pair->vocabulary[w];
    *p = fmaxf(*p - of_narrow(pair->q[w]) / pair->q_sum, 0);
  }
}

/* Replace p by the residual max(0, weight * p - q), unless this is zero everywhere. */
static void leave(const Pair *pair, float weight_of_p, int V) {
  lanes whole = every(pair->total), q_whole = every(pair->q_sum), weight = every(weight_of_p), most = every(0.0f);
  if (pair->vocabulary) {
    leave_of_vocabulary(pair, weight_of_p, V);
    return;
  }
  for (int v = 0; v < V; v += LANES) most = larger(LEFT(v), most);
  if (!(largest_of(most) > 0)) return;
  for (int v = 0; v < V; v += LANES) store_wide(pair->p + v, LEFT(v));
}
#undef LEFT

/* Return logits of sequence b: the row after its first t draft tokens. */
static float *logits_of(const Verdict *work, int b, int t) {
  int64_t row = t;
  for (int before = 0; before < b; before++) row += work->padded ? work->T : work->counts[before] + 1;
  return work->logits + row * work->V;
}

/* Return the uniform number of a purpose for the position after the first t draft tokens of sequence b. Block
   verification uses numbers of positions that it then discards: its numbers depend on the base, too. */
static double number_of(const Verdict *work, int b, int t, int purpose) {
  const Sampling *how = &work->sampling;
  const uint64_t behind = how->bases[b] + 1;
  return uniform(how->seeds[b], how->choices[b], behind + t, purpose, how->rules[b] == BLOCKS ? behind : 0);
}

static float q_of(const Pair *pair, int64_t token) {
  const int64_t place = place_among(pair->vocabulary, pair->W, token);
  return token_at(pair->vocabulary, place) == token ? of_narrow(pair->q[place]) / pair->q_sum : 0;
}

/* Return p after the first t draft tokens, and q of the next one. */
static Pair softened(const Verdict *work, int b, int t) {
  const int64_t at = (int64_t)b * (work->T - 1) + t;
  float *row = logits_of(work, b, t);
  const float total = shares_of(&work->sampling, b, row, work->V);
  return (Pair){row, total, work->q + at * work->W, work->q_sums[at], work->vocabulary, work->W};
}

/* Accept draft tokens while they equal the target's own: its most probable token or, under the invariant rule, its
   pick. */
static int follow_target(const Verdict *work, int b, int count, int64_t *last) {
  const float temperature = work->sampling.temperatures[b];
  for (int t = 0;; t++) {
    float *row = logits_of(work, b, t);
    const float total = temperature ? shares_of(&work->sampling, b, row, work->V) : 0;
    *last = temperature ? pick(&work->sampling, b, t, row, total, NULL, work->V) : likeliest(row, work->V);
    if (t == count || *last != work->drafted[(int64_t)b * (work->T - 1) + t]) return t;
  }
}

/* The rejection rule. Returns the number of accepted tokens; the row after them then holds what the final token is
   drawn from. Positions after the first rejection are not computed. */
static int reject(const Verdict *work, int b, int count) {
  for (int t = 0; t < count; t++) {
    const int64_t at = (int64_t)b * (work->T - 1) + t, token = work->drafted[at];
    const Pair pair = softened(work, b, t);
    /* Without dividing by q: a token with p = 0 is always rejected, a token with only q = 0 always accepted. */
    if (number_of(work, b, t, ACCEPT) * q_of(&pair, token) < pair.p[token] / pair.total) continue;
    leave(&pair, 1.0f, work->V);
    return t;
  }
  shares_of(&work->sampling, b, logits_of(work, b, count), work->V);
  return count;
}

/* Block verification (`spire.decoding.verification`). Returns the length of the longest accepted prefix; the row
   after it then holds what the final token is drawn from. */
static int reject_blocks(const Verdict *work, int b, int count) {
  Pair pairs[work->T];
  float weights[work->T];
  const int64_t first = (int64_t)b * (work->T - 1);
  weights[0] = 1.0f;
  for (int t = 0; t < count; t++) {
    pairs[t] = softened(work, b, t);
    const int64_t token = work->drafted[first + t];
    const float ratio = pairs[t].p[token] / pairs[t].total / q_of(&pairs[t], token);
    /* 0/0: p and q both exclude the token. A weight of zero stays zero. */
    weights[t + 1] = isnan(ratio) || weights[t] == 0 ? weights[t] : fminf(1.0f, weights[t] * ratio);
  }
  int stand = count;
  for (; stand > 0; stand--) {
    float stays = weights[stand];
    if (stand < count) {
      const float left = sum_left(&pairs[stand], weights[stand], work->V);
      stays = left / (left + 1 - weights[stand]);
      if (isnan(stays)) stays = 1.0f;
    }
    if (number_of(work, b, stand - 1, ACCEPT) < stays) break;
  }
  if (stand < count)
    leave(&pairs[stand], weights[stand], work->V);
  else
    shares_of(&work->sampling, b, logits_of(work, b, count), work->V);
  return stand;
}

static void judge_row(const Verdict *work, int b) {
  const int T = work->T, count = (int)work->counts[b];
  int64_t *tokens = work->tokens + (int64_t)b * T, last;
  work->finite[b] = 1;
  for (int t = 0; t <= count; t++)
    if (!all_numbers(logits_of(work, b, t), work->V)) work->finite[b] = 0;
  const int64_t rule = work->sampling.rules[b];
  int stand;
  if (work->sampling.temperatures[b] == 0 || rule == INVARIANT) {
    stand = follow_target(work, b, count, &last);
  } else {
    stand = rule == BLOCKS ? reject_blocks(work, b, count) : reject(work, b, count);
    last = inverse(logits_of(work, b, stand), number_of(work, b, stand, SAMPLE), work->V);
  }
  memset(tokens, 0, sizeof(int64_t) * T);
  memcpy(tokens, work->drafted + (int64_t)b * (T - 1), sizeof(int64_t) * stand);
  tokens[stand] = last;
  work->accepted[b] = stand;
}

static void judge(const Verdict *work, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int b = 0; b < work->B; b++) judge_row(work, b);
}

static void collect(const Collection *work, int threads) {
  const int V = work->V;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int row = 0; row < work->B * work->K; row++) {
    const int b = row / work->K, k = row % work->K;
    uint16_t *to = work->together + (int64_t)row * V;
    lanes sum = every(0.0f), least = every(INFINITY);
    if (k < work->counts[b])
      memcpy(to, (const uint16_t *)(uintptr_t)work->rows[b] + (int64_t)k * V, sizeof(uint16_t) * V);
    else
      memset(to, 0, sizeof(uint16_t) * V);
    for (int v = 0; v < V; v += LANES) {
      lanes values = load_narrow(to + v);
      sum += values;
      least = smaller(values, least);
    }
    work->sums[row] = sum_of(sum);
    work->leasts[row] = least_of(least);
  }
}

/* What is drawn from logits, by `exponential` and vectors of the file that includes this: a draft's tokens, and those
   of a target by the rejection rule and that of blocks (`spire.decoding`). V is a multiple of SHARES. */

#define SHARES 32 /* of a distribution, summed together */

static int64_t likeliest(const float *logits, int V) {
  int64_t best = 0;
  for (int v = 1; v < V; v++)
    if (logits[v] > logits[best]) best = v;
  return best;
}

/* Logits become e^((x - largest) / temperature). Returns their sum. */
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

/* The first token at which the sum of the shares is above its part of the whole: inverse CDF. None of share zero. */
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

static inline int64_t token_at(const Draw *work, int64_t place) {
  return work->vocabulary ? work->vocabulary[place] : place;
}

static void draw(const Draw *work, int threads) {
  const int V = work->V;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int a = 0; a < work->B; a++) {
    const int64_t b = work->rows ? work->rows[a] : a;
    float *row = work->logits + (int64_t)a * V;
    uint16_t *q = work->q + b * work->q_row;
    if (work->temperatures[b] == 0) {
      work->tokens[b] = token_at(work, likeliest(row, V));
      continue;
    }
    lanes whole = every(soften(row, work->temperatures[b], V));
    for (int v = 0; v < V; v += LANES) {
      store_narrow(q + v, load_wide(row + v) / whole);
      store_wide(row + v, load_narrow(q + v));
    }
    work->tokens[b] = token_at(work, inverse(row, work->uniforms[b * work->uniforms_row], V));
  }
}

static int all_numbers(const float *logits, int V) {
  lanes sum = every(0.0f);
  for (int v = 0; v < V; v += LANES) sum += load_wide(logits + v);
  return isfinite(sum_of(sum));
}

/* A row of logits that has become shares of p, which sum to `total`, and a row of q with its sum. */
typedef struct {
  float *p, total;
  const uint16_t *q;
  float q_sum;
} Pair;

/* max(0, weight p - q) */
#define LEFT(v) \
  larger(weight *(load_wide(pair->p + (v)) / whole) - load_narrow(pair->q + (v)) / q_whole, every(0.0f))

/* What max(0, weight p - q) sums to. */
static float sum_left(const Pair *pair, float weight_of_p, int V) {
  lanes whole = every(pair->total), q_whole = every(pair->q_sum), weight = every(weight_of_p), sum = every(0.0f);
  for (int v = 0; v < V; v += LANES) sum += LEFT(v);
  return sum_of(sum);
}

/* p becomes max(0, weight p - q); or stays what it is where nothing is left of it. */
static void leave(const Pair *pair, float weight_of_p, int V) {
  lanes whole = every(pair->total), q_whole = every(pair->q_sum), weight = every(weight_of_p), most = every(0.0f);
  for (int v = 0; v < V; v += LANES) most = larger(LEFT(v), most);
  if (!(largest_of(most) > 0)) return;
  for (int v = 0; v < V; v += LANES) store_wide(pair->p + v, LEFT(v));
}
#undef LEFT

static float *logits_of(const Verdict *work, int b, int t) {
  return work->logits + (work->firsts[b] + t) * work->V;
}

static float q_of(const Pair *pair, int64_t token) {
  const uint32_t bits = (uint32_t)pair->q[token] << 16;
  float share;
  memcpy(&share, &bits, sizeof share);
  return share / pair->q_sum;
}

/* The shares of p behind the first t tokens, and q of the next one. */
static Pair softened(const Verdict *work, int b, int t) {
  const int64_t at = (int64_t)b * (work->T - 1) + t;
  float *row = logits_of(work, b, t);
  return (Pair){row, soften(row, work->temperatures[b], work->V), work->q + at * work->V, work->q_sums[at]};
}

/* Tokens stand while the target would say the same. */
static int follow_likeliest(const Verdict *work, int b, int count, int64_t *last) {
  for (int t = 0;; t++) {
    *last = likeliest(logits_of(work, b, t), work->V);
    if (t == count || *last != work->drafted[(int64_t)b * (work->T - 1) + t]) return t;
  }
}

/* The rejection rule: logits behind the first token that falls are not looked at. Leaves what the token behind is drawn
   from in its row. */
static int reject(const Verdict *work, int b, int count) {
  for (int t = 0; t < count; t++) {
    const int64_t at = (int64_t)b * (work->T - 1) + t, token = work->drafted[at];
    const Pair pair = softened(work, b, t);
    /* Without dividing by q: what p excludes never stands, what q calls impossible does. */
    if (work->coins[at] * q_of(&pair, token) < pair.p[token] / pair.total) continue;
    leave(&pair, 1.0f, work->V);
    return t;
  }
  soften(logits_of(work, b, count), work->temperatures[b], work->V);
  return count;
}

/* Block verification: of the prefixes, each with a weight, the longest whose coin says that it stands
   (`spire.decoding.verification`). Leaves what the token behind is drawn from in its row. */
static int reject_blocks(const Verdict *work, int b, int count) {
  Pair pairs[work->T];
  float weights[work->T];
  const int64_t first = (int64_t)b * (work->T - 1);
  weights[0] = 1.0f;
  for (int t = 0; t < count; t++) {
    pairs[t] = softened(work, b, t);
    const int64_t token = work->drafted[first + t];
    const float ratio = pairs[t].p[token] / pairs[t].total / q_of(&pairs[t], token);
    /* Impossible by both is no reason to fall; and nothing stands behind what p excludes. */
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
    if (work->coins[first + stand - 1] < stays) break;
  }
  if (stand < count)
    leave(&pairs[stand], weights[stand], work->V);
  else
    soften(logits_of(work, b, count), work->temperatures[b], work->V);
  return stand;
}

static void judge_row(const Verdict *work, int b) {
  const int T = work->T, count = (int)work->counts[b];
  int64_t *tokens = work->tokens + (int64_t)b * T, last;
  work->finite[b] = 1;
  for (int t = 0; t <= count; t++)
    if (!all_numbers(logits_of(work, b, t), work->V)) work->finite[b] = 0;
  int stand;
  if (work->temperatures[b] == 0) {
    stand = follow_likeliest(work, b, count, &last);
  } else {
    stand = work->blocks[b] ? reject_blocks(work, b, count) : reject(work, b, count);
    last = inverse(logits_of(work, b, stand), work->uniforms[(int64_t)b * T + stand], work->V);
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

/* What is drawn from logits, by `exponential` and vectors of the file that includes this: a draft's tokens, and by the
   rejection rule those of a target (`spire.sampling`, `spire.verification`). V is a multiple of SHARES. */

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

static void draw(const Draw *work, int threads) {
  const int V = work->V;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int b = 0; b < work->B; b++) {
    float *row = work->logits + (int64_t)b * V;
    uint16_t *q = work->q + b * work->q_row;
    if (work->temperatures[b] == 0) {
      work->tokens[b] = likeliest(row, V);
      continue;
    }
    lanes whole = every(soften(row, work->temperatures[b], V));
    for (int v = 0; v < V; v += LANES) {
      store_narrow(q + v, load_wide(row + v) / whole);
      store_wide(row + v, load_narrow(q + v));
    }
    work->tokens[b] = inverse(row, work->uniforms[b], V);
  }
}

static int all_numbers(const float *logits, int V) {
  lanes sum = every(0.0f);
  for (int v = 0; v < V; v += LANES) sum += load_wide(logits + v);
  return isfinite(sum_of(sum));
}

/* Shares of p, which sum to `total`, become max(0, p - q); or stay what they are where nothing is left of them. */
static void leave(float *p, float total, const uint16_t *q, float q_sum, int V) {
  lanes whole = every(total), q_whole = every(q_sum), none = every(0.0f), most = none;
#define LEFT(v) larger(load_wide(p + (v)) / whole - load_narrow(q + (v)) / q_whole, none)
  for (int v = 0; v < V; v += LANES) most = larger(LEFT(v), most);
  if (!(largest_of(most) > 0)) return;
  for (int v = 0; v < V; v += LANES) store_wide(p + v, LEFT(v));
#undef LEFT
}

/* Of one sequence: logits of positions behind the first token that falls are never looked at but for being numbers. */
static void reject_row(const Rejection *work, int b) {
  const int V = work->V, K = work->T - 1, count = (int)work->counts[b];
  const float temperature = work->temperatures[b];
  const int64_t *drafted = work->drafted + (int64_t)b * K;
  int64_t *tokens = work->tokens + (int64_t)b * work->T;
  memset(tokens, 0, sizeof(int64_t) * work->T);
  work->finite[b] = 1;
  for (int t = 0; t <= count; t++)
    if (!all_numbers(work->logits + ((int64_t)b * work->T + t) * V, V)) work->finite[b] = 0;
  int t = 0;
  for (;; t++) {
    float *row = work->logits + ((int64_t)b * work->T + t) * V;
    const double uniform = work->uniforms[(int64_t)b * work->T + t];
    if (temperature == 0) {
      tokens[t] = likeliest(row, V);
      if (t < count && tokens[t] == drafted[t]) continue;
      break;
    }
    const float total = soften(row, temperature, V);
    if (t < count) {
      const int64_t at = (int64_t)b * K + t, token = drafted[t];
      const uint16_t *q = work->q + at * V;
      const uint32_t bits = (uint32_t)q[token] << 16;
      float of_draft;
      memcpy(&of_draft, &bits, sizeof of_draft);
      /* Without dividing by q: what p excludes never stands, what q calls impossible does. */
      if (work->coins[at] * (of_draft / work->q_sums[at]) < row[token] / total) {
        tokens[t] = token;
        continue;
      }
      leave(row, total, q, work->q_sums[at], V);
    }
    tokens[t] = inverse(row, uniform, V);
    break;
  }
  work->accepted[b] = t;
}

static void reject(const Rejection *work, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int b = 0; b < work->B; b++) reject_row(work, b);
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

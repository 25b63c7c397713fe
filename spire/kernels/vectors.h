/* Products and attention with vectors of LANES sums. The including file defines `lanes`, and how many rows and
   queries the registers hold at once: MOST_ROWS, a multiple of MOST_AT_ONCE. A `packed` vector holds PAIR numbers
   for each lane, whose products `dot` adds to the lane; by default PAIR is one float. For the few rows and queries
   of a decoding step, torch's products reach a fifth to a third of a processor's speed. */

typedef char rows_fit_six[MOST_ROWS == 6 || MOST_ROWS == 12 ? 1 : -1];

#ifndef PAIR
#define PAIR 1
typedef lanes packed;

static inline lanes load(const float *x) { return load_wide(x); }

static inline void store(float *to, lanes x) { store_wide(to, x); }

static inline packed load_packed(const float *x) { return load_wide(x); }

static inline packed load_fp8(const uint8_t *x) { return wide_fp8(x); }

static inline packed every_packed(const float *x) { return every(*x); }

static inline lanes dot(packed a, packed b, lanes sum) { return multiply_add(a, b, sum); }
#endif

/* Weights are stored as [E / BLOCK][D / PAIR][BLOCK][PAIR]. */
#define BLOCK (2 * LANES)
#include "layer.h"

#include "sampling.h"

#include "draft.h"

/* --- products ----------------------------------------------------------------------------------------------------- */

/* Compute a block of outputs of N rows. */
#define MULTIPLY(N, name, kind, load_values)                                                                           \
  static void name##N(const number *x, const void *values, int D, lanes (*sums)[2]) {                                 \
    const kind *weight = values;                                                                                       \
    lanes sum[N][2];                                                                                                   \
    for (int r = 0; r < N; r++) sum[r][0] = sum[r][1] = every(0.0f);                                                   \
    for (int d = 0; d < D; d += PAIR, weight += BLOCK * PAIR) {                                                        \
      packed first = load_values(weight), second = load_values(weight + LANES * PAIR);                                 \
      for (int r = 0; r < N; r++) {                                                                                    \
        packed value = every_packed(x + (int64_t)r * D + d);                                                           \
        sum[r][0] = dot(value, first, sum[r][0]);                                                                      \
        sum[r][1] = dot(value, second, sum[r][1]);                                                                     \
      }                                                                                                                \
    }                                                                                                                  \
    for (int r = 0; r < N; r++) sums[r][0] = sum[r][0], sums[r][1] = sum[r][1];                                        \
  }
typedef void Multiply(const number *x, const void *values, int D, lanes (*sums)[2]);
#define MULTIPLY_SIX(name, kind, load_values)                                                                          \
  MULTIPLY(1, name, kind, load_values)                                                                                 \
  MULTIPLY(2, name, kind, load_values)                                                                                 \
  MULTIPLY(3, name, kind, load_values)                                                                                 \
  MULTIPLY(4, name, kind, load_values)                                                                                 \
  MULTIPLY(5, name, kind, load_values)                                                                                 \
  MULTIPLY(6, name, kind, load_values)
#if MOST_ROWS == 12
#define MULTIPLY_ALL(name, kind, load_values)                                                                          \
  MULTIPLY_SIX(name, kind, load_values)                                                                                \
  MULTIPLY(7, name, kind, load_values)                                                                                 \
  MULTIPLY(8, name, kind, load_values)                                                                                 \
  MULTIPLY(9, name, kind, load_values)                                                                                 \
  MULTIPLY(10, name, kind, load_values)                                                                                \
  MULTIPLY(11, name, kind, load_values)                                                                                \
  MULTIPLY(12, name, kind, load_values)                                                                                \
  static Multiply *const name##_rows[] = {name##1, name##2, name##3, name##4,  name##5,  name##6,                      \
                                          name##7, name##8, name##9, name##10, name##11, name##12};
#else
#define MULTIPLY_ALL(name, kind, load_values)                                                                          \
  MULTIPLY_SIX(name, kind, load_values)                                                                                \
  static Multiply *const name##_rows[] = {name##1, name##2, name##3, name##4, name##5, name##6};
#endif
MULTIPLY_ALL(multiply, number, load_packed)
MULTIPLY_ALL(multiply_fp8, uint8_t, load_fp8)
#if PAIR == 1
MULTIPLY_ALL(multiply_narrow, uint16_t, load_narrow)
#else
#define multiply_narrow_rows multiply_rows /* numbers are bfloat16 anyway */
#endif

/* Rows that stay in the second-level cache while weights are read. */
#define NEAR 96

static void product(const number *x, Weight weight, int R, int D, int E, Kind kind, const number *summand, void *out) {
  Multiply *const *multiply = weight.scales ? multiply_fp8_rows : weight.narrow ? multiply_narrow_rows : multiply_rows;
  for (int from = 0; from < R; from += NEAR) {
    const int rows = R - from < NEAR ? R - from : NEAR, parts = (rows + MOST_ROWS - 1) / MOST_ROWS;
#pragma omp for schedule(static) nowait
    for (int e = 0; e < E; e += BLOCK)
      for (int part = 0, r = from; part < parts; part++) {
        const int count = (from + rows - r) / (parts - part);
        lanes sums[MOST_ROWS][2];
        multiply[count - 1](x + (int64_t)r * D, outputs_from(weight, e, D).values, D, sums);
        if (weight.scales)
          for (int i = 0; i < count; i++)
            sums[i][0] *= load_wide(weight.scales + e), sums[i][1] *= load_wide(weight.scales + e + LANES);
        for (int i = 0; i < count; i++, r++) finish(sums[i][0], sums[i][1], kind, summand, out, r, e, E);
      }
  }
#pragma omp barrier
}

/* --- attention ---------------------------------------------------------------------------------------------------- */

/* Positions after which the softmax is rescaled, and queries that read a key together. */
#define POSITIONS 128
#define GROUP 32

/* Memory to prefetch, `lines` cache lines at a time, while something else is computed. */
typedef struct {
  const char *at, *end;
  int lines;
} Ahead;

/* Prefetch into the second-level cache, or for pairs into the first: their products are so fast that the second is
   too far. */
#define NEAREST (PAIR == 2 ? _MM_HINT_NTA : _MM_HINT_T1)

static inline void fetch(Ahead *ahead) {
  for (int i = 0; i < ahead->lines && ahead->at < ahead->end; i++, ahead->at += 64) _mm_prefetch(ahead->at, NEAREST);
}

/* Prefetch n positions in `calls` calls of `fetch`. */
static inline Ahead ahead_of(const number *next, int n, int K, int calls) {
  const char *at = (const char *)next;
  const int64_t bytes = (int64_t)n * K * sizeof(number);
  return (Ahead){at, at + bytes, (int)((bytes / 64 + calls - 1) / calls)};
}

/* State of the queries that read a key together: last visible position, largest score and sum of weights so far. */
typedef struct {
  int last_seen[GROUP];
  float largest[GROUP], total[GROUP];
  number queries[GROUP * MOST_WIDTH] __attribute__((aligned(64)));
  float sums[GROUP * MOST_WIDTH] __attribute__((aligned(64)));
  float scores[GROUP][POSITIONS] __attribute__((aligned(64)));
#if PAIR == 2
  uint32_t weights[GROUP][POSITIONS / 2] __attribute__((aligned(64)));
#endif
} Queries;

/* These files define SCORE (SCORED_AT_ONCE positions at a time), the preparation of weights, and WEIGH. */
#if PAIR == 2
#include "pairs.h"
#else
#include "singles.h"
#endif

/* Compute the scores of `count` queries from query r on. */
static void score(Queries *queries, int r, int together, const number *keys, int n, int K, Ahead *ahead) {
  SCORES[together - 1](queries->queries + r * K, keys, n, K, queries->scores + r, ahead);
}

/* Replace the scores of n positions from `first` on by weights, and rescale earlier sums to the largest score so
   far. */
static void weights_of(Queries *queries, int r, int first, int n, float scale, int K, Ahead *ahead) {
  float *scores = queries->scores[r], *sums = queries->sums + r * K;
  const int seen = queries->last_seen[r] - first + 1;
  for (int i = seen < 0 ? 0 : seen; i < n; i++) scores[i] = -1e30f;
  if (seen <= 0) {
    memset(scores, 0, sizeof(float) * n);
    return;
  }
  lanes most = every(queries->largest[r]);
  for (int i = 0; i < n; i += LANES) most = larger(most, load_wide(scores + i));
  const float largest = largest_of(most);
  if (first) {
    lanes shrink = exponential(every((queries->largest[r] - largest) * scale));
    float all[LANES];
    store_wide(all, shrink);
    queries->total[r] *= all[0];
    for (int k = 0; k < K; k += LANES) store_wide(sums + k, load_wide(sums + k) * shrink);
  }
  lanes total = every(0.0f);
  for (int i = 0; i < n; i += LANES) {
    fetch(ahead);
    lanes weight = exponential((load_wide(scores + i) - every(largest)) * every(scale));
    total += weight;
    store_wide(scores + i, weight);
  }
  queries->largest[r] = largest, queries->total[r] += sum_of(total);
}

static inline const number *of(const Heads *heads, int b, int head, int t) {
  return heads->first + b * heads->row + head * heads->head + t * heads->position;
}

/* Store the new keys and values of one head. Those beyond the last column overwrite it; it is padding. */
static void store_new(const Attention *work, int b, int g) {
  const int64_t K = work->K, last = work->columns - 1, base = work->bases[b];
  const int64_t place = work->slots[b] * work->slot_stride + g * work->head_stride;
  for (int t = 0; t < work->T; t++) {
    int64_t column = base + t < last ? base + t : last;
    memcpy(work->keys + place + column * K, of(&work->new_keys, b, g, t), sizeof(number) * K);
    memcpy(work->values + place + column * K, of(&work->new_values, b, g, t), sizeof(number) * K);
  }
}

/* Attention of one head of one sequence, for the queries from `from` on. */
static void attend_group(const Attention *work, int b, int g, int from, Queries *queries) {
  const int K = work->K, T = work->T, heads = work->H / work->G, R = heads * T, base = (int)work->bases[b];
  const int64_t place = work->slots[b] * work->slot_stride + g * work->head_stride;
  const number *keys = work->keys + place, *values = work->values + place;
  const float scale = 1.0f / sqrtf((float)K);
  const int count = R - from < GROUP ? R - from : GROUP, parts = (count + MOST_AT_ONCE - 1) / MOST_AT_ONCE;
  int end = 0;
  for (int i = 0; i < count; i++) {
    const int r = from + i, seen = base + r % T;
    queries->last_seen[i] = seen, queries->largest[i] = -1e30f, queries->total[i] = 0;
    if (seen >= end) end = seen + 1;
    memcpy(queries->queries + i * K, of(&work->queries, b, g * heads + r / T, r % T), sizeof(number) * K);
  }
  if (end > work->columns) end = work->columns;
  memset(queries->sums, 0, sizeof(float) * count * K);
  for (int first = 0; first < end; first += POSITIONS) {
    const int n = end - first < POSITIONS ? end - first : POSITIONS;
    /* Up to 15 positions beyond the last are scored, and masked for all queries. */
    const int scored = (n + SCORED_AT_ONCE - 1) / SCORED_AT_ONCE * SCORED_AT_ONCE;
    const int weighed = (n + LANES - 1) / LANES * LANES, next = end - first - n < POSITIONS ? end - first - n : POSITIONS;
    Ahead ahead = ahead_of(values + (int64_t)first * K, n, K, scored / 4 * parts);
    for (int part = 0, r = 0; part < parts; part++) {
      const int together = (count - r) / (parts - part);
      score(queries, r, together, keys + (int64_t)first * K, scored, K, &ahead);
      r += together;
    }
    const int calls = weighed / LANES * count + (n + 3) / 4 * parts * (K / (4 * LANES));
    ahead = ahead_of(keys + (int64_t)(first + n) * K, next, K, calls);
    for (int r = 0; r < count; r++) {
      weights_of(queries, r, first, weighed, scale, K, &ahead);
      finish_weights(queries, r, weighed);
    }
    for (int part = 0, r = 0; part < parts; part++) {
      const int together = (count - r) / (parts - part);
      for (int k = 0; k < K; k += 4 * LANES) weigh(queries, r, together, values + (int64_t)first * K, n, K, k, &ahead);
      r += together;
    }
  }
  for (int i = 0; i < count; i++) {
    const int r = from + i;
    number *found = work->found + (((int64_t)b * T + r % T) * work->H + g * heads + r / T) * K;
    lanes share = every(1.0f / queries->total[i]);
    for (int k = 0; k < K; k += LANES) store(found + k, load_wide(queries->sums + i * K + k) * share);
  }
}

/* A thread that finds no more work does not wait for the others. */
static void attend_all(const Attention *work) {
  const int heads = work->B * work->G, groups = (work->H / work->G * work->T + GROUP - 1) / GROUP;
  Queries queries;
  if (groups > 1)
#pragma omp for schedule(static)
    for (int head = 0; head < heads; head++) store_new(work, head / work->G, head % work->G);
#pragma omp for schedule(dynamic, 1) nowait
  for (int item = 0; item < heads * groups; item++) {
    const int head = item / groups;
    if (groups == 1) store_new(work, head / work->G, head % work->G);
    attend_group(work, head / work->G, head % work->G, item % groups * GROUP, &queries);
  }
}

static void attend(const Attention *work, int threads) {
#pragma omp parallel num_threads(threads)
  attend_all(work);
}

#include "target.h"

/* Attention without pairs, for `vectors.h`: four positions are scored at once, and values are weighted one position
   at a time. */

#define SCORED_AT_ONCE 4

/* scores[r][i] of n positions, a multiple of 4, and N queries. */
#define SCORE(N)                                                                                                       \
  static void score##N(const number *queries, const number *keys, int n, int K, float (*scores)[POSITIONS],            \
                       Ahead *ahead) {                                                                                \
    for (int i = 0; i < n; i += 4, keys += 4 * K) {                                                                    \
      lanes sum[N][4];                                                                                                 \
      fetch(ahead);                                                                                                    \
      for (int r = 0; r < N; r++)                                                                                      \
        for (int j = 0; j < 4; j++) sum[r][j] = every(0.0f);                                                           \
      for (int k = 0; k < K; k += LANES * PAIR)                                                                        \
        for (int j = 0; j < 4; j++) {                                                                                  \
          packed key = load_packed(keys + j * K + k);                                                                  \
          for (int r = 0; r < N; r++) sum[r][j] = dot(load_packed(queries + r * K + k), key, sum[r][j]);               \
        }                                                                                                              \
      for (int r = 0; r < N; r++)                                                                                      \
        _mm_storeu_ps(scores[r] + i, sums_of(sum[r][0], sum[r][1], sum[r][2], sum[r][3]));                             \
    }                                                                                                                  \
  }

/* sums[r] += sum of weights[r][i] * values[i] over n positions, for N queries and 4 * LANES of the K columns. */
#define WEIGH(N)                                                                                                       \
  static void weigh##N(float (*weights)[POSITIONS], const number *values, int n, int K, float *sums, Ahead *ahead) {   \
    lanes sum[N][4];                                                                                                   \
    for (int r = 0; r < N; r++)                                                                                        \
      for (int j = 0; j < 4; j++) sum[r][j] = load_wide(sums + r * K + j * LANES);                                     \
    for (int i = 0; i < n; i++, values += K) {                                                                         \
      if (i % 4 == 0) fetch(ahead);                                                                                    \
      for (int j = 0; j < 4; j++) {                                                                                    \
        lanes value = load(values + j * LANES);                                                                        \
        for (int r = 0; r < N; r++) sum[r][j] = multiply_add(every(weights[r][i]), value, sum[r][j]);                  \
      }                                                                                                                \
    }                                                                                                                  \
    for (int r = 0; r < N; r++)                                                                                        \
      for (int j = 0; j < 4; j++) store_wide(sums + r * K + j * LANES, sum[r][j]);                                     \
  }
#define BOTH(N) SCORE(N) WEIGH(N)
BOTH(1)
BOTH(2)
BOTH(3)
#if MOST_AT_ONCE == 6
BOTH(4)
BOTH(5)
BOTH(6)
#endif
static void (*const SCORES[])(const number *, const number *, int, int, float (*)[POSITIONS], Ahead *) = {
    score1, score2, score3,
#if MOST_AT_ONCE == 6
    score4, score5, score6,
#endif
};
static void (*const WEIGHS[])(float (*)[POSITIONS], const number *, int, int, float *, Ahead *) = {
    weigh1, weigh2, weigh3,
#if MOST_AT_ONCE == 6
    weigh4, weigh5, weigh6,
#endif
};

/* Weights are used as they are. */
static inline void finish_weights(Queries *queries, int r, int n) {}

static void weigh(Queries *queries, int r, int together, const number *values, int n, int K, int k, Ahead *ahead) {
  WEIGHS[together - 1](queries->scores + r, values + k, n, K, queries->sums + r * K + k, ahead);
}

/* Attention with pairs of bfloat16, for `vectors.h`: 16 positions are scored at once, and values are weighted two
   positions at a time, by weights rounded to bfloat16. */

#define SCORED_AT_ONCE 16

/* --- scores ------------------------------------------------------------------------------------------------------- */

/* Steps that reduce 16 vectors to their 16 sums: each step adds halves and packs two vectors into one. */
static inline lanes halves(lanes a, lanes b) {
  return _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
}

static inline lanes quarters(lanes a, lanes b) {
  return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
}

static inline lanes eighths(lanes a, lanes b) {
  const __m512d first = (__m512d)a, second = (__m512d)b;
  return (lanes)_mm512_unpacklo_pd(first, second) + (lanes)_mm512_unpackhi_pd(first, second);
}

static inline lanes sixteenths(lanes a, lanes b) {
  const lanes sums = _mm512_shuffle_ps(a, b, 0x88) + _mm512_shuffle_ps(a, b, 0xdd);
  /* The sum of vector 4 i + j is at 4 j + i. */
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), sums);
}

#define ALWAYS static inline __attribute__((always_inline))

/* scores[r][i] of n positions, a multiple of 16, and N queries. Common widths are compile-time constants. */
#define SCORE(N)                                                                                                       \
  ALWAYS void products##N(const number *queries, const number *key, int K, lanes *sum) {                               \
    for (int r = 0; r < N; r++) sum[r] = every(0.0f);                                                                  \
    for (int k = 0; k < K; k += LANES * PAIR)                                                                          \
      for (int r = 0; r < N; r++) sum[r] = dot(load_packed(queries + r * K + k), load_packed(key + k), sum[r]);        \
  }                                                                                                                    \
  ALWAYS void scores##N(const number *queries, const number *keys, int n, int K, float (*scores)[POSITIONS],           \
                        Ahead *ahead) {                                                                               \
    for (int i = 0; i < n; i += 16, keys += 16 * K) {                                                                  \
      lanes four[4][N];                                                                                                \
      _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {                                                            \
        lanes a[N], b[N], c[N], d[N];                                                                                  \
        fetch(ahead);                                                                                                  \
        products##N(queries, keys + 4 * j * K, K, a);                                                                  \
        products##N(queries, keys + (4 * j + 1) * K, K, b);                                                            \
        products##N(queries, keys + (4 * j + 2) * K, K, c);                                                            \
        products##N(queries, keys + (4 * j + 3) * K, K, d);                                                            \
        for (int r = 0; r < N; r++) four[j][r] = quarters(halves(a[r], b[r]), halves(c[r], d[r]));                     \
      }                                                                                                                \
      for (int r = 0; r < N; r++)                                                                                      \
        store_wide(scores[r] + i, sixteenths(eighths(four[0][r], four[1][r]), eighths(four[2][r], four[3][r])));       \
    }                                                                                                                  \
  }                                                                                                                    \
  static void score##N(const number *queries, const number *keys, int n, int K, float (*scores)[POSITIONS],            \
                       Ahead *ahead) {                                                                                \
    if (K == 64)                                                                                                       \
      scores##N(queries, keys, n, 64, scores, ahead);                                                                  \
    else if (K == 128)                                                                                                 \
      scores##N(queries, keys, n, 128, scores, ahead);                                                                 \
    else                                                                                                               \
      scores##N(queries, keys, n, K, scores, ahead);                                                                   \
  }
SCORE(1)
SCORE(2)
SCORE(3)
SCORE(4)
SCORE(5)
SCORE(6)
static void (*const SCORES[])(const number *, const number *, int, int, float (*)[POSITIONS], Ahead *) = {
    score1, score2, score3, score4, score5, score6,
};

/* --- values ------------------------------------------------------------------------------------------------------- */

/* Round the weights of n positions to pairs. */
static void finish_weights(Queries *queries, int r, int n) {
  const float *weights = queries->scores[r];
  for (int i = 0; i < n; i += 2 * LANES) {
    const lanes second = i + LANES < n ? load_wide(weights + i + LANES) : every(0.0f);
    _mm512_store_si512(queries->weights[r] + i / 2, (__m512i)_mm512_cvtne2ps_pbh(second, load_wide(weights + i)));
  }
}

/* Stands for the value after the last one, which may be anything. */
static const number NOTHING[4 * LANES];

/* Interleave 4 * LANES numbers of two positions to pairs. */
ALWAYS void beside(const number *first, const number *second, packed *pairs) {
  static const uint16_t LOW[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                   8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_loadu_si512(LOW), high = _mm512_add_epi16(low, _mm512_set1_epi16(LANES));
  for (int half = 0; half < 2; half++) {
    const __m512i a = _mm512_loadu_si512(first + half * 2 * LANES), b = _mm512_loadu_si512(second + half * 2 * LANES);
    pairs[2 * half] = (packed)_mm512_permutex2var_epi16(a, low, b);
    pairs[2 * half + 1] = (packed)_mm512_permutex2var_epi16(a, high, b);
  }
}

/* sums[r] += sum of weights[r][i] * values[i] over n positions, for N queries and 4 * LANES of the K columns. */
#define WEIGH(N)                                                                                                       \
  static void weigh##N(uint32_t (*weights)[POSITIONS / 2], const number *values, int n, int K, float *sums,            \
                       Ahead *ahead) {                                                                                \
    lanes sum[N][4];                                                                                                   \
    for (int r = 0; r < N; r++)                                                                                        \
      for (int j = 0; j < 4; j++) sum[r][j] = load_wide(sums + r * K + j * LANES);                                     \
    for (int i = 0; i < n; i += 2, values += 2 * K) {                                                                  \
      packed value[4];                                                                                                 \
      if (i % 4 == 0) fetch(ahead);                                                                                    \
      beside(values, i + 1 < n ? values + K : NOTHING, value);                                                         \
      for (int r = 0; r < N; r++) {                                                                                    \
        packed weight = every_packed((const number *)(weights[r] + i / 2));                                            \
        for (int j = 0; j < 4; j++) sum[r][j] = dot(weight, value[j], sum[r][j]);                                      \
      }                                                                                                                \
    }                                                                                                                  \
    for (int r = 0; r < N; r++)                                                                                        \
      for (int j = 0; j < 4; j++) store_wide(sums + r * K + j * LANES, sum[r][j]);                                     \
  }
WEIGH(1)
WEIGH(2)
WEIGH(3)
WEIGH(4)
WEIGH(5)
WEIGH(6)
static void (*const WEIGHS[])(uint32_t (*)[POSITIONS / 2], const number *, int, int, float *, Ahead *) = {
    weigh1, weigh2, weigh3, weigh4, weigh5, weigh6,
};

static void weigh(Queries *queries, int r, int together, const number *values, int n, int K, int k, Ahead *ahead) {
  WEIGHS[together - 1](queries->weights + r, values + k, n, K, queries->sums + r * K + k, ahead);
}

/* Models in bfloat16 with the matrix tiles (AMX) of x86 processors. For two or more queries, torch's flash kernel
   takes twice as long as for one, because its products repack all keys and values. Here a tile of 16 keys is
   multiplied in place by up to 16 queries, so that each key and value is read once. Scores, weights and sums stay in
   fp32. Weights of layers [E, D] are stored as [E / 32][D / 2][32 outputs][2]: 16 pairs of inputs of 32 outputs are
   two interleaved tiles. */

#define number uint16_t
#include "kernels.h"

#ifdef HAVE_KERNELS
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,fma,amx-tile,amx-bf16")
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "lanes16.h"

static inline lanes load(const uint16_t *x) { return load_narrow(x); }

static inline void store(uint16_t *to, lanes x) { store_narrow(to, x); }

#define BLOCK 32
#include "layer.h"

#include "sampling.h"

#include "draft.h"

/* The operand of `_tile_loadconfig`: bytes of a row and number of rows of each tile. */
typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} TileConfig;

/* --- products ----------------------------------------------------------------------------------------------------- */

/* Tiles 0 to 3 hold sums, 4 and 5 up to 16 rows of inputs each, 6 and 7 weights. */
static void configure(int first, int second) {
  TileConfig config = {.palette = 1};
  for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = 64, config.rows[tile] = 16;
  config.rows[0] = config.rows[1] = config.rows[4] = first;
  config.rows[2] = config.rows[3] = config.rows[5] = second > 0 ? second : 1;
  _tile_loadconfig(&config);
}

/* A tile's worth of weights: 32 inputs of 32 outputs. */
#define TILED 1024

/* Bytes from a tile's weights to those that are fetched meanwhile. */
#define FETCHED 8192

static inline void fetch(const char *bytes, int size) {
  for (int i = 0; i < size; i += 64) _mm_prefetch(bytes + FETCHED + i, _MM_HINT_T0);
}

static inline void convert(const uint8_t *bytes, uint16_t *to) {
  fetch((const char *)bytes, TILED);
  for (int i = 0; i < TILED; i += 32) _mm512_store_si512(to + i, narrow_fp8(bytes + i));
}

/* Compute sums[row][column] of 32 outputs and the rows that the tiles are configured for, more than 16 if `two`. */
static inline __attribute__((always_inline)) void multiply(const uint16_t *x, const void *values, int fp8, int D,
                                                           int two, float (*sums)[32]) {
  /* Weights in fp8 are converted one tile ahead, as tiles are not loaded from stores that are still under way. */
  uint16_t converted[2][TILED] __attribute__((aligned(64)));
  if (fp8) convert(values, converted[0]);
  _tile_zero(0);
  _tile_zero(1);
  if (two) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int d = 0, at = 0; d < D; d += 32, at = !at) {
    const uint16_t *weight = fp8 ? converted[at] : (const uint16_t *)values + (int64_t)d * 32;
    if (!fp8)
      fetch((const char *)weight, 2 * TILED);
    else if (d + 32 < D)
      convert((const uint8_t *)values + (int64_t)(d + 32) * 32, converted[!at]);
    _tile_loadd(4, x + d, 2 * D);
    _tile_loadd(6, weight, 128);
    _tile_loadd(7, weight + 32, 128);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (two) {
      _tile_loadd(5, x + 16 * D + d, 2 * D);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0], 128);
  _tile_stored(1, sums[0] + 16, 128);
  if (two) {
    _tile_stored(2, sums[16], 128);
    _tile_stored(3, sums[16] + 16, 128);
  }
}

/* Bytes of weights that stay in the second-level cache while all rows are multiplied by them. */
#define NEAR (1 << 18)

static void product(const number *x, Weight weight, int R, int D, int E, Kind kind, const number *summand, void *out) {
  float sums[32][32] __attribute__((aligned(64)));
  /* This thread's share of the outputs, and how many of them it multiplies by all rows at once. */
  const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
  const int begin = 32 * (int)(E / 32 * thread / threads), end = 32 * (int)(E / 32 * (thread + 1) / threads);
  const int most = NEAR / (64 * D) > 1 ? NEAR / (64 * D) * 32 : 32;
  int configured = 0;
  for (int from = begin; from < end; from += most)
    for (int r = 0; r < R; r += 32) {
      const int rows = R - r < 32 ? R - r : 32, two = rows > 16;
      if (rows != configured) configure(two ? 16 : rows, rows - 16);
      configured = rows;
      for (int e = from; e < end && e < from + most; e += 32) {
        const void *values = outputs_from(weight, e, D).values;
        lanes first = every(1.0f), second = first;
        if (weight.scales) {
          first = load_wide(weight.scales + e), second = load_wide(weight.scales + e + 16);
          multiply(x + (int64_t)r * D, values, 1, D, two, sums);
        } else {
          multiply(x + (int64_t)r * D, values, 0, D, two, sums);
        }
        for (int i = 0; i < rows; i++)
          finish(load_wide(sums[i]) * first, load_wide(sums[i] + 16) * second, kind, summand, out, r + i, e, E);
      }
    }
  _tile_release();
#pragma omp barrier
}

/* --- attention ---------------------------------------------------------------------------------------------------- */

/* Positions after which the softmax is rescaled: their keys and values fit into the second-level cache. */
#define POSITIONS 128
#define MOST_QUERIES 32

/* sums[r] += sum of weights[i][r] * values[i] over n positions, for N queries and 64 of the K columns. */
#define WEIGH(N)                                                                                                       \
  static void weigh##N(const float *weights, const uint16_t *values, int n, int K, float *sums) {                     \
    __m512 sum[N][4];                                                                                                  \
    for (int r = 0; r < N; r++)                                                                                        \
      for (int j = 0; j < 4; j++) sum[r][j] = _mm512_loadu_ps(sums + r * K + j * 16);                                  \
    for (int i = 0; i < n; i++, values += K, weights += 16) {                                                          \
      _mm_prefetch((const char *)(values + 24 * K), _MM_HINT_T0);                                                      \
      _mm_prefetch((const char *)(values + 24 * K + 32), _MM_HINT_T0);                                                 \
      __m512 value[4];                                                                                                 \
      for (int j = 0; j < 4; j++) value[j] = load(values + j * 16);                                                  \
      for (int r = 0; r < N; r++) {                                                                                    \
        __m512 weight = _mm512_set1_ps(weights[r]);                                                                    \
        for (int j = 0; j < 4; j++) sum[r][j] = _mm512_fmadd_ps(weight, value[j], sum[r][j]);                          \
      }                                                                                                                \
    }                                                                                                                  \
    for (int r = 0; r < N; r++)                                                                                        \
      for (int j = 0; j < 4; j++) _mm512_storeu_ps(sums + r * K + j * 16, sum[r][j]);                                  \
  }
WEIGH(1)
WEIGH(2)
WEIGH(3)
WEIGH(4)
WEIGH(5)
WEIGH(6)
static void (*const WEIGHS[])(const float *, const uint16_t *, int, int, float *) = {weigh1, weigh2, weigh3,
                                                                                    weigh4, weigh5, weigh6};

/* Divide the queries into parts of similar size that fit into the registers. */
static void weigh(const float *weights, const uint16_t *values, int n, int K, float *sums, int queries) {
  int parts = (queries + 5) / 6;
  for (int part = 0, r = 0; part < parts; part++) {
    int count = (queries - r) / (parts - part);
    for (int column = 0; column < K; column += 64)
      WEIGHS[count - 1](weights + r, values + column, n, K, sums + r * K + column);
    r += count;
  }
}

/* scores[i][r] of n positions, a multiple of 32, and 16 queries stored as tiles: [K / 32][16 pairs][16][2]. */
static void score(const uint16_t *keys, const uint32_t *queries, int n, int K, float (*scores)[16]) {
  for (int i = 0; i < n; i += 32, keys += 32 * K) {
    for (int row = 32; row < 64; row++)
      for (int column = 0; column < K; column += 32)
        _mm_prefetch((const char *)(keys + row * K + column), _MM_HINT_T0);
    _tile_zero(0);
    _tile_zero(1);
    for (int part = 0; part < K / 32; part++) {
      _tile_loadd(4, queries + part * 256, 64);
      _tile_loadd(2, keys + part * 32, 2 * K);
      _tile_loadd(3, keys + 16 * K + part * 32, 2 * K);
      _tile_dpbf16ps(0, 2, 4);
      _tile_dpbf16ps(1, 3, 4);
    }
    _tile_stored(0, scores[i], 64);
    _tile_stored(1, scores[i + 16], 64);
  }
}

typedef struct {
  __m512 largest, sum;
} Softmax;

/* Replace the scores of n positions by weights, and rescale earlier sums to the largest score so far. */
static void weights_of(float (*scores)[16], int n, int first, __m512i last_seen, __m512 scale, Softmax *softmax,
                       float *sums, int queries, int K) {
  if (first + n - 1 > _mm512_reduce_min_epi32(last_seen))
    for (int i = 0; i < n; i++) {
      __mmask16 hidden = _mm512_cmplt_epi32_mask(last_seen, _mm512_set1_epi32(first + i));
      _mm512_mask_storeu_ps(scores[i], hidden, _mm512_set1_ps(-1e30f));
    }
  __m512 largest = softmax->largest;
  for (int i = 0; i < n; i++) largest = _mm512_max_ps(largest, _mm512_loadu_ps(scores[i]));
  __m512 shrink = exponential(_mm512_mul_ps(_mm512_sub_ps(softmax->largest, largest), scale));
  float shrinks[16];
  _mm512_storeu_ps(shrinks, shrink);
  if (first)
    for (int r = 0; r < queries; r++)
      for (int k = 0; k < K; k += 16)
        _mm512_storeu_ps(sums + r * K + k,
                         _mm512_mul_ps(_mm512_loadu_ps(sums + r * K + k), _mm512_set1_ps(shrinks[r])));
  __m512 sum = _mm512_mul_ps(softmax->sum, shrink);
  for (int i = 0; i < n; i++) {
    __m512 weight = exponential(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores[i]), largest), scale));
    sum = _mm512_add_ps(sum, weight);
    _mm512_storeu_ps(scores[i], weight);
  }
  softmax->largest = largest, softmax->sum = sum;
}

static inline const uint16_t *of(const Heads *heads, int b, int head, int t) {
  return heads->first + b * heads->row + head * heads->head + t * heads->position;
}

/* Store the new keys and values of one head. Those beyond the last column overwrite it; it is padding. */
static void store_new(const Attention *work, int b, int g, int base, uint16_t *keys, uint16_t *values) {
  const int64_t K = work->K, last = work->columns - 1;
  for (int t = 0; t < work->T; t++) {
    int64_t column = base + t < last ? base + t : last;
    memcpy(keys + column * K, of(&work->new_keys, b, g, t), sizeof(uint16_t) * K);
    memcpy(values + column * K, of(&work->new_values, b, g, t), sizeof(uint16_t) * K);
  }
}

/* Attention of one head of one sequence. */
static void attend_head(const Attention *work, int b, int g) {
  const int K = work->K, T = work->T, heads = work->H / work->G, R = heads * T, groups = (R + 15) / 16;
  const int64_t place = work->slots[b] * work->slot_stride + g * work->head_stride;
  uint16_t *keys = work->keys + place, *values = work->values + place;
  const int base = (int)work->bases[b], columns = work->columns;
  const int total = base + work->T < columns ? base + work->T : columns;
  const float width = (float)K;
  const __m512 scale = _mm512_set1_ps(1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(width))));
  uint32_t tiles[MOST_QUERIES / 16][MOST_WIDTH / 32][16][16] __attribute__((aligned(64)));
  float scores[POSITIONS][16] __attribute__((aligned(64)));
  float sums[MOST_QUERIES * MOST_WIDTH] __attribute__((aligned(64)));
  Softmax softmax[MOST_QUERIES / 16];
  int32_t last_seen[MOST_QUERIES / 16][16];
  store_new(work, b, g, base, keys, values);
  for (int group = 0; group < groups; group++) {
    memset(tiles[group], 0, sizeof tiles[group]);
    softmax[group].largest = _mm512_set1_ps(-1e30f), softmax[group].sum = _mm512_setzero_ps();
    for (int lane = 0; lane < 16; lane++) {
      int r = group * 16 + lane;
      last_seen[group][lane] = base + r % T;
      if (r >= R) continue;
      const uint16_t *query = of(&work->queries, b, g * heads + r / T, r % T);
      for (int pair = 0; pair < K / 2; pair++)
        memcpy(&tiles[group][pair / 16][pair % 16][lane], query + 2 * pair, 4);
    }
  }
  memset(sums, 0, sizeof(float) * R * K);
  for (int first = 0; first < total; first += POSITIONS) {
    int n = total - first < POSITIONS ? total - first : POSITIONS;
    for (int group = 0; group < groups; group++) {
      int queries = R - group * 16 < 16 ? R - group * 16 : 16;
      float *group_sums = sums + group * 16 * K;
      /* May read up to 31 positions more of the slot; their scores are not used. */
      score(keys + (int64_t)first * K, &tiles[group][0][0][0], (n + 31) / 32 * 32, K, scores);
      weights_of(scores, n, first, _mm512_loadu_si512(last_seen[group]), scale, &softmax[group], group_sums, queries, K);
      weigh(&scores[0][0], values + (int64_t)first * K, n, K, group_sums, queries);
    }
  }
  for (int r = 0; r < R; r++) {
    float all[16];
    _mm512_storeu_ps(all, softmax[r / 16].sum);
    __m512 share = _mm512_set1_ps(1.0f / all[r % 16]);
    uint16_t *found = work->found + (((int64_t)b * T + r % T) * work->H + g * heads + r / T) * K;
    for (int k = 0; k < K; k += 16) store(found + k, _mm512_mul_ps(_mm512_loadu_ps(sums + r * K + k), share));
  }
}

/* A thread that finds no more work does not wait for the others. */
static void attend_all(const Attention *work) {
  TileConfig config = {.palette = 1};
  for (int tile = 0; tile < 5; tile++) config.row_bytes[tile] = 64, config.rows[tile] = 16;
  _tile_loadconfig(&config);
#pragma omp for schedule(dynamic, 1) nowait
  for (int head = 0; head < work->B * work->G; head++) attend_head(work, head / work->G, head % work->G);
  _tile_release();
}

static void attend(const Attention *work, int threads) {
#pragma omp parallel num_threads(threads)
  attend_all(work);
}

#include "target.h"

static int available(void) {
  return processor() & HAS_TILES && syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0;
}

const Kernels tiles = {"matrix tiles", 1, BLOCK, 64, MOST_QUERIES, available, attend, before_attention, behind_attention,
                       norm, project, absorb, forward, draft_pass, draft_round, draw, judge, collect};
#pragma GCC pop_options
#endif

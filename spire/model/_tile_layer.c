/* A layer of rows in bfloat16 but for its attention, by the matrix tiles (AMX) of x86 processors.

   Of the thirty operations that a layer is to torch, each with its own dispatch and its own pass over the rows, this
   makes two. Sums, norms and what lies between two products stay in fp32 and are rounded where they are stored. Every
   number of a row is the same sum in the same order however many rows there are, so it never depends on the others.

   Weights [E, D] lie as [E / 32][D / 32][2 tiles of 16 outputs][16 pairs of inputs][16 outputs][2]. */

#include "_tiles.h"

#ifdef HAVE_TILES
#include <math.h>

WITH_TILES

/* Tiles 0 to 3 are sums, 4 and 5 the inputs' rows, up to 16 in each, 6 and 7 weights. */
static void configure(int first, int second) {
  TileConfig config = {.palette = 1};
  for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = 64, config.rows[tile] = 16;
  config.rows[0] = config.rows[1] = config.rows[4] = first;
  config.rows[2] = config.rows[3] = config.rows[5] = second > 0 ? second : 1;
  _tile_loadconfig(&config);
}

/* sums[row][column] of 32 outputs and the rows that the tiles are configured for, more than 16 of them if `two`. */
static inline void multiply(const uint16_t *x, const uint16_t *weight, int D, int two, float (*sums)[32]) {
  _tile_zero(0);
  _tile_zero(1);
  if (two) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int d = 0; d < D; d += 32, weight += 1024) {
    _tile_loadd(4, x + d, 2 * D);
    _tile_loadd(6, weight, 64);
    _tile_loadd(7, weight + 512, 64);
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

/* What becomes of 32 sums of a row: fp32; bfloat16; bfloat16 with a summand; silu(first 16) * last 16 in bfloat16. */
typedef enum { WIDE, NARROW, ADDED, GATED } Kind;

static inline void finish(const float *sums, Kind kind, const uint16_t *summand, void *out, int64_t row, int e, int E) {
  __m512 a = _mm512_load_ps(sums), b = _mm512_load_ps(sums + 16);
  const int64_t at = row * E + e;
  if (kind == WIDE) {
    _mm512_storeu_ps((float *)out + at, a);
    _mm512_storeu_ps((float *)out + at + 16, b);
  } else if (kind == GATED) {
    __m512 turned = exponential(_mm512_sub_ps(_mm512_setzero_ps(), a));
    __m512 silu = _mm512_div_ps(a, _mm512_add_ps(_mm512_set1_ps(1.0f), turned));
    store16((uint16_t *)out + at / 2, _mm512_mul_ps(silu, b));
  } else {
    if (kind == ADDED) {
      a = _mm512_add_ps(a, load16(summand + at));
      b = _mm512_add_ps(b, load16(summand + at + 16));
    }
    store16((uint16_t *)out + at, a);
    store16((uint16_t *)out + at + 16, b);
  }
}

/* Of [R, D] with [E, D], by all threads of a team, which wait for one another at the end. */
static void product(const uint16_t *x, const uint16_t *weight, int R, int D, int E, Kind kind, const uint16_t *summand,
                    void *out) {
  float sums[32][32] __attribute__((aligned(64)));
  for (int r = 0; r < R; r += 32) {
    int rows = R - r < 32 ? R - r : 32, two = rows > 16;
    if (r == 0 || rows < 32) configure(two ? 16 : rows, rows - 16);
#pragma omp for schedule(static) nowait
    for (int e = 0; e < E; e += 32) {
      multiply(x + (int64_t)r * D, weight + (int64_t)e * D, D, two, sums);
      for (int i = 0; i < rows; i++) finish(sums[i], kind, summand, out, r + i, e, E);
    }
  }
  _tile_release();
#pragma omp barrier
}

void normalise(const uint16_t *x, const uint16_t *weight, float eps, int R, int D, uint16_t *out) {
#pragma omp for schedule(static)
  for (int r = 0; r < R; r++) {
    const int64_t row = (int64_t)r * D;
    __m512 squares = _mm512_setzero_ps();
    for (int d = 0; d < D; d += 16) {
      __m512 value = load16(x + row + d);
      squares = _mm512_fmadd_ps(value, value, squares);
    }
    __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)D + eps));
    for (int d = 0; d < D; d += 16)
      store16(out + row + d, _mm512_mul_ps(_mm512_mul_ps(load16(x + row + d), scale), load16(weight + d)));
  }
}

/* Rotate the first `heads` of each row [E] to its position, whose cosines and signed sines are [K]. */
static void rotate(uint16_t *x, const uint16_t *cosine, const uint16_t *sine, int R, int E, int heads, int K) {
  const int half = K / 2;
#pragma omp for schedule(static)
  for (int r = 0; r < R; r++)
    for (int head = 0; head < heads; head++) {
      uint16_t *values = x + (int64_t)r * E + head * K;
      const uint16_t *cosines = cosine + (int64_t)r * K, *sines = sine + (int64_t)r * K;
      for (int k = 0; k < half; k += 16) {
        __m512 first = load16(values + k), second = load16(values + half + k);
        __m512 from_second = _mm512_mul_ps(second, load16(sines + k));
        __m512 from_first = _mm512_mul_ps(first, load16(sines + half + k));
        store16(values + k, _mm512_fmadd_ps(first, load16(cosines + k), from_second));
        store16(values + half + k, _mm512_fmadd_ps(second, load16(cosines + half + k), from_first));
      }
    }
}

void before_attention(const uint16_t *x, const uint16_t *norm, float eps, const uint16_t *weight, int R, int D, int E,
                      const uint16_t *cosine, const uint16_t *sine, int heads, int K, uint16_t *normed, uint16_t *out) {
  normalise(x, norm, eps, R, D, normed);
  product(normed, weight, R, D, E, NARROW, NULL, out);
  rotate(out, cosine, sine, R, E, heads, K);
}

void after_attention(const uint16_t *x, const uint16_t *attended, const uint16_t *output, const uint16_t *norm,
                     float eps, const uint16_t *gate_up, const uint16_t *down, int R, int D, int E, int F,
                     uint16_t *hidden, uint16_t *normed, uint16_t *inside, uint16_t *out) {
  product(attended, output, R, E, D, ADDED, x, hidden);
  normalise(hidden, norm, eps, R, D, normed);
  product(normed, gate_up, R, D, 2 * F, GATED, NULL, inside);
  product(inside, down, R, F, D, ADDED, hidden, out);
}

void project_normed(const uint16_t *x, const uint16_t *norm, float eps, const uint16_t *weight, int R, int D, int E,
                    const uint16_t *cosine, const uint16_t *sine, int heads, int K, uint16_t *normed, uint16_t *out,
                    int threads) {
#pragma omp parallel num_threads(threads)
  before_attention(x, norm, eps, weight, R, D, E, cosine, sine, heads, K, normed, out);
}

void behind_attention(const uint16_t *x, const uint16_t *attended, const uint16_t *output, const uint16_t *norm,
                      float eps, const uint16_t *gate_up, const uint16_t *down, int R, int D, int E, int F,
                      uint16_t *hidden, uint16_t *normed, uint16_t *inside, uint16_t *out, int threads) {
#pragma omp parallel num_threads(threads)
  after_attention(x, attended, output, norm, eps, gate_up, down, R, D, E, F, hidden, normed, inside, out);
}

void wide_product(const uint16_t *x, const uint16_t *weight, int R, int D, int E, float *out) {
  product(x, weight, R, D, E, WIDE, NULL, out);
}

void project(const uint16_t *x, const uint16_t *weight, int R, int D, int E, float *out, int threads) {
#pragma omp parallel num_threads(threads)
  wide_product(x, weight, R, D, E, out);
}
WITHOUT_TILES
#endif

/* What code for the matrix tiles (AMX) of x86 processors shares, where the compiler knows them: HAVE_TILES.

   Code that uses it stands between WITH_TILES and WITHOUT_TILES; it may run where `available` has said so. */

#ifndef SPIRE_TILES_H
#define SPIRE_TILES_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define HAVE_TILES 1
#define WITH_TILES \
  _Pragma("GCC push_options") \
  _Pragma("GCC target(\"avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,fma,amx-tile,amx-bf16\")")
#define WITHOUT_TILES _Pragma("GCC pop_options")

WITH_TILES
#include <immintrin.h>

/* What `_tile_loadconfig` reads: of each tile the bytes of a row and the rows. */
typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} TileConfig;

static inline __m512 load16(const uint16_t *values) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)values));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

static inline void store16(uint16_t *to, __m512 x) {
  _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x));
}

/* e^x to 3e-7 and the rounding of x: 1 at 0, and 0 below -87, so that what is hidden changes no bit of a sum. NaN
   stays NaN. The polynomial is that of 2^x from 0 to 1. */
static inline __m512 exponential(__m512 x) {
  __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  __m512 y = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
  __m512 whole = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC), part = _mm512_sub_ps(y, whole);
  __m512 p = _mm512_set1_ps(1.8775767e-3f);
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(8.9893397e-3f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(5.5826318e-2f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(2.4015361e-1f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(6.9315308e-1f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(counts, p, whole);
}
WITHOUT_TILES
#endif

#define MOST_QUERIES 32
#define MOST_WIDTH 256

/* Attention of a few new positions, whose keys and values are stored first: `_tile_attention.c`.

   B sequences, T new positions, H query heads, G key/value heads, K head width, R = H / G * T queries of each key. For
   position t of T, query r = h * T + t sees the positions up to base + t. Strides are in elements. */
typedef struct {
  const uint16_t *first;          /* [B, heads, T, K], widths are contiguous */
  long long row, head, position; /* strides of the first three */
} Heads;

typedef struct {
  Heads queries, new_keys, new_values;
  uint16_t *keys, *values, *found; /* pools; [B, T, H, K] */
  const int64_t *slots, *bases;    /* [B] */
  int B, T, H, G, K, columns;
  long long slot_stride, head_stride; /* of a pool; a head's positions are contiguous */
} Work;
void attend_all(const Work *work, int threads);

/* A layer but for its attention: `_tile_layer.c`.

   R rows, D width, E outputs. Weights are what `tiles_of` makes of [E, D]. */
void project_normed(const uint16_t *x, const uint16_t *norm, float eps, const uint16_t *weight, int R, int D, int E,
                    const uint16_t *cosine, const uint16_t *sine, int heads, int K, uint16_t *normed, uint16_t *out,
                    int threads);
void behind_attention(const uint16_t *x, const uint16_t *attended, const uint16_t *output, const uint16_t *norm,
                      float eps, const uint16_t *gate_up, const uint16_t *down, int R, int D, int E, int F,
                      uint16_t *hidden, uint16_t *normed, uint16_t *inside, uint16_t *out, int threads);
void project(const uint16_t *x, const uint16_t *weight, int R, int D, int E, float *out, int threads);

/* The same, and root mean square normalisation of each row, called by all threads of a team. */
void before_attention(const uint16_t *x, const uint16_t *norm, float eps, const uint16_t *weight, int R, int D, int E,
                      const uint16_t *cosine, const uint16_t *sine, int heads, int K, uint16_t *normed, uint16_t *out);
void after_attention(const uint16_t *x, const uint16_t *attended, const uint16_t *output, const uint16_t *norm,
                     float eps, const uint16_t *gate_up, const uint16_t *down, int R, int D, int E, int F,
                     uint16_t *hidden, uint16_t *normed, uint16_t *inside, uint16_t *out);
void wide_product(const uint16_t *x, const uint16_t *weight, int R, int D, int E, float *out);
void normalise(const uint16_t *x, const uint16_t *weight, float eps, int R, int D, uint16_t *out);

/* A SPIRe draft, its memory, and what it draws: `_tile_draft.c`.

   B sequences, k passes, N layers, D width, H query heads, G key/value heads, K head width, F inner width, V vocabulary,
   S places of a slot. */
typedef struct {
  const uint16_t *norm, *queries_keys_values, *output, *norm_inside, *gate_up, *down;
  uint16_t *keys, *values; /* [slots, G, S, K] */
} DraftLayer;

typedef struct {
  const DraftLayer *layers;                       /* [N] */
  const uint16_t *embedding, *norm, *unembedding; /* [V, D]; [D]; as tiles */
  const float *feedback;                          /* [N, N + 1]; NULL where a layer remembers its own input */
  const int64_t *positions;                       /* [slots, S]: of the text, -1 in empty places */
  const int64_t *slots, *bases;                   /* [B] */
  const uint16_t *cosine, *sine;                  /* [k, B, K] */
  uint16_t *own, *scratch;                        /* [N, 2, B, G, k, K]; B * (D * (N + 3) + K * (2 * H + 2 * G) + F) */
  float *logits;                                  /* [B, V] */
  int B, k, N, D, H, G, K, F, V, S, window, sink, attends_self;
  float eps;
} DraftRound;
void draft_pass(const DraftRound *round, int pass, const int64_t *tokens, int threads);

typedef struct {
  const DraftLayer *layers;       /* [N] */
  const uint16_t *taps;           /* [R, N, D] */
  /* [R]: of the text; the position behind the last of the sequence's; which slot. */
  const int64_t *positions, *ends, *slots;
  const uint16_t *cosine, *sine;  /* [R, K] */
  int64_t *held;                  /* [slots, S]: of the text, at each place */
  uint16_t *scratch;              /* R * 2 * (D + G * K) */
  int R, N, D, H, G, K, S, window, sink;
  float eps;
} Absorbed;
void absorb(const Absorbed *absorbed, int threads);

/* logits become e^((x - largest) / temperature); q what they are of their sum, or nothing in greedy rows; [B, V]. */
void draw(float *logits, const float *temperatures, const double *uniforms, int B, int V, int64_t *tokens, uint16_t *q,
          long long q_row, int threads);

/* B addresses of [K, V] in bfloat16 to [B, K, V] in fp32, and of each row, [B, K], its sum and its least number. */
void widen(const int64_t *rows, int B, int K, int V, float *wide, float *sums, float *leasts, int threads);

#endif

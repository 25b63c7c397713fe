/* Vectors of 8 floats (AVX2). */

#include <immintrin.h>

typedef __m256 lanes;
#define LANES 8

static inline lanes every(float x) { return _mm256_set1_ps(x); }

static inline lanes load_wide(const float *x) { return _mm256_loadu_ps(x); }

static inline void store_wide(float *to, lanes x) { _mm256_storeu_ps(to, x); }

/* bfloat16, rounded to nearest, ties to even. */
static inline lanes load_narrow(const uint16_t *x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16));
}

static inline void store_narrow(uint16_t *to, lanes x) {
  __m256i bits = _mm256_castps_si256(x), last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff)));
  __m256 none = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(none));
  rounded = _mm256_srli_epi32(rounded, 16);
  _mm_storeu_si128((__m128i *)to,
                   _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
}

/* Convert fp8 of `Weight`: move the bits of a byte to their places in a float. */
static inline lanes wide_fp8(const uint8_t *x) {
  __m256i bits = _mm256_slli_epi32(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)x)), 19);
  bits = _mm256_and_si256(bits, _mm256_set1_epi32(0x83f80000));
  return (lanes)_mm256_add_epi32(bits, _mm256_set1_epi32(120 << 23));
}

static inline lanes multiply_add(lanes a, lanes b, lanes c) { return _mm256_fmadd_ps(a, b, c); }

/* Where either is NaN, return the second. */
static inline lanes larger(lanes a, lanes b) { return _mm256_max_ps(a, b); }

static inline lanes smaller(lanes a, lanes b) { return _mm256_min_ps(a, b); }

static inline lanes at_most(float limit, lanes x) { return smaller(every(limit), x); }

static inline lanes floors(lanes x) { return _mm256_floor_ps(x); }

/* For whole numbers from -126 to 127. */
static inline lanes times_two_to(lanes x, lanes whole) {
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
  return x * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}

/* Return x, or 0 where `of` is below the limit. */
static inline lanes zero_below(float limit, lanes of, lanes x) {
  return _mm256_and_ps(x, _mm256_cmp_ps(of, every(limit), _CMP_NLT_UQ));
}

/* Return the sums of four vectors. */
static inline __m128 sums_of(lanes a, lanes b, lanes c, lanes d) {
  __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

static inline float sum_of(lanes x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}

static inline float largest_of(lanes x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}

static inline float least_of(lanes x) { return -largest_of(every(0.0f) - x); }

static inline double exact_sum_of(lanes x) {
  __m256d halves = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x)),
                                 _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
  __m128d pair = _mm_add_pd(_mm256_castpd256_pd128(halves), _mm256_extractf128_pd(halves, 1));
  return _mm_cvtsd_f64(_mm_add_sd(pair, _mm_unpackhi_pd(pair, pair)));
}

/* Vectors of 16 floats (AVX-512). */

#include <immintrin.h>

typedef __m512 lanes;
#define LANES 16

static inline lanes every(float x) { return _mm512_set1_ps(x); }

static inline lanes load_wide(const float *x) { return _mm512_loadu_ps(x); }

static inline void store_wide(float *to, lanes x) { _mm512_storeu_ps(to, x); }

/* bfloat16, rounded to nearest, ties to even. */
static inline lanes load_narrow(const uint16_t *x) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

static inline void store_narrow(uint16_t *to, lanes x) {
#ifdef __AVX512BF16__
  _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x));
#else
  __m512i bits = _mm512_castps_si512(x), last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
  _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#endif
}

/* Convert fp8 of `Weight`: move the bits of a byte to their places in a float. */
static inline lanes wide_fp8(const uint8_t *x) {
  __m512i bits = _mm512_slli_epi32(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)), 19);
  return (lanes)_mm512_add_epi32(_mm512_and_si512(bits, _mm512_set1_epi32(0x83f80000)), _mm512_set1_epi32(120 << 23));
}

/* Convert 32 bytes of fp8 to bfloat16. */
static inline __m512i narrow_fp8(const uint8_t *x) {
  __m512i bits = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)x)), 3);
  return _mm512_add_epi16(_mm512_and_si512(bits, _mm512_set1_epi16((short)0x83f8)), _mm512_set1_epi16(120 << 7));
}

static inline lanes multiply_add(lanes a, lanes b, lanes c) { return _mm512_fmadd_ps(a, b, c); }

/* Where either is NaN, return the second. */
static inline lanes larger(lanes a, lanes b) { return _mm512_max_ps(a, b); }

static inline lanes smaller(lanes a, lanes b) { return _mm512_min_ps(a, b); }

static inline lanes at_most(float limit, lanes x) { return smaller(every(limit), x); }

static inline lanes floors(lanes x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

static inline lanes times_two_to(lanes x, lanes whole) { return _mm512_scalef_ps(x, whole); }

/* Return x, or 0 where `of` is below the limit. */
static inline lanes zero_below(float limit, lanes of, lanes x) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(of, every(limit), _CMP_NLT_UQ), x);
}

static inline float sum_of(lanes x) { return _mm512_reduce_add_ps(x); }

static inline float largest_of(lanes x) { return _mm512_reduce_max_ps(x); }

static inline float least_of(lanes x) { return _mm512_reduce_min_ps(x); }

static inline double exact_sum_of(lanes x) {
  return _mm512_reduce_add_pd(
      _mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(x)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1))));
}

/* Return the sums of four vectors. */
static inline __m128 sums_of(lanes a, lanes b, lanes c, lanes d) {
#define HALVED(x) _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1))
  __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(HALVED(a), HALVED(b)), _mm256_hadd_ps(HALVED(c), HALVED(d)));
#undef HALVED
  return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

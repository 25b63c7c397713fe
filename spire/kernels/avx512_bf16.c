/* Models in bfloat16 with AVX512-BF16, which multiplies pairs. */

#define number uint16_t
#include "kernels.h"

#ifdef HAVE_KERNELS
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma")
#include "lanes16.h"

#define PAIR 2
typedef __m512bh packed;

static inline lanes load(const uint16_t *x) { return load_narrow(x); }

static inline void store(uint16_t *to, lanes x) { store_narrow(to, x); }

static inline packed load_packed(const uint16_t *x) { return (packed)_mm512_loadu_si512(x); }

static inline packed load_fp8(const uint8_t *x) { return (packed)narrow_fp8(x); }

static inline packed every_packed(const uint16_t *x) {
  int pair;
  memcpy(&pair, x, sizeof pair);
  return (packed)_mm512_set1_epi32(pair);
}

static inline lanes dot(packed a, packed b, lanes sum) { return _mm512_dpbf16_ps(sum, a, b); }

#define MOST_ROWS 12
#define MOST_AT_ONCE 6
#include "vectors.h"

static int available(void) { return processor() & HAS_BF16; }

const Kernels avx512_bf16 = {"AVX512-BF16", 1, BLOCK, 4 * LANES, 0, available, attend, before_attention,
                             behind_attention, norm, project, absorb, forward, draft_pass, draft_round, draw, judge, collect};
#pragma GCC pop_options
#endif

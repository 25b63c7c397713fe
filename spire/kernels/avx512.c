/* Models in float32 with AVX-512. */

#define number float
#include "kernels.h"

#ifdef HAVE_KERNELS
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")
#include "lanes16.h"

#define MOST_ROWS 12
#define MOST_AT_ONCE 6
#include "vectors.h"

static int available(void) { return processor() & HAS_AVX512; }

const Kernels avx512 = {"AVX-512", 0, BLOCK, 4 * LANES, 0, available, attend, before_attention, behind_attention,
                        norm, project, absorb, forward, draft_pass, draft_round, draw, judge, collect};
#pragma GCC pop_options
#endif

/* Models in float32 with AVX2, which x86 processors have since 2013. */

#define number float
#include "kernels.h"

#ifdef HAVE_KERNELS
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#include "lanes8.h"

#define MOST_ROWS 6
#define MOST_AT_ONCE 3
#include "vectors.h"

static int available(void) { return processor() & HAS_AVX2; }

const Kernels avx2 = {"AVX2", 0, BLOCK, 4 * LANES, 0, available, attend, before_attention, behind_attention,
                      norm, project, absorb, forward, draft_pass, draft_round, draw, judge, collect};
#pragma GCC pop_options
#endif

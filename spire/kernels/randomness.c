/* `spire.decoding.randomness` for the few numbers of a round: hashed by torch they are mostly dispatch. */

#include "kernels.h"

/* 64-bit constants of splitmix64. */
#define WEYL 0x9E3779B97F4A7C15u
#define MIX_1 0xBF58476D1CE4E5B9u
#define MIX_2 0x94D049BB133111EBu

static uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * MIX_1;
  x = (x ^ x >> 27) * MIX_2;
  return x ^ x >> 31;
}

void uniforms(const Uniforms *work) {
  for (int b = 0; b < work->B; b++) {
    const uint64_t of_choice = work->choices[b] * work->purposes + work->purpose;
    const uint64_t hashed = mix(mix(work->seeds[b] + WEYL) + of_choice * WEYL);
    const uint64_t behind = work->bases[b] + 1, salt = (work->salted[b] * behind) << 32;
    for (int t = 0; t < work->T; t++)
      work->found[(int64_t)b * work->T + t] =
          (double)(mix(hashed + (behind + t + 1 + salt) * WEYL) >> 11) * 0x1p-53;
  }
}

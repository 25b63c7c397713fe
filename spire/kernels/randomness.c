/* The uniform numbers of a round (`spire.decoding.randomness`): torch would spend most of the time on dispatch. */

#include "randomness.h"

#include "kernels.h"

void uniforms(const Uniforms *work) {
  for (int b = 0; b < work->B; b++) {
    const uint64_t behind = work->bases[b] + 1, salt = work->salted[b] * behind;
    for (int t = 0; t < work->T; t++)
      work->found[(int64_t)b * work->T + t] = uniform(work->seeds[b], work->choices[b], behind + t, work->purpose, salt);
  }
}

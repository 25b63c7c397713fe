/* `spire.decoding.randomness`: random numbers as a hash of seed, choice, position and purpose. */

#ifndef SPIRE_RANDOMNESS_H
#define SPIRE_RANDOMNESS_H

#include <math.h>
#include <stdint.h>

/* 64-bit constants of splitmix64. */
#define WEYL 0x9E3779B97F4A7C15u
#define MIX_1 0xBF58476D1CE4E5B9u
#define MIX_2 0x94D049BB133111EBu

/* `spire.decoding.randomness.Purpose`, and the number of purposes. */
enum { DRAFT = 1, ACCEPT = 2, SAMPLE = 3, NOISE = 4, TAIL = 5, PURPOSES = 5 };

static inline uint64_t splitmix(uint64_t x) {
  x = (x ^ x >> 30) * MIX_1;
  x = (x ^ x >> 27) * MIX_2;
  return x ^ x >> 31;
}

static inline uint64_t random_bits(uint64_t seed, uint64_t choice, uint64_t position, uint64_t purpose, uint64_t salt) {
  const uint64_t hashed = splitmix(splitmix(seed + WEYL) + (choice * PURPOSES + purpose) * WEYL);
  return splitmix(hashed + (position + 1 + (salt << 32)) * WEYL);
}

/* A uniform number in [0, 1). */
static inline double uniform(uint64_t seed, uint64_t choice, uint64_t position, uint64_t purpose, uint64_t salt) {
  return (double)(random_bits(seed, choice, position, purpose, salt) >> 11) * 0x1p-53;
}

/* Gumbel noise of a key, such as a token id. */
static inline double gumbel(uint64_t bits, uint64_t key) {
  const double uniform = (double)(splitmix(bits + (key + 1) * WEYL) >> 11) * 0x1p-53 + 0x1p-54;
  return -log(-log(uniform));
}

#endif

/* A transformer layer except for its attention, for any file that defines `number`, `lanes` and `product`. torch
   needs about thirty operations for a layer, each with its own dispatch and its own pass over the rows; here there
   are two. Sums and norms are fp32 and are rounded to `number` when they are stored. A row is computed in the same
   order of summation whatever the number of rows, so its results never depend on other rows. Weights [E, D] are
   stored in blocks of BLOCK outputs, as `product` reads them; half of each block of gate_up is gates, half is ups. */

#include <math.h>

/* e^x with a relative error of 3e-7 plus the rounding of x. It is exactly 1 at 0 and exactly 0 below -87, so that
   masked scores change no bit of a sum. NaN stays NaN. The polynomial approximates 2^x between 0 and 1. */
static inline lanes exponential(lanes x) {
  lanes y = at_most(88.0f, x) * every(1.44269504f), whole = floors(y), part = y - whole;
  lanes p = every(1.8775767e-3f);
  p = multiply_add(p, part, every(8.9893397e-3f));
  p = multiply_add(p, part, every(5.5826318e-2f));
  p = multiply_add(p, part, every(2.4015361e-1f));
  p = multiply_add(p, part, every(6.9315308e-1f));
  p = multiply_add(p, part, every(1.0f));
  return zero_below(-87.0f, x, times_two_to(p, whole));
}

/* What `finish` stores of a block of sums: fp32; numbers; numbers after adding a summand; silu(first half) * second
   half. */
typedef enum { WIDE, NARROW, ADDED, GATED } Kind;

static inline void finish(lanes first, lanes second, Kind kind, const number *summand, void *out, int64_t row, int e,
                          int E) {
  const int64_t at = row * E + e;
  if (kind == WIDE) {
    store_wide((float *)out + at, first);
    store_wide((float *)out + at + LANES, second);
  } else if (kind == GATED) {
    lanes silu = first / (every(1.0f) + exponential(every(0.0f) - first));
    store((number *)out + at / 2, silu * second);
  } else {
    if (kind == ADDED) first += load(summand + at), second += load(summand + at + LANES);
    store((number *)out + at, first);
    store((number *)out + at + LANES, second);
  }
}

/* Multiply [R, D] by a weight [E, D]. All threads of the team call this; they wait for one another at its end. */
static void product(const number *x, Weight weight, int R, int D, int E, Kind kind, const number *summand, void *out);

/* Return the outputs of a weight from number e on. */
static inline Weight outputs_from(Weight weight, int e, int D) {
  const int64_t size = weight.scales ? 1 : weight.narrow ? sizeof(uint16_t) : sizeof(number);
  const float *scales = weight.scales ? weight.scales + e : NULL;
  return (Weight){(const char *)weight.values + (int64_t)e * D * size, scales, weight.narrow};
}

static void normalise(const number *x, const number *weight, float eps, int R, int D, number *out) {
#pragma omp for schedule(static)
  for (int r = 0; r < R; r++) {
    const int64_t row = (int64_t)r * D;
    lanes squares = every(0.0f);
    for (int d = 0; d < D; d += LANES) {
      lanes value = load(x + row + d);
      squares = multiply_add(value, value, squares);
    }
    lanes scale = every(1.0f / sqrtf(sum_of(squares) / (float)D + eps));
    for (int d = 0; d < D; d += LANES) store(out + row + d, load(x + row + d) * scale * load(weight + d));
  }
}

/* Apply rotary embeddings to the first `heads` heads of each row [E], given the cosines and signed sines [K] of its
   position. */
static void rotate(number *x, const number *cosine, const number *sine, int R, int E, int heads, int K) {
  const int half = K / 2;
#pragma omp for schedule(static)
  for (int r = 0; r < R; r++)
    for (int head = 0; head < heads; head++) {
      number *values = x + (int64_t)r * E + head * K;
      const number *cosines = cosine + (int64_t)r * K, *sines = sine + (int64_t)r * K;
      for (int k = 0; k < half; k += LANES) {
        lanes first = load(values + k), second = load(values + half + k);
        store(values + k, multiply_add(first, load(cosines + k), second * load(sines + k)));
        store(values + half + k, multiply_add(second, load(cosines + half + k), first * load(sines + half + k)));
      }
    }
}

static void before(const Before *w) {
  normalise(w->x, w->norm, w->eps, w->R, w->D, w->normed);
  product(w->normed, w->weight, w->R, w->D, w->E, NARROW, NULL, w->out);
  rotate(w->out, w->cosine, w->sine, w->R, w->E, w->heads, w->K);
}

static void behind(const Behind *w) {
  product(w->attended, w->output, w->R, w->A, w->D, ADDED, w->x, w->hidden);
  normalise(w->hidden, w->norm, w->eps, w->R, w->D, w->normed);
  product(w->normed, w->gate_up, w->R, w->D, 2 * w->F, GATED, NULL, w->inside);
  product(w->inside, w->down, w->R, w->F, w->D, ADDED, w->hidden, w->out);
}

static void before_attention(const Before *work, int threads) {
#pragma omp parallel num_threads(threads)
  before(work);
}

static void behind_attention(const Behind *work, int threads) {
#pragma omp parallel num_threads(threads)
  behind(work);
}

static void norm(const number *x, const number *weight, float eps, int R, int D, number *out, int threads) {
#pragma omp parallel num_threads(threads)
  normalise(x, weight, eps, R, D, out);
}

static void project(const number *x, const Weight *weight, int R, int D, int E, float *out, int threads) {
#pragma omp parallel num_threads(threads)
  product(x, *weight, R, D, E, WIDE, NULL, out);
}

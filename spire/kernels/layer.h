/* A layer of rows but for its attention, in terms of what the file that includes this defines: `number`, `lanes`, and
   `product`.

   Of the thirty operations that a layer is to torch, each with its own dispatch and its own pass over the rows, this
   makes two. Sums and norms are fp32, and rounded to a `number` where they are stored. Every number of a row is the same
   sum in the same order however many rows there are, so it never depends on the others.

   Weights [E, D] lie in blocks of BLOCK outputs, as `product` reads them; of gates and ups each block holds half. */

#include <math.h>

/* e^x to 3e-7 and the rounding of x: 1 at 0, and 0 below -87, so that what is hidden changes no bit of a sum. NaN
   stays NaN. The polynomial is that of 2^x from 0 to 1. */
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

/* What becomes of a block of sums of a row: fp32; numbers; numbers with a summand; silu(first half) * second half. */
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

/* Of [R, D] with [E, D], by all threads of a team, which wait for one another at the end. */
static void product(const number *x, Weight weight, int R, int D, int E, Kind kind, const number *summand, void *out);

/* The outputs of a weight from number e on. */
static inline Weight outputs_from(Weight weight, int e, int D) {
  const int64_t size = weight.scales ? 1 : sizeof(number);
  return (Weight){(const char *)weight.values + (int64_t)e * D * size, weight.scales ? weight.scales + e : NULL};
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

/* Rotate the first `heads` of each row [E] to its position, whose cosines and signed sines are [K]. */
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

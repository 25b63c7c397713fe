/* What the kernels compute, whichever processor they are for: `tiles.c`, `avx512_bf16.c`, `avx512.c`,
   `avx2.c`.

   Each of them says what a `number` of a model is (bfloat16 in a uint16_t, or float), defines a vector of LANES floats
   and the few operations on it, and takes the rest from `layer.h` and `draft.h`. */

#ifndef SPIRE_KERNELS_H
#define SPIRE_KERNELS_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define HAVE_KERNELS 1
#endif

#ifndef number
#define number void
#endif

#define MOST_WIDTH 256 /* of a head */

/* Attention of new positions, whose keys and values are stored first.

   B sequences, T new positions, H query heads, G key/value heads, K head width, R = H / G * T queries of each key. For
   position t of T, query r = h * T + t sees the positions up to base + t. Strides are in elements. */
typedef struct {
  const number *first;           /* [B, heads, T, K], widths are contiguous */
  long long row, head, position; /* strides of the first three */
} Heads;

typedef struct {
  Heads queries, new_keys, new_values;
  number *keys, *values, *found; /* pools; [B, T, H, K] */
  const int64_t *slots, *bases;  /* [B] */
  int B, T, H, G, K, columns;
  long long slot_stride, head_stride; /* of a pool; a head's positions are contiguous */
} Attention;

/* A weight in blocks of [E, D]: numbers or, with a scale for each of E outputs, bytes of fp8. A byte is a sign, three
   bits e and four bits m: 2^(e - 7) (1 + m / 16). There is no zero. */
typedef struct {
  const void *values;
  const float *scales; /* NULL: numbers */
} Weight;

/* A layer up to its attention. R rows, D width, E outputs; `heads` of them, [K] wide, are rotated. */
typedef struct {
  const number *x, *norm, *cosine, *sine; /* [R, D], [D], [R, K] */
  Weight weight;                          /* [E, D] */
  number *normed, *out;                   /* [R, D], [R, E] */
  int R, D, E, heads, K;
  float eps;
} Before;

/* And behind it. A width of what was attended, F inner width. */
typedef struct {
  const number *x, *attended, *norm;      /* [R, D], [R, A], [D] */
  Weight output, gate_up, down;           /* [D, A], [2 F, D], [D, F] */
  number *hidden, *normed, *inside, *out; /* [R, D], [R, D], [R, F], [R, D] */
  int R, D, A, F;
  float eps;
} Behind;

/* A layer's weights, and where it keeps keys and values: of a target pools, of a SPIRe draft [slots, G, S, K]. */
typedef struct {
  const number *norm, *norm_inside;
  Weight queries_keys_values, output, gate_up, down;
  number *keys, *values;
} Layer;

/* T new positions of each of B sequences; `first` of the rows of a forward. */
typedef struct {
  int64_t first, B, T;
  const int64_t *slots, *bases; /* [B] */
} Stretch;

/* What a target makes of R tokens: N layers, D width, H query heads, G key/value heads, K head width, F inner width, V
   vocabulary, P positions whose rotations are known. What enters the tapped layers is kept. */
typedef struct {
  const Layer *layers;              /* [N] */
  const Stretch *stretches;         /* [count]: all rows */
  const int64_t *tapped, *tokens;   /* [tap_count], [R] */
  const number *embedding, *norm;   /* [V, D], [D] */
  const number *cosine, *sine;      /* [P, K] */
  number *scratch;                  /* R * (3 * D + K * (2 * H + 2 * G + 2) + F) */
  number *taps, *out;               /* [R, tap_count, D], [R, D] */
  int count, tap_count, R, N, D, H, G, K, F, V, P, columns;
  long long slot_stride, head_stride; /* of pools */
  float eps;
} Forward;

/* A round of a draft: B sequences, k passes, N layers, D width, H query heads, G key/value heads, K head width, F inner
   width, V tokens that it can propose, S places of a slot. */
typedef struct {
  const Layer *layers;                     /* [N] */
  const number *embedding, *norm;               /* by token, D each; [D] */
  Weight unembedding;                           /* [V, D] */
  const float *feedback;                        /* [N, N + 1]; NULL where a layer remembers its own input */
  const int64_t *positions;                     /* [slots, S]: of the text, -1 in empty places */
  const int64_t *slots, *bases;                 /* [B] */
  const number *cosine, *sine;                  /* [positions, K] */
  number *own, *scratch;                        /* [N, 2, B, G, k, K]; B * (D * (N + 3) + K * (2 * H + 2 * G + 2) + F) */
  float *logits;                                /* [B, V] */
  const int64_t *vocabulary;                    /* [V]: which tokens; NULL: all of the target's */
  int B, k, N, D, H, G, K, F, V, S, window, sink, attends_self;
  float eps;
} DraftRound;

/* Activations of R verified positions for a draft to remember. */
typedef struct {
  const Layer *layers; /* [N] */
  const number *taps;       /* [R, N, D] */
  /* [R]: of the text; the position behind the last of the sequence's; which slot. */
  const int64_t *positions, *ends, *slots;
  const number *cosine, *sine; /* [R, K] */
  int64_t *held;               /* [slots, S]: of the text, at each place */
  number *scratch;             /* R * 2 * (D + G * K) */
  int R, N, D, H, G, K, S, window, sink;
  float eps;
} Absorbed;

/* The rules of `spire.decoding.sampling.Rule`. */
enum { REJECTION = 1, BLOCKS = 2, INVARIANT = 3 };

/* How the tokens of B sequences are drawn: greedily at temperature 0, under the invariant rule by noise of a token's
   position and id, otherwise by uniform numbers. The first token of a round is at the position behind the base. */
typedef struct {
  const float *temperatures;       /* [B] */
  const int64_t *top_k;            /* [B]: 0 for all tokens */
  const float *top_p, *min_p;      /* [B]: 1 and 0 for all tokens */
  const int64_t *rules;            /* [B] */
  const uint64_t *seeds, *choices; /* [B] */
  const int64_t *bases;            /* [B] */
  int ids;                         /* of the target's vocabulary */
} Sampling;

/* Tokens drawn from logits [B, V], which become e^((x - largest) / temperature), and q in bfloat16: what they are of
   their sum, or nothing for sequences whose rule does not need it. */
typedef struct {
  float *logits;
  Sampling sampling;
  int step;                  /* the token's place in the round, from 0 */
  const double *uniforms;    /* one for each row */
  int64_t *tokens;           /* [B] */
  const int64_t *vocabulary; /* [V]: which tokens the logits are of; NULL: 0 to V - 1 */
  uint16_t *q;
  const int64_t *rows; /* [B]: where each row of logits lies in all others; NULL: in the same place */
  long long uniforms_row, q_row; /* strides */
  int B, V;
} Draw;

/* The numbers that a stop head is told of a token: log q of it, the entropy of q, log q of the two most probable tokens,
   and the temperature. */
enum { TOLD = 5 };

/* When a round stops drafting for a sequence: where the head that judges its tokens (SpecDec++, section 3.2) says that
   the block stands with less than this probability. If all that go on have a price of a pass, the round ends once they
   exceed this probability, in sum, by less than the prices of all. `depth` residual layers of width W. */
typedef struct {
  const float *enter, *enter_told, *enter_bias; /* [W, D], [TOLD, W], [W] */
  const float *residual, *residual_bias;        /* [depth, W, W], [depth, W] */
  const float *leave;                           /* [W + 1]: the last is the bias */
  const float *least, *price;                   /* [B]; price 0: none */
  float *scratch;                               /* B * (V + D + 2 * W + TOLD) */
  float *stands;                                /* [B]: the probability */
  int64_t *counts;                              /* [B]: tokens drafted */
  int depth, W;
} Stop;

/* Which of a sequence's drafted tokens stand by its rule, and the token behind them. T - 1 are drafted at most, of row b
   the first counts[b]; its logits are counts[b] + 1 rows from firsts[b] on, and are used up. q is in proportion to what a
   token was drawn from. */
typedef struct {
  float *logits;                   /* [R, V] */
  const int64_t *firsts;           /* [B] */
  Sampling sampling;
  const int64_t *drafted, *counts; /* [B, T - 1], [B] */
  const int64_t *vocabulary;       /* [W], ascending: the tokens that q is of; NULL: all, W = V */
  const uint16_t *q;               /* [B, T - 1, W], not read for greedy sequences and under the invariant rule */
  const float *q_sums;             /* [B, T - 1] */
  const double *coins, *uniforms;  /* [B, T - 1], [B, T] */
  int64_t *accepted, *tokens;      /* [B], [B, T]: zeros behind */
  int64_t *finite;                 /* [B]: whether all logits of real positions are numbers */
  int B, T, V, W;
} Verdict;

/* B addresses of [counts[b], V] in bfloat16 to [B, K, V], and of each row, [B, K], its sum and its least number. What is
   not there is zero. */
typedef struct {
  const int64_t *rows, *counts;
  uint16_t *together;
  float *sums, *leasts;
  int B, K, V;
} Collection;

/* Uniform numbers of each of B sequences for the T positions behind its base: `spire.decoding.randomness.uniforms_behind`. */
typedef struct {
  const uint64_t *seeds, *choices, *salted, *bases; /* [B] */
  double *found;                                    /* [B, T] */
  int B, T;
  unsigned purpose; /* what they decide */
} Uniforms;

typedef struct {
  const char *name;
  int narrow;        /* whether numbers are bfloat16 */
  int block;         /* outputs of a weight that lie together */
  int head_multiple; /* heads that can be attended with are as wide as a multiple of this */
  int most_queries;  /* R at most; 0 is any */
  int reads_fp8;     /* whether weights may be fp8 */
  int (*available)(void);
  void (*attend)(const Attention *work, int threads);
  void (*before_attention)(const Before *work, int threads);
  void (*behind_attention)(const Behind *work, int threads);
  void (*norm)(const number *x, const number *weight, float eps, int R, int D, number *out, int threads);
  void (*project)(const number *x, const Weight *weight, int R, int D, int E, float *out, int threads);
  void (*absorb)(const Absorbed *work, int threads);
  void (*forward)(const Forward *work, int threads);
  void (*draft_pass)(const DraftRound *round, int pass, const int64_t *tokens, int threads);
  void (*draft_round)(const DraftRound *round, const int64_t *tokens, const Draw *drawn, const Stop *stop, int threads);
  void (*draw)(const Draw *work, int threads);
  void (*judge)(const Verdict *work, int threads);
  void (*collect)(const Collection *work, int threads);
} Kernels;

void uniforms(const Uniforms *work);

/* Give each thread of the calling thread's team, which has as many as there are processors, one of its own. The caller
   goes where the system puts it, and its helpers to the others. With fewer threads the system has a choice. */
void keep_apart(int threads);

/* What a processor can do: bits of `cpuid`'s leaf 7, and whether the system saves the registers (`xgetbv`). */
enum { HAS_AVX2 = 1, HAS_AVX512 = 2, HAS_BF16 = 4, HAS_TILES = 8 };
int processor(void);

#endif

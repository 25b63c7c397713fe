/* The arguments of all kernels, and the table of kernels of each instruction set: `tiles.c`, `avx512_bf16.c`,
   `avx512.c`, `avx2.c`. Each of these files defines `number`, the type of a model's weights and activations
   (bfloat16 in a uint16_t, or float), and a vector of LANES floats with its operations. The headers contain the code
   that is common to all. */

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

/* Attention of T new positions of each of B sequences, after their keys and values are stored. H query heads, G
   key/value heads, K head width, R = H / G * T queries of each key. Query r = h * T + t of position t attends to the
   positions up to base + t. Strides are in elements. */
typedef struct {
  const number *first;           /* [B, heads, T, K], contiguous along K */
  long long row, head, position; /* strides of the first three */
} Heads;

typedef struct {
  Heads queries, new_keys, new_values;
  number *keys, *values, *found; /* pools; [B, T, H, K] */
  const int64_t *slots, *bases;  /* [B] */
  int B, T, H, G, K, columns;
  long long slot_stride, head_stride; /* of a pool, in which a head's positions are contiguous */
} Attention;

/* A weight in blocks of [E, D]: numbers, bfloat16 in the place of floats or, with a scale for each of E outputs, bytes
   of fp8. A byte is a sign, three bits e and four bits m: 2^(e - 7) (1 + m / 16). There is no zero. */
typedef struct {
  const void *values;
  const float *scales; /* NULL: numbers or bfloat16 */
  int64_t narrow;      /* 1: bfloat16, where a `number` is a float */
} Weight;

/* The first part of a layer: norm, projections to queries, keys and values, rotation. R rows, D width, E outputs, of
   which the first `heads` heads of width K are rotated. */
typedef struct {
  const number *x, *norm, *cosine, *sine; /* [R, D], [D], [R, K] */
  Weight weight;                          /* [E, D] */
  number *normed, *out;                   /* [R, D], [R, E] */
  int R, D, E, heads, K;
  float eps;
} Before;

/* The second part of a layer: output projection, norm, MLP. A width of the attention's output, F inner width. */
typedef struct {
  const number *x, *attended, *norm;      /* [R, D], [R, A], [D] */
  Weight output, gate_up, down;           /* [D, A], [2 F, D], [D, F] */
  number *hidden, *normed, *inside, *out; /* [R, D], [R, D], [R, F], [R, D] */
  int R, D, A, F;
  float eps;
} Behind;

/* A layer's weights, and the memory for its keys and values: pools for a target, [slots, G, S, K] for a SPIRe draft. */
typedef struct {
  const number *norm, *norm_inside;
  Weight queries_keys_values, output, gate_up, down;
  number *keys, *values;
} Layer;

/* T new positions of each of B sequences. They are consecutive rows of a forward, beginning with row `first`. */
typedef struct {
  int64_t first, B, T;
  const int64_t *slots, *bases; /* [B] */
} Stretch;

/* A target's forward over R tokens, up to its final norm: N layers, D width, H query heads, G key/value heads, K
   head width, F inner width, V vocabulary, P positions with known rotations. The inputs of the tapped layers are
   returned. */
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

/* A round of a SPIRe draft: B sequences, k passes, N layers, D width, H query heads, G key/value heads, K head
   width, F inner width, V tokens that the draft can propose, S places of a slot. */
typedef struct {
  const Layer *layers;                     /* [N] */
  const number *embedding, *norm;               /* [the target's vocabulary, D]; [D] */
  Weight unembedding;                           /* [V, D] */
  const float *feedback;                        /* [N, N + 1]; NULL if a layer's memory is its own input */
  const int64_t *positions;                     /* [slots, S]: position in the text, -1 for an empty place */
  const int64_t *slots, *bases;                 /* [B] */
  const number *cosine, *sine;                  /* [positions, K] */
  number *own, *scratch;                        /* [N, 2, B, G, k, K]; B * (D * (N + 3) + K * (2 * H + 2 * G + 2) + F) */
  float *logits;                                /* [B, V] */
  const int64_t *vocabulary;                    /* [V]: the tokens that the draft can propose; NULL: all */
  int B, k, N, D, H, G, K, F, V, S, window, sink, attends_self;
  float eps;
} DraftRound;

/* Activations of R verified positions, from which a SPIRe draft computes its memory. */
typedef struct {
  const Layer *layers; /* [N] */
  const number *taps;       /* [R, N, D] */
  /* [R]: position in the text; one after the sequence's last position; slot. */
  const int64_t *positions, *ends, *slots;
  const number *cosine, *sine; /* [R, K] */
  int64_t *held;               /* [slots, S]: position in the text of each place */
  number *scratch;             /* R * 2 * (D + G * K) */
  int R, N, D, H, G, K, S, window, sink;
  float eps;
} Absorbed;

/* The rules of `spire.decoding.sampling.Rule`. */
enum { REJECTION = 1, BLOCKS = 2, INVARIANT = 3 };

/* How the tokens of B sequences are drawn: greedily at temperature 0, under the invariant rule by noise that depends
   on position and id, otherwise by uniform numbers. The first token of a round is at position base + 1. */
typedef struct {
  const float *temperatures;       /* [B] */
  const int64_t *top_k;            /* [B]: 0 for all tokens */
  const float *top_p, *min_p;      /* [B]: 1 and 0 for all tokens */
  const int64_t *rules;            /* [B] */
  const uint64_t *seeds, *choices; /* [B] */
  const int64_t *bases;            /* [B] */
  int ids;                         /* the size of the target's vocabulary */
} Sampling;

/* Draw a token of each row of logits [B, V], which are overwritten. q is the distribution that a token is drawn from,
   normalised and in bfloat16; it is written only for sequences whose rule needs it. */
typedef struct {
  float *logits;
  Sampling sampling;
  int step;                  /* the index of the pass in the round */
  const double *uniforms;    /* one for each row */
  int64_t *tokens;           /* [B] */
  const int64_t *vocabulary; /* [V]: the tokens that the logits belong to; NULL: 0 to V - 1 */
  uint16_t *q;
  const int64_t *rows; /* [B]: the sequence of each row of logits; NULL: sequence b for row b */
  long long uniforms_row, q_row; /* strides */
  int B, V;
} Draw;

/* The inputs of a stop head besides the hidden state: log q of the token, the entropy of q, log q of the two most
   probable tokens, the temperature. */
enum { TOLD = 5 };

/* When drafting stops. A stop head (SpecDec++, section 3.2) predicts the probability that a sequence's block is
   accepted. A sequence stops below `least`. The head has `depth` residual layers of width W. */
typedef struct {
  const float *enter, *enter_told, *enter_bias; /* [W, D], [TOLD, W], [W] */
  const float *residual, *residual_bias;        /* [depth, W, W], [depth, W] */
  const float *leave;                           /* [W + 1]: the last is the bias */
  const float *least;                           /* [B] */
  float *scratch;                               /* B * (V + D + 2 * W + TOLD) */
  float *stands;                                /* [B]: probability that the block is accepted */
  int64_t *counts;                              /* [B]: number of tokens drafted */
  int depth, W;
} Stop;

/* Verify the draft tokens of B sequences, each by its rule, and draw the token after those accepted. Row b has
   counts[b] draft tokens, at most T - 1; its logits are counts[b] + 1 rows, which are overwritten. With
   `padded` these are the first of T rows. Rows of q need not sum to 1. */
typedef struct {
  float *logits;                   /* [R, V] */
  Sampling sampling;
  const int64_t *drafted, *counts; /* [B, T - 1], [B] */
  const int64_t *vocabulary;       /* [W], ascending: the tokens of q's columns; NULL: all, W = V */
  const uint16_t *q;               /* [B, T - 1, W]; not read for greedy sequences and under the invariant rule */
  const float *q_sums;             /* [B, T - 1] */
  int64_t *accepted, *tokens;      /* [B]; [B, T], padded with zeros */
  int64_t *finite;                 /* [B]: 1 if all logits of real positions are finite */
  int B, T, V, W, padded;
} Verdict;

/* Copy B matrices [counts[b], V] in bfloat16, given by address, to [B, K, V], and compute the sum and the minimum of
   each row. Missing rows are zero. */
typedef struct {
  const int64_t *rows, *counts;
  uint16_t *together;
  float *sums, *leasts;
  int B, K, V;
} Collection;

/* Uniform numbers for the T positions after the base of each of B sequences:
   `spire.decoding.randomness.uniforms_behind`. */
typedef struct {
  const uint64_t *seeds, *choices, *salted, *bases; /* [B] */
  double *found;                                    /* [B, T] */
  int B, T;
  unsigned purpose; /* of `spire.decoding.randomness.Purpose` */
} Uniforms;

typedef struct {
  const char *name;
  int narrow;        /* 1 if a `number` is bfloat16 */
  int block;         /* outputs of a weight that are stored together */
  int head_multiple; /* attention needs heads whose width is a multiple of this */
  int most_queries;  /* the largest R of attention; 0: no limit */
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

/* Pin the helpers of the calling thread's OpenMP team to the processors that the caller is not on. Does nothing
   unless the team has as many threads as there are processors. */
void keep_apart(int threads);

/* The instruction sets of this processor whose registers the operating system saves. */
enum { HAS_AVX2 = 1, HAS_AVX512 = 2, HAS_BF16 = 4, HAS_TILES = 8 };
int processor(void);

#endif

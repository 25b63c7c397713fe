/* Attention of a few new positions over keys and values in bfloat16, by the matrix tiles (AMX) of x86 processors.

   What torch's flash kernel does for one query at the speed of memory takes it twice as long for two or more, because
   its products repack all keys and values. Here a tile of 16 keys is multiplied as it lies in memory with up to 16
   queries at once, and each key and value byte is read once. Scores, weights and sums stay in fp32.

   Shapes: B sequences, G key/value heads, R queries of each key (T new positions of each of R / T heads), K head width.
   For position t of T, query r = h * T + t sees the positions up to base + t. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MOST_QUERIES 32
#define MOST_WIDTH 256
/* Positions between which the softmax is rescaled: their keys and values fit the second cache. */
#define BLOCK 128

static int available(void) {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  unsigned avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31, amx = 1u << 22 | 1u << 24; /* F DQ BW VL, BF16 TILE */
  if ((b & avx512) != avx512 || (d & amx) != amx) return 0;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & 1u << 5)) return 0; /* AVX512-BF16 */
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0;
}

#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,fma,amx-tile,amx-bf16")
#include <immintrin.h>

typedef struct {
  const uint16_t *queries, *keys, *values; /* [B, G, R, K]; pools */
  uint16_t *found;                         /* [B, G, R, K] */
  const int64_t *slots, *bases;            /* [B] */
  int B, G, R, T, K, columns;
  int64_t slot_stride, head_stride; /* of a pool, in elements; a head's positions are contiguous */
} Work;

static inline __m512 load16(const uint16_t *values) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)values));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

/* e^x for x <= 0, to 3e-7; NaN stays NaN, so that numbers that are none are found. */
static inline __m512 exponential(__m512 x) {
  __m512 y = _mm512_mul_ps(_mm512_max_ps(_mm512_set1_ps(-87.0f), x), _mm512_set1_ps(1.44269504f));
  __m512 whole = _mm512_roundscale_ps(y, 0x08), part = _mm512_sub_ps(y, whole);
  __m512 p = _mm512_set1_ps(1.8775767e-3f);
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(8.9893397e-3f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(5.5826318e-2f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(2.4015361e-1f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(6.9315308e-1f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(9.9999994e-1f));
  return _mm512_scalef_ps(p, whole);
}

/* sums[r] += sum of weights[i][r] * values[i] over n positions, for N queries and 64 of the K columns. */
#define WEIGH(N)                                                                                                       \
  static void weigh##N(const float *weights, const uint16_t *values, int n, int K, float *sums) {                     \
    __m512 sum[N][4];                                                                                                  \
    for (int r = 0; r < N; r++)                                                                                        \
      for (int j = 0; j < 4; j++) sum[r][j] = _mm512_loadu_ps(sums + r * K + j * 16);                                  \
    for (int i = 0; i < n; i++, values += K, weights += 16) {                                                          \
      _mm_prefetch((const char *)(values + 24 * K), _MM_HINT_T0);                                                      \
      _mm_prefetch((const char *)(values + 24 * K + 32), _MM_HINT_T0);                                                 \
      __m512 value[4];                                                                                                 \
      for (int j = 0; j < 4; j++) value[j] = load16(values + j * 16);                                                  \
      for (int r = 0; r < N; r++) {                                                                                    \
        __m512 weight = _mm512_set1_ps(weights[r]);                                                                    \
        for (int j = 0; j < 4; j++) sum[r][j] = _mm512_fmadd_ps(weight, value[j], sum[r][j]);                          \
      }                                                                                                                \
    }                                                                                                                  \
    for (int r = 0; r < N; r++)                                                                                        \
      for (int j = 0; j < 4; j++) _mm512_storeu_ps(sums + r * K + j * 16, sum[r][j]);                                  \
  }
WEIGH(1)
WEIGH(2)
WEIGH(3)
WEIGH(4)
WEIGH(5)
WEIGH(6)
static void (*const WEIGHS[])(const float *, const uint16_t *, int, int, float *) = {weigh1, weigh2, weigh3,
                                                                                    weigh4, weigh5, weigh6};

/* As many queries at once as registers hold, in parts of about one size. */
static void weigh(const float *weights, const uint16_t *values, int n, int K, float *sums, int queries) {
  int parts = (queries + 5) / 6;
  for (int part = 0, r = 0; part < parts; part++) {
    int count = (queries - r) / (parts - part);
    for (int column = 0; column < K; column += 64)
      WEIGHS[count - 1](weights + r, values + column, n, K, sums + r * K + column);
    r += count;
  }
}

/* scores[i][r] of n positions, a multiple of 32, and 16 queries, which lie as tiles: [K / 32][16 pairs][16][2]. */
static void score(const uint16_t *keys, const uint32_t *queries, int n, int K, float (*scores)[16]) {
  for (int i = 0; i < n; i += 32, keys += 32 * K) {
    for (int row = 32; row < 64; row++)
      for (int column = 0; column < K; column += 32)
        _mm_prefetch((const char *)(keys + row * K + column), _MM_HINT_T0);
    _tile_zero(0);
    _tile_zero(1);
    for (int part = 0; part < K / 32; part++) {
      _tile_loadd(4, queries + part * 256, 64);
      _tile_loadd(2, keys + part * 32, 2 * K);
      _tile_loadd(3, keys + 16 * K + part * 32, 2 * K);
      _tile_dpbf16ps(0, 2, 4);
      _tile_dpbf16ps(1, 3, 4);
    }
    _tile_stored(0, scores[i], 64);
    _tile_stored(1, scores[i + 16], 64);
  }
}

typedef struct {
  __m512 largest, sum;
} Softmax;

/* Scores of n positions become weights; what was summed before is made to fit the largest score so far. */
static void weights_of(float (*scores)[16], int n, int first, __m512i last_seen, __m512 scale, Softmax *softmax,
                       float *sums, int queries, int K) {
  if (first + n - 1 > _mm512_reduce_min_epi32(last_seen))
    for (int i = 0; i < n; i++) {
      __mmask16 hidden = _mm512_cmplt_epi32_mask(last_seen, _mm512_set1_epi32(first + i));
      _mm512_mask_storeu_ps(scores[i], hidden, _mm512_set1_ps(-1e30f));
    }
  __m512 largest = softmax->largest;
  for (int i = 0; i < n; i++) largest = _mm512_max_ps(largest, _mm512_loadu_ps(scores[i]));
  __m512 shrink = exponential(_mm512_mul_ps(_mm512_sub_ps(softmax->largest, largest), scale));
  float shrinks[16];
  _mm512_storeu_ps(shrinks, shrink);
  if (first)
    for (int r = 0; r < queries; r++)
      for (int k = 0; k < K; k += 16)
        _mm512_storeu_ps(sums + r * K + k,
                         _mm512_mul_ps(_mm512_loadu_ps(sums + r * K + k), _mm512_set1_ps(shrinks[r])));
  __m512 sum = _mm512_mul_ps(softmax->sum, shrink);
  for (int i = 0; i < n; i++) {
    __m512 weight = exponential(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores[i]), largest), scale));
    sum = _mm512_add_ps(sum, weight);
    _mm512_storeu_ps(scores[i], weight);
  }
  softmax->largest = largest, softmax->sum = sum;
}

/* One head of one sequence. */
static void attend_head(const Work *work, int b, int g) {
  const int K = work->K, R = work->R, groups = (R + 15) / 16;
  const int64_t place = work->slots[b] * work->slot_stride + g * work->head_stride;
  const uint16_t *keys = work->keys + place, *values = work->values + place;
  const int64_t row = ((int64_t)b * work->G + g) * R * K;
  const int base = (int)work->bases[b], columns = work->columns;
  const int total = base + work->T < columns ? base + work->T : columns;
  const float width = (float)K;
  const __m512 scale = _mm512_set1_ps(1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(width))));
  uint32_t tiles[MOST_QUERIES / 16][MOST_WIDTH / 32][16][16] __attribute__((aligned(64)));
  float scores[BLOCK][16] __attribute__((aligned(64)));
  float sums[MOST_QUERIES * MOST_WIDTH] __attribute__((aligned(64)));
  Softmax softmax[MOST_QUERIES / 16];
  int32_t last_seen[MOST_QUERIES / 16][16];
  for (int group = 0; group < groups; group++) {
    memset(tiles[group], 0, sizeof tiles[group]);
    softmax[group].largest = _mm512_set1_ps(-1e30f), softmax[group].sum = _mm512_setzero_ps();
    for (int lane = 0; lane < 16; lane++) {
      int r = group * 16 + lane;
      last_seen[group][lane] = base + r % work->T;
      if (r < R)
        for (int pair = 0; pair < K / 2; pair++)
          memcpy(&tiles[group][pair / 16][pair % 16][lane], work->queries + row + r * K + 2 * pair, 4);
    }
  }
  memset(sums, 0, sizeof(float) * R * K);
  for (int first = 0; first < total; first += BLOCK) {
    int n = total - first < BLOCK ? total - first : BLOCK;
    for (int group = 0; group < groups; group++) {
      int queries = R - group * 16 < 16 ? R - group * 16 : 16;
      float *group_sums = sums + group * 16 * K;
      /* May read up to 31 positions more of the slot, whose scores nobody looks at. */
      score(keys + (int64_t)first * K, &tiles[group][0][0][0], (n + 31) / 32 * 32, K, scores);
      weights_of(scores, n, first, _mm512_loadu_si512(last_seen[group]), scale, &softmax[group], group_sums, queries, K);
      weigh(&scores[0][0], values + (int64_t)first * K, n, K, group_sums, queries);
    }
  }
  for (int r = 0; r < R; r++) {
    float all[16];
    _mm512_storeu_ps(all, softmax[r / 16].sum);
    __m512 share = _mm512_set1_ps(1.0f / all[r % 16]);
    for (int k = 0; k < K; k += 16)
      _mm256_storeu_si256((__m256i *)(work->found + row + r * K + k),
                          (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(sums + r * K + k), share)));
  }
}

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} TileConfig;

static void attend_all(const Work *work, int threads) {
#pragma omp parallel num_threads(threads)
  {
    TileConfig config = {.palette = 1};
    for (int tile = 0; tile < 5; tile++) config.row_bytes[tile] = 64, config.rows[tile] = 16;
    _tile_loadconfig(&config);
#pragma omp for schedule(dynamic, 1)
    for (int head = 0; head < work->B * work->G; head++) attend_head(work, head / work->G, head % work->G);
    _tile_release();
  }
}
#pragma GCC pop_options

static PyObject *py_attend(PyObject *self, PyObject *arguments) {
  unsigned long long queries, keys, values, found, slots, bases;
  long long slot_stride, head_stride;
  Work work;
  int threads;
  if (!PyArg_ParseTuple(arguments, "KKKKKKiiiiiiLLi", &queries, &keys, &values, &found, &slots, &bases, &work.B,
                        &work.G, &work.R, &work.T, &work.K, &work.columns, &slot_stride, &head_stride, &threads))
    return NULL;
  if (work.R > MOST_QUERIES || work.K % 64 || work.K > MOST_WIDTH) {
    PyErr_SetString(PyExc_ValueError, "more queries or another width than tiles are made for");
    return NULL;
  }
  work.queries = (const uint16_t *)(uintptr_t)queries, work.keys = (const uint16_t *)(uintptr_t)keys;
  work.values = (const uint16_t *)(uintptr_t)values, work.found = (uint16_t *)(uintptr_t)found;
  work.slots = (const int64_t *)(uintptr_t)slots, work.bases = (const int64_t *)(uintptr_t)bases;
  work.slot_stride = slot_stride, work.head_stride = head_stride;
  Py_BEGIN_ALLOW_THREADS;
  attend_all(&work, threads);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}
#else
#define MOST_QUERIES 0
#define MOST_WIDTH 0
static int available(void) { return 0; }
static PyObject *py_attend(PyObject *self, PyObject *arguments) {
  PyErr_SetString(PyExc_NotImplementedError, "this processor has no tiles");
  return NULL;
}
#endif

static PyObject *py_available(PyObject *self, PyObject *none) { return PyBool_FromLong(available()); }

static PyMethodDef METHODS[] = {
    {"attend", py_attend, METH_VARARGS, "Attend by addresses: see spire.model.tile_attention."},
    {"available", py_available, METH_NOARGS, "Whether this processor has tiles, and the kernel lets us use them."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, .m_name = "_tiles", .m_size = 0, .m_methods = METHODS};

PyMODINIT_FUNC PyInit__tiles(void) {
  PyObject *module = PyModule_Create(&MODULE);
  if (module && (PyModule_AddIntConstant(module, "MOST_QUERIES", MOST_QUERIES) ||
                 PyModule_AddIntConstant(module, "MOST_WIDTH", MOST_WIDTH))) {
    Py_DECREF(module);
    return NULL;
  }
  return module;
}

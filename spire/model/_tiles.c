/* The matrix tiles (AMX) of x86 processors for Python: numbers by the addresses of tensors, see `_tiles.pyi`. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_tiles.h"

#ifdef HAVE_TILES
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

static int available(void) {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  unsigned avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31, amx = 1u << 22 | 1u << 24; /* F DQ BW VL, BF16 TILE */
  if ((b & avx512) != avx512 || (d & amx) != amx) return 0;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & 1u << 5)) return 0; /* AVX512-BF16 */
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0;
}

typedef unsigned long long Address;
#define AT(address) ((uint16_t *)(uintptr_t)(address))
#define INTEGERS(address) ((const int64_t *)(uintptr_t)(address))

static PyObject *py_attend(PyObject *self, PyObject *arguments) {
  Address queries, new_keys, new_values, keys, values, found, slots, bases;
  Work work;
  Heads *q = &work.queries, *k = &work.new_keys, *v = &work.new_values;
  int threads;
  if (!PyArg_ParseTuple(arguments, "KLLLKLLLKLLLKKKKKiiiiiiLLi", &queries, &q->row, &q->head, &q->position, &new_keys,
                        &k->row, &k->head, &k->position, &new_values, &v->row, &v->head, &v->position, &keys, &values,
                        &found, &slots, &bases, &work.B, &work.T, &work.H, &work.G, &work.K, &work.columns,
                        &work.slot_stride, &work.head_stride, &threads))
    return NULL;
  if (work.H / work.G * work.T > MOST_QUERIES || work.K % 64 || work.K > MOST_WIDTH) {
    PyErr_SetString(PyExc_ValueError, "more queries or another width than tiles are made for");
    return NULL;
  }
  q->first = AT(queries), k->first = AT(new_keys), v->first = AT(new_values);
  work.keys = AT(keys), work.values = AT(values), work.found = AT(found);
  work.slots = INTEGERS(slots), work.bases = INTEGERS(bases);
  Py_BEGIN_ALLOW_THREADS;
  attend_all(&work, threads);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

static PyObject *py_project_normed(PyObject *self, PyObject *arguments) {
  Address x, norm, weight, cosine, sine, normed, out;
  double eps;
  int R, D, E, heads, K, threads;
  if (!PyArg_ParseTuple(arguments, "KKKKKKKdiiiiii", &x, &norm, &weight, &cosine, &sine, &normed, &out, &eps, &R, &D,
                        &E, &heads, &K, &threads))
    return NULL;
  Py_BEGIN_ALLOW_THREADS;
  project_normed(AT(x), AT(norm), (float)eps, AT(weight), R, D, E, AT(cosine), AT(sine), heads, K, AT(normed), AT(out),
                 threads);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

static PyObject *py_behind_attention(PyObject *self, PyObject *arguments) {
  Address x, attended, output, norm, gate_up, down, hidden, normed, inside, out;
  double eps;
  int R, D, E, F, threads;
  if (!PyArg_ParseTuple(arguments, "KKKKKKKKKKdiiiii", &x, &attended, &output, &norm, &gate_up, &down, &hidden, &normed,
                        &inside, &out, &eps, &R, &D, &E, &F, &threads))
    return NULL;
  Py_BEGIN_ALLOW_THREADS;
  behind_attention(AT(x), AT(attended), AT(output), AT(norm), (float)eps, AT(gate_up), AT(down), R, D, E, F, AT(hidden),
                   AT(normed), AT(inside), AT(out), threads);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

static PyObject *py_project(PyObject *self, PyObject *arguments) {
  Address x, weight, out;
  int R, D, E, threads;
  if (!PyArg_ParseTuple(arguments, "KKKiiii", &x, &weight, &out, &R, &D, &E, &threads)) return NULL;
  Py_BEGIN_ALLOW_THREADS;
  project(AT(x), AT(weight), R, D, E, (float *)(uintptr_t)out, threads);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

static PyObject *py_absorb(PyObject *self, PyObject *arguments) {
  Address layers, taps, positions, ends, slots, cosine, sine, held, scratch;
  double eps;
  Absorbed work;
  int threads;
  if (!PyArg_ParseTuple(arguments, "KKKKKKKKKdiiiiiiiiii", &layers, &taps, &positions, &ends, &slots, &cosine, &sine,
                        &held, &scratch, &eps, &work.R, &work.N, &work.D, &work.H, &work.G, &work.K, &work.S,
                        &work.window, &work.sink, &threads))
    return NULL;
  work.layers = (const DraftLayer *)(uintptr_t)layers, work.taps = AT(taps), work.positions = INTEGERS(positions);
  work.ends = INTEGERS(ends), work.slots = INTEGERS(slots), work.cosine = AT(cosine), work.sine = AT(sine);
  work.held = (int64_t *)(uintptr_t)held, work.scratch = AT(scratch), work.eps = (float)eps;
  Py_BEGIN_ALLOW_THREADS;
  absorb(&work, threads);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

static PyObject *py_draft_pass(PyObject *self, PyObject *arguments) {
  Address layers, embedding, norm, unembedding, feedback, positions, slots, bases, cosine, sine, own, scratch, logits;
  Address tokens;
  double eps;
  DraftRound round;
  int pass, threads;
  if (!PyArg_ParseTuple(arguments, "(KKKKKKKKKKKKKdiiiiiiiiiiiii)iKi", &layers, &embedding, &norm, &unembedding,
                        &feedback, &positions, &slots, &bases, &cosine, &sine, &own, &scratch, &logits, &eps, &round.B,
                        &round.k, &round.N, &round.D, &round.H, &round.G, &round.K, &round.F, &round.V, &round.S,
                        &round.window, &round.sink, &round.attends_self, &pass, &tokens, &threads))
    return NULL;
  round.layers = (const DraftLayer *)(uintptr_t)layers, round.feedback = (const float *)(uintptr_t)feedback;
  round.embedding = AT(embedding), round.norm = AT(norm), round.unembedding = AT(unembedding);
  round.positions = INTEGERS(positions), round.slots = INTEGERS(slots), round.bases = INTEGERS(bases);
  round.cosine = AT(cosine), round.sine = AT(sine), round.own = AT(own), round.scratch = AT(scratch);
  round.logits = (float *)(uintptr_t)logits, round.eps = (float)eps;
  Py_BEGIN_ALLOW_THREADS;
  draft_pass(&round, pass, INTEGERS(tokens), threads);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

static PyObject *py_draw(PyObject *self, PyObject *arguments) {
  Address logits, temperatures, uniforms, tokens, q;
  long long q_row;
  int B, V, threads;
  if (!PyArg_ParseTuple(arguments, "KKKKKLiii", &logits, &temperatures, &uniforms, &tokens, &q, &q_row, &B, &V,
                        &threads))
    return NULL;
  Py_BEGIN_ALLOW_THREADS;
  draw((float *)(uintptr_t)logits, (const float *)(uintptr_t)temperatures, (const double *)(uintptr_t)uniforms, B, V,
       (int64_t *)(uintptr_t)tokens, AT(q), q_row, threads);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

static PyObject *py_widen(PyObject *self, PyObject *arguments) {
  Address rows, wide, sums, leasts;
  int B, K, V, threads;
  if (!PyArg_ParseTuple(arguments, "KKKKiiii", &rows, &wide, &sums, &leasts, &B, &K, &V, &threads)) return NULL;
  Py_BEGIN_ALLOW_THREADS;
  widen(INTEGERS(rows), B, K, V, (float *)(uintptr_t)wide, (float *)(uintptr_t)sums, (float *)(uintptr_t)leasts,
        threads);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}
#else
static int available(void) { return 0; }

static PyObject *none(PyObject *self, PyObject *arguments) {
  PyErr_SetString(PyExc_NotImplementedError, "this processor has no tiles");
  return NULL;
}
#define py_attend none
#define py_project_normed none
#define py_behind_attention none
#define py_project none
#define py_absorb none
#define py_draft_pass none
#define py_draw none
#define py_widen none
#endif

static PyObject *py_available(PyObject *self, PyObject *none) { return PyBool_FromLong(available()); }

static PyMethodDef METHODS[] = {
    {"attend", py_attend, METH_VARARGS, "Attention by tiles: see spire.model.tile_attention."},
    {"project_normed", py_project_normed, METH_VARARGS, "A layer up to its attention: see spire.model.tile_layer."},
    {"behind_attention", py_behind_attention, METH_VARARGS, "A layer behind it: see spire.model.tile_layer."},
    {"project", py_project, METH_VARARGS, "One product: see spire.model.tile_layer."},
    {"absorb", py_absorb, METH_VARARGS, "What a SPIRe draft remembers of its target: see spire.model.tile_draft."},
    {"draft_pass", py_draft_pass, METH_VARARGS, "A pass of a SPIRe draft: see spire.model.tile_draft."},
    {"draw", py_draw, METH_VARARGS, "Tokens and what they were drawn from: see spire.model.tile_draft."},
    {"widen", py_widen, METH_VARARGS, "bfloat16 to fp32 with sums: see spire.model.tiles."},
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

/* The kernels as a Python module. Tensors are passed by address: see `compiled.pyi`. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels.h"

#ifdef HAVE_KERNELS
#include <cpuid.h>

extern const Kernels tiles, avx512_bf16, avx512, avx2;
static const Kernels *const KERNELS[] = {&tiles, &avx512_bf16, &avx512, &avx2};
#define COUNT 4

int processor(void) {
  unsigned a, b, c, d, b7, d7, saved, high;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1u << 27) || !(c & 1u << 12)) return 0; /* OSXSAVE, FMA */
  __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if ((saved & 6) != 6 || !__get_cpuid_count(7, 0, &a, &b7, &c, &d7)) return 0;
  int has = b7 & 1u << 5 ? HAS_AVX2 : 0;
  const unsigned wide = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31, amx = 1u << 22 | 1u << 24; /* F DQ BW VL, BF16 TILE */
  if ((saved & 0xe6) != 0xe6 || (b7 & wide) != wide) return has;
  has |= HAS_AVX512;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & 1u << 5)) return has;
  return has | HAS_BF16 | ((d7 & amx) == amx ? HAS_TILES : 0);
}
#else
#define COUNT 0
static const Kernels *const KERNELS[1];
#endif

/* 1 for the kernels that this processor can run, once `available` was called. */
static int runs[COUNT + 1];

typedef unsigned long long Address;
#define AT(address) ((void *)(uintptr_t)(address))

/* Return the kernels that the first argument selects, and parse the other arguments by `format`. */
static const Kernels *parse(PyObject *arguments, const char *format, ...) {
  va_list others;
  PyObject *rest = PyTuple_GetSlice(arguments, 1, PyTuple_GET_SIZE(arguments));
  if (!rest) return NULL;
  va_start(others, format);
  int parsed = PyArg_VaParse(rest, format, others);
  va_end(others);
  Py_DECREF(rest);
  if (!parsed) return NULL;
  long index = PyTuple_GET_SIZE(arguments) ? PyLong_AsLong(PyTuple_GET_ITEM(arguments, 0)) : -1;
  if (PyErr_Occurred()) return NULL;
  if (index < 0 || index >= COUNT || !runs[index]) {
    PyErr_Format(PyExc_NotImplementedError, "no kernels %ld on this processor, or nobody has asked for them", index);
    return NULL;
  }
  return KERNELS[index];
}

#define COMPUTE(call)      \
  Py_BEGIN_ALLOW_THREADS;  \
  keep_apart(threads);     \
  call;                    \
  Py_END_ALLOW_THREADS;    \
  Py_RETURN_NONE

/* Return 1 if these kernels support so many queries of a key and this width; otherwise set a Python error. */
static int attends(const Kernels *kernels, int64_t queries, int K) {
  const int few = !kernels->most_queries || queries <= kernels->most_queries;
  if (few && K % kernels->head_multiple == 0 && K <= MOST_WIDTH) return 1;
  PyErr_SetString(PyExc_ValueError, "more queries or another width than these kernels are made for");
  return 0;
}

static PyObject *py_attend(PyObject *self, PyObject *arguments) {
  Address queries, new_keys, new_values, keys, values, found, slots, bases;
  Attention work;
  Heads *q = &work.queries, *k = &work.new_keys, *v = &work.new_values;
  int threads;
  const Kernels *kernels = parse(arguments, "KLLLKLLLKLLLKKKKKiiiiiiLLi", &queries, &q->row, &q->head, &q->position,
                                 &new_keys, &k->row, &k->head, &k->position, &new_values, &v->row, &v->head,
                                 &v->position, &keys, &values, &found, &slots, &bases, &work.B, &work.T, &work.H,
                                 &work.G, &work.K, &work.columns, &work.slot_stride, &work.head_stride, &threads);
  if (!kernels) return NULL;
  if (!attends(kernels, work.H / work.G * work.T, work.K)) return NULL;
  q->first = AT(queries), k->first = AT(new_keys), v->first = AT(new_values);
  work.keys = AT(keys), work.values = AT(values), work.found = AT(found), work.slots = AT(slots), work.bases = AT(bases);
  COMPUTE(kernels->attend(&work, threads));
}

/* The address of a weight's values, that of its scales or 0, and 1 for bfloat16 in the place of floats. */
#define WEIGHT(values, scales, narrow) ((Weight){AT(values), AT(scales), narrow})

static PyObject *py_before_attention(PyObject *self, PyObject *arguments) {
  Address x, norm, weight, scales, cosine, sine, normed, out;
  double eps;
  Before work;
  int threads, narrow;
  const Kernels *kernels = parse(arguments, "KKKKiKKKKdiiiiii", &x, &norm, &weight, &scales, &narrow, &cosine, &sine, &normed,
                                 &out, &eps, &work.R, &work.D, &work.E, &work.heads, &work.K, &threads);
  if (!kernels) return NULL;
  work.x = AT(x), work.norm = AT(norm), work.weight = WEIGHT(weight, scales, narrow), work.cosine = AT(cosine);
  work.sine = AT(sine), work.normed = AT(normed), work.out = AT(out), work.eps = (float)eps;
  COMPUTE(kernels->before_attention(&work, threads));
}

static PyObject *py_behind_attention(PyObject *self, PyObject *arguments) {
  Address x, attended, norm, output, of_output, gate_up, of_gate_up, down, of_down, hidden, normed, inside, out;
  double eps;
  Behind work;
  int threads, output_narrow, gate_up_narrow, down_narrow;
  const Kernels *kernels =
      parse(arguments, "KKKKKiKKiKKiKKKKdiiiii", &x, &attended, &norm, &output, &of_output, &output_narrow, &gate_up,
            &of_gate_up, &gate_up_narrow, &down, &of_down, &down_narrow, &hidden, &normed, &inside, &out, &eps, &work.R,
            &work.D, &work.A, &work.F, &threads);
  if (!kernels) return NULL;
  work.x = AT(x), work.attended = AT(attended), work.norm = AT(norm), work.output = WEIGHT(output, of_output, output_narrow);
  work.gate_up = WEIGHT(gate_up, of_gate_up, gate_up_narrow), work.down = WEIGHT(down, of_down, down_narrow);
  work.hidden = AT(hidden);
  work.normed = AT(normed), work.inside = AT(inside), work.out = AT(out), work.eps = (float)eps;
  COMPUTE(kernels->behind_attention(&work, threads));
}

static PyObject *py_norm(PyObject *self, PyObject *arguments) {
  Address x, weight, out;
  double eps;
  int R, D, threads;
  const Kernels *kernels = parse(arguments, "KKKdiii", &x, &weight, &out, &eps, &R, &D, &threads);
  if (!kernels) return NULL;
  COMPUTE(kernels->norm(AT(x), AT(weight), (float)eps, R, D, AT(out), threads));
}

static PyObject *py_project(PyObject *self, PyObject *arguments) {
  Address x, values, scales, out;
  int narrow, R, D, E, threads;
  const Kernels *kernels = parse(arguments, "KKKiKiiii", &x, &values, &scales, &narrow, &out, &R, &D, &E, &threads);
  if (!kernels) return NULL;
  const Weight weight = WEIGHT(values, scales, narrow);
  COMPUTE(kernels->project(AT(x), &weight, R, D, E, AT(out), threads));
}

static PyObject *py_absorb(PyObject *self, PyObject *arguments) {
  Address layers, taps, positions, ends, slots, cosine, sine, held, scratch;
  double eps;
  Absorbed work;
  int threads;
  const Kernels *kernels = parse(arguments, "KKKKKKKKKdiiiiiiiiii", &layers, &taps, &positions, &ends, &slots, &cosine,
                                 &sine, &held, &scratch, &eps, &work.R, &work.N, &work.D, &work.H, &work.G, &work.K,
                                 &work.S, &work.window, &work.sink, &threads);
  if (!kernels) return NULL;
  work.layers = AT(layers), work.taps = AT(taps), work.positions = AT(positions), work.ends = AT(ends);
  work.slots = AT(slots), work.cosine = AT(cosine), work.sine = AT(sine), work.held = AT(held);
  work.scratch = AT(scratch), work.eps = (float)eps;
  COMPUTE(kernels->absorb(&work, threads));
}

/* Return 1 if all tokens have an embedding and all positions a rotation; otherwise set a Python error. */
static int known(const Forward *work, const Stretch *s) {
  for (int64_t i = 0; i < s->B * s->T; i++) {
    const int64_t token = work->tokens[s->first + i], position = s->bases[i / s->T] + i % s->T;
    if (token >= 0 && token < work->V && position >= 0 && position < work->P) continue;
    PyErr_Format(PyExc_IndexError, "token %lld at position %lld: there are %d tokens, and rotations of %d positions",
                 (long long)token, (long long)position, work->V, work->P);
    return 0;
  }
  return 1;
}

static PyObject *py_forward(PyObject *self, PyObject *arguments) {
  Address layers, stretches, tapped, tokens, embedding, norm, cosine, sine, scratch, taps, out;
  double eps;
  Forward work;
  int threads;
  const Kernels *kernels =
      parse(arguments, "KKKKKKKKKKKdiiiiiiiiiiiiLLi", &layers, &stretches, &tapped, &tokens, &embedding, &norm, &cosine,
            &sine, &scratch, &taps, &out, &eps, &work.count, &work.tap_count, &work.R, &work.N, &work.D, &work.H,
            &work.G, &work.K, &work.F, &work.V, &work.P, &work.columns, &work.slot_stride, &work.head_stride, &threads);
  if (!kernels) return NULL;
  work.layers = AT(layers), work.stretches = AT(stretches), work.tapped = AT(tapped), work.tokens = AT(tokens);
  work.embedding = AT(embedding), work.norm = AT(norm), work.cosine = AT(cosine), work.sine = AT(sine);
  work.scratch = AT(scratch), work.taps = AT(taps), work.out = AT(out), work.eps = (float)eps;
  for (int s = 0; s < work.count; s++)
    if (!attends(kernels, work.H / work.G * work.stretches[s].T, work.K) || !known(&work, &work.stretches[s]))
      return NULL;
  COMPUTE(kernels->forward(&work, threads));
}

/* Parse a tuple as a DraftRound. */
static int parse_round(PyObject *given, DraftRound *round) {
  Address layers, embedding, norm, unembedding, scales, feedback, positions, slots, bases, cosine, sine, own, scratch;
  Address logits, vocabulary;
  double eps;
  int narrow;
  if (!PyArg_ParseTuple(given, "KKKKKiKKKKKKKKKKdiiiiiiiiiiiii", &layers, &embedding, &norm, &unembedding, &scales,
                        &narrow, &feedback, &positions, &slots, &bases, &cosine, &sine, &own, &scratch, &logits, &vocabulary, &eps,
                        &round->B, &round->k, &round->N, &round->D, &round->H, &round->G, &round->K, &round->F,
                        &round->V, &round->S, &round->window, &round->sink, &round->attends_self))
    return 0;
  round->layers = AT(layers), round->feedback = AT(feedback);
  round->embedding = AT(embedding), round->norm = AT(norm), round->unembedding = WEIGHT(unembedding, scales, narrow);
  round->positions = AT(positions), round->slots = AT(slots), round->bases = AT(bases);
  round->cosine = AT(cosine), round->sine = AT(sine), round->own = AT(own), round->scratch = AT(scratch);
  round->logits = AT(logits), round->vocabulary = AT(vocabulary), round->eps = (float)eps;
  return 1;
}

/* Parse a tuple as a Stop. */
static int parse_stop(PyObject *given, Stop *stop) {
  Address enter, told, enter_bias, residual, residual_bias, leave, least, scratch, stands, counts;
  if (!PyArg_ParseTuple(given, "KKKKKKKKKKii", &enter, &told, &enter_bias, &residual, &residual_bias, &leave, &least,
                        &scratch, &stands, &counts, &stop->depth, &stop->W))
    return 0;
  stop->enter = AT(enter), stop->enter_told = AT(told), stop->enter_bias = AT(enter_bias);
  stop->residual = AT(residual), stop->residual_bias = AT(residual_bias), stop->leave = AT(leave);
  stop->least = AT(least), stop->scratch = AT(scratch);
  stop->stands = AT(stands), stop->counts = AT(counts);
  return 1;
}

/* Parse a tuple as a Sampling. */
static int parse_sampling(PyObject *given, Sampling *sampling) {
  Address temperatures, top_k, top_p, min_p, rules, seeds, choices, bases;
  if (!PyArg_ParseTuple(given, "KKKKKKKKi", &temperatures, &top_k, &top_p, &min_p, &rules, &seeds, &choices, &bases,
                        &sampling->ids))
    return 0;
  sampling->temperatures = AT(temperatures), sampling->top_k = AT(top_k), sampling->top_p = AT(top_p);
  sampling->min_p = AT(min_p), sampling->rules = AT(rules), sampling->seeds = AT(seeds);
  sampling->choices = AT(choices), sampling->bases = AT(bases);
  return 1;
}

static PyObject *py_draft_pass(PyObject *self, PyObject *arguments) {
  PyObject *given;
  Address tokens;
  DraftRound round;
  int pass, threads;
  const Kernels *kernels = parse(arguments, "O!iKi", &PyTuple_Type, &given, &pass, &tokens, &threads);
  if (!kernels || !parse_round(given, &round)) return NULL;
  COMPUTE(kernels->draft_pass(&round, pass, AT(tokens), threads));
}

static PyObject *py_draft_round(PyObject *self, PyObject *arguments) {
  PyObject *given, *sampling, *head;
  Address newest, uniforms, tokens, q;
  DraftRound round;
  Stop stop;
  int threads;
  const Kernels *kernels = parse(arguments, "O!KO!KKKO!i", &PyTuple_Type, &given, &newest, &PyTuple_Type, &sampling,
                                 &uniforms, &tokens, &q, &PyTuple_Type, &head, &threads);
  if (!kernels || !parse_round(given, &round)) return NULL;
  const int stops = PyTuple_Size(head) > 0;
  if (stops && !parse_stop(head, &stop)) return NULL;
  Draw drawn = {.logits = round.logits, .uniforms = AT(uniforms), .tokens = AT(tokens),
                .vocabulary = round.vocabulary, .q = AT(q), .uniforms_row = round.k,
                .q_row = (long long)round.k * round.V, .B = round.B, .V = round.V};
  if (!parse_sampling(sampling, &drawn.sampling)) return NULL;
  COMPUTE(kernels->draft_round(&round, AT(newest), &drawn, stops ? &stop : NULL, threads));
}

static PyObject *py_draw(PyObject *self, PyObject *arguments) {
  PyObject *sampling;
  Address logits, uniforms, tokens, q;
  Draw work = {.vocabulary = NULL, .rows = NULL, .uniforms_row = 1};
  int threads;
  const Kernels *kernels = parse(arguments, "KO!iKKKLiii", &logits, &PyTuple_Type, &sampling, &work.step, &uniforms,
                                 &tokens, &q, &work.q_row, &work.B, &work.V, &threads);
  if (!kernels || !parse_sampling(sampling, &work.sampling)) return NULL;
  work.logits = AT(logits), work.uniforms = AT(uniforms), work.tokens = AT(tokens), work.q = AT(q);
  COMPUTE(kernels->draw(&work, threads));
}

static PyObject *py_judge(PyObject *self, PyObject *arguments) {
  PyObject *sampling;
  Address logits, drafted, counts, vocabulary, q, q_sums, accepted, tokens, finite;
  Verdict work;
  int threads;
  const Kernels *kernels = parse(arguments, "KO!KKKKKKKKiiiiii", &logits, &PyTuple_Type, &sampling, &drafted, &counts,
                                 &vocabulary, &q, &q_sums, &accepted, &tokens, &finite, &work.B, &work.T, &work.V,
                                 &work.W, &work.padded, &threads);
  if (!kernels || !parse_sampling(sampling, &work.sampling)) return NULL;
  work.logits = AT(logits), work.drafted = AT(drafted), work.counts = AT(counts);
  work.q = AT(q), work.q_sums = AT(q_sums);
  work.accepted = AT(accepted), work.tokens = AT(tokens), work.finite = AT(finite);
  work.vocabulary = AT(vocabulary);
  COMPUTE(kernels->judge(&work, threads));
}

static PyObject *py_collect(PyObject *self, PyObject *arguments) {
  Address rows, counts, together, sums, leasts;
  Collection work;
  int threads;
  const Kernels *kernels =
      parse(arguments, "KKKKKiiii", &rows, &counts, &together, &sums, &leasts, &work.B, &work.K, &work.V, &threads);
  if (!kernels) return NULL;
  work.rows = AT(rows), work.counts = AT(counts), work.together = AT(together);
  work.sums = AT(sums), work.leasts = AT(leasts);
  COMPUTE(kernels->collect(&work, threads));
}

/* Runs on any processor. */
static PyObject *py_uniforms(PyObject *self, PyObject *arguments) {
  Address seeds, choices, salted, bases, found;
  Uniforms work;
  if (!PyArg_ParseTuple(arguments, "KKKKKiiI", &seeds, &choices, &salted, &bases, &found, &work.B, &work.T,
                        &work.purpose))
    return NULL;
  work.seeds = AT(seeds), work.choices = AT(choices), work.salted = AT(salted), work.bases = AT(bases);
  work.found = AT(found);
  uniforms(&work);
  Py_RETURN_NONE;
}

/* List the kernels that this processor can run: index, name, 1 for bfloat16, block, head_multiple, most_queries. */
static PyObject *py_available(PyObject *self, PyObject *none) {
  PyObject *found = PyList_New(0);
  for (int i = 0; found && i < COUNT; i++) {
    const Kernels *kernels = KERNELS[i];
    if (!(runs[i] = kernels->available())) continue;
    PyObject *one =
        Py_BuildValue("(isNiii)", i, kernels->name, PyBool_FromLong(kernels->narrow), kernels->block,
                      kernels->head_multiple, kernels->most_queries);
    if (!one || PyList_Append(found, one)) Py_CLEAR(found);
    Py_XDECREF(one);
  }
  return found;
}

static PyMethodDef METHODS[] = {
    {"attend", py_attend, METH_VARARGS, "Attention: see spire.model.attention.fused_attention."},
    {"before_attention", py_before_attention, METH_VARARGS, "A layer up to its attention: see spire.model.backends.cpu.fused_layer."},
    {"behind_attention", py_behind_attention, METH_VARARGS, "A layer behind it: see spire.model.backends.cpu.fused_layer."},
    {"norm", py_norm, METH_VARARGS, "Rows normalised: see spire.model.backends.cpu.fused_layer."},
    {"project", py_project, METH_VARARGS, "One product: see spire.model.backends.cpu.fused_layer."},
    {"absorb", py_absorb, METH_VARARGS, "What a SPIRe draft remembers of its target: see spire.model.backends.cpu.fused_draft."},
    {"forward", py_forward, METH_VARARGS, "A target's forward: see spire.model.backends.cpu.fused_target."},
    {"draft_pass", py_draft_pass, METH_VARARGS, "A pass of a SPIRe draft: see spire.model.backends.cpu.fused_draft."},
    {"draft_round", py_draft_round, METH_VARARGS, "All of them, and their draws: see spire.model.backends.cpu.fused_draft."},
    {"draw", py_draw, METH_VARARGS, "Tokens and what they were drawn from: see spire.model.backends.cpu.fused_sampling."},
    {"judge", py_judge, METH_VARARGS, "Which draft tokens stand: see spire.model.backends.cpu.fused_verification."},
    {"collect", py_collect, METH_VARARGS, "Rows in one place, with their sums: see spire.kernels."},
    {"uniforms", py_uniforms, METH_VARARGS, "Numbers in [0, 1): see spire.decoding.randomness."},
    {"available", py_available, METH_NOARGS, "Those that this processor can run."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, .m_name = "compiled", .m_size = 0, .m_methods = METHODS};

PyMODINIT_FUNC PyInit_compiled(void) {
  PyObject *module = PyModule_Create(&MODULE);
  if (module && PyModule_AddIntConstant(module, "MOST_WIDTH", MOST_WIDTH)) Py_CLEAR(module);
  return module;
}

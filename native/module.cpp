// The compiled kernels of whence, for Python: `whence._compiled`.
//
// The loops are compiled once for each instruction set that is worth it, and the best that this
// processor has is taken when the module is imported. Nothing here depends on which: all of them
// give the same bits. Arguments that are addresses must stay valid for the call, and be aligned to
// the size of an element; nothing is written but result rows.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cmath>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

#include "layout.hpp"

namespace whence {

// Memory for a call, on a cache line. place: null where there is none.
template <class T>
class Memory {
public:
    explicit Memory(i64 count) : block(std::malloc(static_cast<std::size_t>(count) * sizeof(T) + 64)) {
        auto address = reinterpret_cast<std::uintptr_t>(block);
        place = block ? reinterpret_cast<T*>((address + 63) / 64 * 64) : nullptr;
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() { std::free(block); }

private:
    void* block;

public:
    T* place;
};

#if defined(__x86_64__) && defined(__GNUC__)
#define WHENCE_DISPATCH
#define WHENCE_VECTOR 64
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,bmi2,prefer-vector-width=512")
#endif
namespace avx512 {
#include "kernels.inc"
static const Kernels kernels = {"AVX-512", compare, describe, describe_many, join_units};
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef WHENCE_VECTOR
#define WHENCE_VECTOR 32
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,bmi2")
#endif
namespace avx2 {
#include "kernels.inc"
static const Kernels kernels = {"AVX2", compare, describe, describe_many, join_units};
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef WHENCE_VECTOR
#define WHENCE_VECTOR 16
#endif
namespace baseline {
#include "kernels.inc"
static const Kernels kernels = {"baseline", compare, describe, describe_many, join_units};
}  // namespace baseline

// What this processor has, the best first.
static const Kernels* usable[4];

static void find_usable() {
    int count = 0;
#ifdef WHENCE_DISPATCH
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        usable[count++] = &avx512::kernels;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) usable[count++] = &avx2::kernels;
#endif
    usable[count] = &baseline::kernels;
}

static const Kernels* chosen;

// Below this many bytes a call is over before another thread could have used the time.
constexpr i64 BYTES_WITH_GIL = 1 << 14;

class WithoutGil {
public:
    explicit WithoutGil(i64 nbytes) : state(nbytes < BYTES_WITH_GIL ? nullptr : PyEval_SaveThread()) {}
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;
    ~WithoutGil() {
        if (state) PyEval_RestoreThread(state);
    }

private:
    PyThreadState* state;
};

static PyObject* wrong_number(Py_ssize_t size, Py_ssize_t count) {
    return PyErr_Format(PyExc_TypeError, "%zd arguments are needed, not %zd", count, size);
}

// Integers of a call. False, with an exception set, where there are not `count`.
static bool integers(PyObject* const* arguments, Py_ssize_t size, Py_ssize_t count, i64* values) {
    if (size != count) return wrong_number(size, count) != nullptr;
    for (Py_ssize_t k = 0; k < count; k++) {
        values[k] = PyLong_AsLongLong(arguments[k]);
        if (values[k] == -1 && PyErr_Occurred()) return false;
    }
    return true;
}

static bool is_code(i64 code) {
    return code >= 0 && code <= 13;
}

static PyObject* wrong_code(i64 code) {
    return PyErr_Format(PyExc_ValueError, "no kernel takes the code %lld", static_cast<long long>(code));
}

static PyObject* py_compare(PyObject*, PyObject* const* arguments, Py_ssize_t size) {
    i64 a[7];
    if (size != 9) return wrong_number(size, 9);
    double rtol = PyFloat_AsDouble(arguments[3]), atol = PyFloat_AsDouble(arguments[4]);
    if (PyErr_Occurred()) return nullptr;
    if (!integers(arguments, 3, 3, a) || !integers(arguments + 5, 4, 4, a + 3)) return nullptr;
    const Pair* pairs = at<Pair>(a[0]);
    i64 nbytes = 0;
    for (i64 k = 0; k < a[1]; k++) {
        if (!is_code(pairs[k].r_code) && pairs[k].path != same) return wrong_code(pairs[k].r_code);
        if (!is_code(pairs[k].t_code) && pairs[k].path != same) return wrong_code(pairs[k].t_code);
        nbytes += pairs[k].n;
    }
    Tolerance tolerance = {rtol, atol, at<double>(a[3])};
    bool done;
    {
        WithoutGil free(nbytes);
        done = chosen->compare(pairs, a[1], static_cast<Tier>(a[2]), tolerance, writable<Floats>(a[4]),
                               writable<Ints>(a[5]), writable<i64>(a[6]));
    }
    if (!done) return PyErr_NoMemory();
    Py_INCREF(Py_None);
    return Py_None;
}

static PyObject* py_describe(PyObject*, PyObject* const* arguments, Py_ssize_t size) {
    i64 a[4];
    if (!integers(arguments, size, 4, a)) return nullptr;
    if (!is_code(a[2])) return wrong_code(a[2]);
    Content content = {a[0], a[1] * itemsize(a[2]), a[2]};
    Counts counts;
    Figures figures;
    {
        WithoutGil free(content.nbytes);
        chosen->describe(content, a[3] != 0, &counts, &figures);
    }
    PyObject* row = PyTuple_New(13);
    if (!row) return nullptr;
    const u64 whole[] = {counts.finite, counts.nan, counts.inf, counts.zero};
    const double real[] = {figures.min, figures.max, figures.sum, figures.squares, figures.deviations,
                           figures.absolute, figures.cube, figures.fourth};
    for (Py_ssize_t k = 0; k < 13; k++) {
        PyObject* value = k < 4    ? PyLong_FromUnsignedLongLong(whole[k])
                          : k < 12 ? PyFloat_FromDouble(real[k - 4])
                                   : PyLong_FromUnsignedLongLong(counts.checksum);
        if (!value) {
            Py_DECREF(row);
            return nullptr;
        }
        PyTuple_SetItem(row, k, value);
    }
    return row;
}

// `describe_many` and `join_units` take the same: addresses of contents, of the words of the secret,
// and of result rows.
static PyObject* many(PyObject* const* arguments, Py_ssize_t size, bool in_units) {
    i64 a[5];
    if (!integers(arguments, size, 5, a)) return nullptr;
    const Content* contents = at<Content>(a[0]);
    i64 nbytes = 0;
    for (i64 k = 0; k < a[1]; k++) {
        if (contents[k].code != -1 && !is_code(contents[k].code)) return wrong_code(contents[k].code);
        nbytes += contents[k].nbytes;
    }
    auto kernel = in_units ? chosen->join_units : chosen->describe_many;
    {
        WithoutGil free(nbytes);
        kernel(contents, a[1], at<u64>(a[2]), writable<Counts>(a[3]), writable<Figures>(a[4]));
    }
    Py_INCREF(Py_None);
    return Py_None;
}

static PyObject* py_describe_many(PyObject*, PyObject* const* arguments, Py_ssize_t size) {
    return many(arguments, size, false);
}

static PyObject* py_join_units(PyObject*, PyObject* const* arguments, Py_ssize_t size) {
    return many(arguments, size, true);
}

static PyObject* names_of_usable(PyObject*, PyObject*) {
    PyObject* names = PyList_New(0);
    for (int k = 0; names && k < 4 && usable[k]; k++) {
        PyObject* name = PyUnicode_FromString(usable[k]->name);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject* choose(PyObject*, PyObject* wanted) {
    for (int k = 0; k < 4 && usable[k]; k++) {
        PyObject* name = PyUnicode_FromString(usable[k]->name);
        if (!name) return nullptr;
        bool same_name = PyUnicode_Compare(name, wanted) == 0;
        Py_DECREF(name);
        if (!same_name) continue;
        chosen = usable[k];
        Py_INCREF(Py_None);
        return Py_None;
    }
    if (PyErr_Occurred()) return nullptr;
    return PyErr_Format(PyExc_ValueError, "this processor has no %R", wanted);
}

#define WHENCE_NAME(name) #name " "
// Python compares it with its own: an extension of another version of the source is not used.
static const char columns[] = WHENCE_PAIR(WHENCE_NAME) "; " WHENCE_FLOATS(WHENCE_NAME) "; " WHENCE_INTS(WHENCE_NAME);

template <class Function>
static PyCFunction function(Function f) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)(void)>(f));
}

static PyMethodDef methods[] = {
    {"compare", function(py_compare), METH_FASTCALL,
     "compare(pairs, count, tier, rtol, atol, thresholds, floats, ints, histograms)\n\n"
     "Compare `count` pairs: addresses of rows of `PAIR`, of the eight thresholds, and of result rows\n"
     "already set to the empty row. tier: 1 core, 2 full. Without the GIL."},
    {"describe", function(py_describe), METH_FASTCALL,
     "describe(address, n, code, full)\n\n"
     "Figures of n elements: (finite, nan, inf, zero, min, max, sum, sum of squares, squared deviations,\n"
     "|x|, x^3, x^4, checksum). full = 0: only the checksum is taken."},
    {"describe_many", function(py_describe_many), METH_FASTCALL,
     "describe_many(contents, count, words, counts, figures)\n\n"
     "Digests and figures of many contents: addresses of rows of (address, bytes, code or -1), of\n"
     "`SECRET_WORDS`, and of rows of `COUNTS` and `FIGURES` to write. No digest below DIGEST_BYTES."},
    {"join_units", function(py_join_units), METH_FASTCALL,
     "join_units(contents, count, words, counts, figures)\n\n"
     "`describe_many`, of what a device found out of each unit of bytes."},
    {"instruction_sets", names_of_usable, METH_NOARGS,
     "instruction_sets()\n\nThose that kernels are compiled for and this processor has, the best first."},
    {"choose", choose, METH_O, "choose(instruction_set)\n\nTake the kernels of this one from now on."},
    {nullptr, nullptr, 0, nullptr},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "whence._compiled", "Compiled kernels; `whence._kernels` says what they take.",
    -1, methods, nullptr, nullptr, nullptr, nullptr,
};

}  // namespace whence

PyMODINIT_FUNC PyInit__compiled(void) {
    using namespace whence;
    find_usable();
    chosen = usable[0];
    PyObject* module = PyModule_Create(&definition);
    if (module && PyModule_AddStringConstant(module, "COLUMNS", columns) < 0) Py_CLEAR(module);
    return module;
}

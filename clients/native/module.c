/* The extension module weighbridge._memory._native: strided_copy.h, nonfinite.h and word_sums.h for Python. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdlib.h>

#include "strided_copy.h"
#include "word_sums.h"

#define WORDS_PER_ENCODING 3
#define WORDS_PER_ROWS 6
_Static_assert(sizeof(Encoding) == WORDS_PER_ENCODING * sizeof(int64_t), "an encoding is not three words");

/* Whole int64 words, or -1 with ValueError set. */
static int64_t words_of(const Py_buffer *buffer, int64_t group) {
    int64_t size = (int64_t)sizeof(int64_t);
    if (buffer->len % (size * group) || (uintptr_t)buffer->buf % sizeof(int64_t)) {
        PyErr_SetString(PyExc_ValueError, "a buffer does not consist of whole, aligned int64 words");
        return -1;
    }
    return buffer->len / size;
}

static Region region(const int64_t *pair) { return (Region){(uint8_t *)(uintptr_t)pair[0], pair[1]}; }

/* The encodings of so many parts, NULL if none is counted; -1 with ValueError set if `found` has no room for as many counts. */
static int encodings_of(const Py_buffer *words, const Py_buffer *found, Py_ssize_t parts, const Encoding **encodings) {
    int64_t given = words_of(words, WORDS_PER_ENCODING), room = words_of(found, 1);
    *encodings = NULL;
    if (given < 0 || room < 0 || given == 0) {
        return given < 0 || room < 0 ? -1 : 0;
    }
    if (given != WORDS_PER_ENCODING * (int64_t)parts || room != (int64_t)parts) {
        PyErr_SetString(PyExc_ValueError, "there is not one encoding, and room for one count, for each part");
        return -1;
    }
    *encodings = words->buf;
    for (Py_ssize_t i = 0; i < parts; i++) {
        if ((*encodings)[i].itemsize && !is_encoding(&(*encodings)[i])) {
            PyErr_SetString(PyExc_ValueError, "an encoding is not one that can be counted");
            return -1;
        }
    }
    return 0;
}

/* The copies of all plans, checked; *found is how many. NULL with an error set. */
static Copy *parse(
    const Py_buffer *plans, Py_ssize_t plan_count, const Py_buffer *shards, const Py_buffer *memories, int into_memory,
    const Encoding *encodings, int64_t *nonfinite, int narrowed, int64_t *found) {
    const char *error = NULL;
    int64_t shard_words = words_of(shards, 2), memory_words = words_of(memories, 2), total = 0;
    if (shard_words < 0 || memory_words < 0) {
        return NULL;
    }
    if (shard_words != 2 * (int64_t)plan_count) {
        PyErr_SetString(PyExc_ValueError, "there is not one shard for each plan");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < plan_count; i++) {
        int64_t words = words_of(&plans[i], 1);
        int64_t count = words < 0 ? -1 : count_copies(plans[i].buf, words, &error);
        if (count < 0) {
            goto refused;
        }
        total += count;
    }
    Region *regions = PyMem_Malloc((size_t)(memory_words / 2 + 1) * sizeof(Region));
    Copy *copies = PyMem_Malloc((size_t)(total + 1) * sizeof(Copy));
    if (regions == NULL || copies == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    for (int64_t i = 0; i < memory_words / 2; i++) {
        regions[i] = region((const int64_t *)memories->buf + 2 * i);
    }
    *found = 0;
    for (Py_ssize_t i = 0; i < plan_count && *found >= 0; i++) {
        int counted = encodings != NULL && encodings[i].itemsize != 0;
        Work work = {counted ? &encodings[i] : NULL, counted ? &nonfinite[i] : NULL, narrowed};
        if (narrowed && (!counted || element_bytes(&encodings[i]) != 2 || !into_memory)) {
            error = "only elements that are counted, of 2 bytes, are narrowed, and only into memory";
            goto failed;
        }
        *found = parse_copies(
            plans[i].buf, plans[i].len / (Py_ssize_t)sizeof(int64_t), region((const int64_t *)shards->buf + 2 * i), regions,
            memory_words / 2, into_memory, work, copies, *found, &error);
    }
    if (*found >= 0) {
        PyMem_Free(regions);
        return copies;
    }
failed:
    PyMem_Free(regions);
    PyMem_Free(copies);
refused:
    if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_ValueError, error);
    }
    return NULL;
}

PyDoc_STRVAR(
    copy_doc,
    "copy(plans, shards, memories, into_memory, threads, encodings, found, narrowed)\n--\n\n"
    "Carry out packed plans, one for each shard, without the interpreter's lock; all bounds are checked before.\n\n"
    "Used by weighbridge._memory.native_copies, which says what a plan is. Shards and memories are pairs of address and bytes.\n"
    "Unless empty, encodings has itemsize, mask and width for each shard, an itemsize of 0 if it is not counted; its number of\n"
    "non-finite elements is added to found. If narrowed, shards are of float32 and memories of bfloat16; a shard of which found grows\n"
    "was not narrowed right.\n"
    "Raises ValueError if a plan is malformed or goes beyond a region, or a copy's two sides overlap.");

static PyObject *copy(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *sequence, *result = NULL;
    Py_buffer shards, memories, encodings, nonfinite;
    int into_memory, threads, narrowed;
    if (!PyArg_ParseTuple(
            arguments, "Oy*y*piy*w*p:copy", &sequence, &shards, &memories, &into_memory, &threads, &encodings, &nonfinite,
            &narrowed)) {
        return NULL;
    }
    Py_ssize_t held = 0, count = PySequence_Size(sequence);
    Py_buffer *plans = count < 0 ? NULL : PyMem_Calloc((size_t)count + 1, sizeof(Py_buffer));
    if (plans == NULL) {
        if (count >= 0) {
            PyErr_NoMemory();
        }
        goto release;
    }
    for (; held < count; held++) {
        PyObject *plan = PySequence_GetItem(sequence, held);
        if (plan == NULL) {
            goto release;
        }
        int code = PyObject_GetBuffer(plan, &plans[held], PyBUF_SIMPLE);
        Py_DecRef(plan);
        if (code != 0) {
            goto release;
        }
    }
    int64_t found;
    const Encoding *counted;
    if (encodings_of(&encodings, &nonfinite, count, &counted) != 0) {
        goto release;
    }
    Copy *copies = parse(plans, count, &shards, &memories, into_memory, counted, nonfinite.buf, narrowed, &found);
    if (copies != NULL) {
        Py_BEGIN_ALLOW_THREADS
        run_copies(copies, found, threads);
        Py_END_ALLOW_THREADS
        PyMem_Free(copies);
        result = Py_BuildValue("");
    }
release:
    while (held > 0) {
        PyBuffer_Release(&plans[--held]);
    }
    PyMem_Free(plans);
    PyBuffer_Release(&shards);
    PyBuffer_Release(&memories);
    PyBuffer_Release(&encodings);
    PyBuffer_Release(&nonfinite);
    return result;
}

PyDoc_STRVAR(
    count_doc,
    "count(parts, encodings, found, threads)\n--\n\n"
    "Add to found how many elements of each part are non-finite, without the interpreter's lock.\n\n"
    "Parts are pairs of address and bytes; encodings as for copy.");

static PyObject *count(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *result = NULL;
    Py_buffer parts, encodings, found;
    int threads;
    if (!PyArg_ParseTuple(arguments, "y*y*w*i:count", &parts, &encodings, &found, &threads)) {
        return NULL;
    }
    const Encoding *counted;
    int64_t words = words_of(&parts, 2);
    if (words >= 0 && encodings_of(&encodings, &found, (Py_ssize_t)(words / 2), &counted) == 0) {
        int64_t count = counted == NULL ? 0 : words / 2;
        CountedPart *each = PyMem_Malloc((size_t)(count + 1) * sizeof(CountedPart));
        if (each == NULL) {
            PyErr_NoMemory();
        } else {
            for (int64_t i = 0; i < count; i++) {
                Region part = region((const int64_t *)parts.buf + 2 * i);
                each[i] = (CountedPart){part.start, part.nbytes, &counted[i], (int64_t *)found.buf + i};
            }
            Py_BEGIN_ALLOW_THREADS
            count_parts(each, count, threads);
            Py_END_ALLOW_THREADS
            PyMem_Free(each);
            result = Py_BuildValue("");
        }
    }
    PyBuffer_Release(&parts);
    PyBuffer_Release(&encodings);
    PyBuffer_Release(&found);
    return result;
}

PyDoc_STRVAR(
    ask_doc,
    "ask(function, rows, direction, stream)\n--\n\n"
    "Call cudaMemcpy2DAsync, which lies at an address, for each of some rows, without the interpreter's lock, until one call fails.\n\n"
    "Rows are as weighbridge._memory.byte_rows has them. Gives the last call's code.");

typedef int (*Ask)(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width, size_t rows, int direction,
                   void *stream);

static PyObject *ask(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *result = NULL;
    Py_buffer rows;
    unsigned long long function, stream;
    int direction, code = 0;
    if (!PyArg_ParseTuple(arguments, "Ky*iK:ask", &function, &rows, &direction, &stream)) {
        return NULL;
    }
    int64_t words = words_of(&rows, WORDS_PER_ROWS);
    if (words >= 0) {
        Ask copy = (Ask)(uintptr_t)function;
        const uint64_t *end = (const uint64_t *)rows.buf + words;
        Py_BEGIN_ALLOW_THREADS
        for (const uint64_t *row = rows.buf; row < end && code == 0; row += WORDS_PER_ROWS) {
            code = copy((void *)(uintptr_t)row[0], row[1], (const void *)(uintptr_t)row[2], row[3], row[4], row[5], direction,
                        (void *)(uintptr_t)stream);
        }
        Py_END_ALLOW_THREADS
        result = PyLong_FromLong(code);
    }
    PyBuffer_Release(&rows);
    return result;
}

PyDoc_STRVAR(
    add_words_doc,
    "add_words(rows, words, found, threads)\n--\n\n"
    "Add to found the sums of the words of the sources of some rows, modulo 2**64, without the interpreter's lock.\n\n"
    "Rows are as weighbridge._memory.byte_rows has them; words has the bytes of a word for each of them, 1, 2, 4 or 8, and words of more\n"
    "than one byte have a sign. Raises ValueError for another word, or if found has not one word for each.");

static PyObject *add_words(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *result = NULL;
    Py_buffer rows, sizes, found;
    int threads;
    if (!PyArg_ParseTuple(arguments, "y*y*w*i:add_words", &rows, &sizes, &found, &threads)) {
        return NULL;
    }
    int64_t words = words_of(&rows, WORDS_PER_ROWS), given = words_of(&sizes, 1), room = words_of(&found, 1);
    int64_t count = words / WORDS_PER_ROWS;
    SummedRows *each = NULL;
    if (words < 0 || given < 0 || room < 0) {
        goto release;
    }
    each = PyMem_Malloc((size_t)(count + 1) * sizeof(SummedRows));
    if (each == NULL) {
        PyErr_NoMemory();
        goto release;
    }
    int fits = room == count && given == count;
    for (int64_t i = 0; fits && i < count; i++) {
        const int64_t *row = (const int64_t *)rows.buf + WORDS_PER_ROWS * i;
        int64_t word = ((const int64_t *)sizes.buf)[i];
        fits = (word == 1 || word == 2 || word == 4 || word == 8) && row[4] >= 0;
        each[i] = (SummedRows){(const uint8_t *)(uintptr_t)row[2], row[3], row[4], row[5], word, (int64_t *)found.buf + i};
    }
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "there is not room for one sum for each, or words are not of 1, 2, 4 or 8 bytes");
        goto release;
    }
    int done;
    Py_BEGIN_ALLOW_THREADS
    done = sum_rows(each, count, threads);
    Py_END_ALLOW_THREADS
    result = done ? Py_BuildValue("") : PyErr_NoMemory();
release:
    PyMem_Free(each);
    PyBuffer_Release(&rows);
    PyBuffer_Release(&sizes);
    PyBuffer_Release(&found);
    return result;
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, copy_doc},
    {"count", count, METH_VARARGS, count_doc},
    {"ask", ask, METH_VARARGS, ask_doc},
    {"add_words", add_words, METH_VARARGS, add_words_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "Strided copies of whole plans, counts of non-finite elements, sums of words, and calls of copy engines, in C.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }

/* atoll.ltp._gf: products of matrices over GF(256) for Python; used through atoll.ltp.gf.
 *
 * The limited API of Python 3.10 has no buffers. Arrays are read by NumPy's array interface instead, whose
 * structure is fixed: https://numpy.org/doc/stable/reference/arrays.interface.html */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <string.h>

#include "gf.h"

struct array_interface {
    int two; /* 2: that this is what it is taken for */
    int dimensions;
    char kind;
    int item_bytes;
    int flags;
    intptr_t *shape, *strides;
    void *bytes;
    PyObject *description;
};

enum { WRITEABLE = 0x400 }; /* in flags */

/* Below so many products a call keeps the interpreter: it takes about 0.1 ms at most, and a thread that gives
 * the interpreter up may wait 5 ms until it has it again. */
enum { PRODUCTS_ALONE = 1 << 21 };

static struct kernel kernels[MOST_KERNELS];
static int kernel_count;

/* Returns the capsule that holds what `m` tells, or NULL with an exception. */
static PyObject *read_matrix(PyObject *array, const char *name, bool writes, struct matrix *m)
{
    PyObject *capsule = PyObject_GetAttrString(array, "__array_struct__");
    if (!capsule)
        return 0;
    const struct array_interface *a = PyCapsule_GetPointer(capsule, 0);
    const char *fault = 0;
    if (!a)
        goto failed;
    if (a->two != 2 || a->dimensions != 2 || a->kind != 'u' || a->item_bytes != 1)
        fault = "not a matrix of uint8";
    else if (a->shape[0] > 0 && a->shape[1] > 1 && a->strides[1] != 1)
        fault = "a row's bytes do not lie side by side";
    else if (writes && !(a->flags & WRITEABLE))
        fault = "not to be written to";
    if (fault) {
        PyErr_Format(PyExc_ValueError, "%s: %s", name, fault);
        goto failed;
    }
    m->bytes = a->bytes;
    m->rows = (size_t)a->shape[0];
    m->columns = (size_t)a->shape[1];
    m->stride = a->strides[0];
    return capsule;
failed:
    Py_DECREF(capsule);
    return 0;
}

static product *find_kernel(const char *name)
{
    for (int i = 0; i < kernel_count; i++)
        if (!strcmp(kernels[i].name, name))
            return kernels[i].multiply;
    PyErr_Format(PyExc_ValueError, "no kernel %s runs on this processor", name);
    return 0;
}

static bool multiply(product *with, const struct matrix *coefficients, const struct matrix *inputs,
                     const struct matrix *output)
{
    if (coefficients->columns != inputs->rows || output->rows != coefficients->rows ||
        output->columns != inputs->columns) {
        PyErr_Format(PyExc_ValueError, "coefficients (%zu, %zu) times inputs (%zu, %zu) is not (%zu, %zu)",
                     coefficients->rows, coefficients->columns, inputs->rows, inputs->columns, output->rows,
                     output->columns);
        return false;
    }
    if (output->rows * inputs->rows * inputs->columns < PRODUCTS_ALONE) {
        with(coefficients, inputs, output);
        return true;
    }
    Py_BEGIN_ALLOW_THREADS
    with(coefficients, inputs, output);
    Py_END_ALLOW_THREADS
    return true;
}

static PyObject *matmul(PyObject *self, PyObject *args)
{
    (void)self;
    static const char *const names[] = {"coefficients", "inputs", "output"};
    PyObject *arrays[3], *held[3] = {0, 0, 0};
    struct matrix matrices[3];
    const char *name;
    if (!PyArg_ParseTuple(args, "OOOs", &arrays[0], &arrays[1], &arrays[2], &name))
        return 0;
    product *with = find_kernel(name);
    bool done = with != 0;
    for (int i = 0; i < 3 && done; i++)
        done = (held[i] = read_matrix(arrays[i], names[i], i == 2, &matrices[i])) != 0;
    done = done && multiply(with, &matrices[0], &matrices[1], &matrices[2]);
    for (int i = 0; i < 3; i++)
        Py_XDECREF(held[i]);
    if (!done)
        return 0;
    Py_INCREF(Py_None);
    return Py_None;
}

static PyMethodDef methods[] = {
    {"matmul", matmul, METH_VARARGS, "matmul(coefficients, inputs, output, kernel): matrices of uint8"},
    {0, 0, 0, 0},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_gf", "Products of matrices over GF(256); used through atoll.ltp.gf.", -1,
    methods, 0, 0, 0, 0};

static PyObject *kernel_names(void)
{
    PyObject *names = PyTuple_New(kernel_count);
    for (int i = 0; names && i < kernel_count; i++) {
        PyObject *name = PyUnicode_FromString(kernels[i].name);
        if (!name || PyTuple_SetItem(names, i, name)) {
            Py_DECREF(names);
            return 0;
        }
    }
    return names;
}

PyMODINIT_FUNC PyInit__gf(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (!module)
        return 0;
    kernel_count = gf_start(kernels);
    PyObject *names = kernel_names();
    if (!names || PyModule_AddObject(module, "KERNELS", names)) {
        Py_XDECREF(names);
        Py_DECREF(module);
        return 0;
    }
    return module;
}

/* atoll.lab._emulator: the emulator's C for Python. emulator.py packs what goes in and names what comes out;
 * all of it travels as bytes of native 64-bit integers. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>

#include "loop.h"

#define NAME "atoll.lab._emulator.emulator"
enum { LINK_FIELDS = 5, SITE_BYTES = 24, FATE_FIELDS = 5 };

static PyObject *wrong(const char *what)
{
    PyErr_SetString(PyExc_ValueError, what);
    return 0;
}

static bool phases_make_sense(const struct phase *p, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++, p++) {
        bool chances = p->loss >= 0 && p->reorder >= 0 && p->duplicate >= 0 && p->corrupt >= 0;
        bool times = p->delay >= 0 && p->jitter >= 0 && p->period > 0 && p->reorder_by >= 0 &&
                     p->at <= INT64_MAX / 1000 && (i ? p->at > p[-1].at : p->at == 0);
        if (!chances || !times || p->rate <= 0 || p->queue < 0 || p->shape < 0 || p->shape >= SHAPES)
            return false;
    }
    return count > 0;
}

/* -- fates -- */

static PyObject *fates(PyObject *self, PyObject *args)
{
    (void)self;
    const char *tables, *phases, *arrivals;
    Py_ssize_t table_bytes, phase_bytes, arrival_bytes;
    unsigned long long seed, link;
    if (!PyArg_ParseTuple(args, "y#y#KKy#", &tables, &table_bytes, &phases, &phase_bytes, &seed, &link,
                          &arrivals, &arrival_bytes))
        return 0;
    Py_ssize_t phase_count = phase_bytes / (Py_ssize_t)sizeof(struct phase), count = arrival_bytes / 16;
    if (table_bytes != sizeof(struct tables) || phase_bytes % (Py_ssize_t)sizeof(struct phase) ||
        arrival_bytes % 16)
        return wrong("fates: the packed tables, phases or arrivals have the wrong size");
    PyObject *result = PyBytes_FromStringAndSize(0, count * FATE_FIELDS * 8);
    struct phase *copy = PyMem_Malloc((size_t)phase_bytes + 1); /* aligned, as bytes need not be */
    struct tables *table = PyMem_Malloc(sizeof *table);
    if (result && copy && table) {
        memcpy(copy, phases, (size_t)phase_bytes);
        memcpy(table, tables, sizeof *table);
        struct direction d;
        char *out = PyBytes_AsString(result);
        bool sense = phases_make_sense(copy, phase_count);
        if (sense)
            direction_start(&d, table, copy, (int)phase_count, seed, link);
        for (Py_ssize_t i = 0; sense && i < count; i++) {
            struct fate fate;
            int64_t arrival[2], fields[FATE_FIELDS];
            memcpy(arrival, arrivals + i * 16, 16);
            direction_decide(&d, arrival[0], arrival[1], &fate);
            fields[0] = fate.verdict;
            fields[1] = fate.delivered;
            fields[2] = fate.copies;
            fields[3] = fate.corrupted;
            fields[4] = fate.overtook;
            memcpy(out + i * (Py_ssize_t)sizeof fields, fields, sizeof fields);
        }
        if (!sense) {
            Py_DECREF(result);
            result = wrong("fates: the phases make no sense");
        }
    } else {
        Py_XDECREF(result);
        result = PyErr_NoMemory();
    }
    PyMem_Free(copy);
    PyMem_Free(table);
    return result;
}

/* -- the emulator -- */

static void destroy(struct emulator *e)
{
    for (int i = 0; e->links && i < e->link_count; i++)
        link_close(&e->links[i]);
    free(e->sites);
    free(e->links);
    free(e->link_of);
    free(e->phases);
    free(e->counters);
    free(e->polled);
    free(e);
}

static void destroy_capsule(PyObject *capsule)
{
    destroy(PyCapsule_GetPointer(capsule, NAME));
}

static bool allocate_all(struct emulator *e, size_t phase_bytes)
{
    size_t sites = (size_t)e->site_count, links = (size_t)e->link_count;
    e->sites = calloc(sites + 1, sizeof *e->sites);
    e->links = calloc(links + 1, sizeof *e->links);
    e->link_of = malloc((sites * sites + 1) * sizeof *e->link_of);
    e->phases = malloc(phase_bytes + 1);
    e->counters = calloc(COUNTERS + HISTOGRAM + links * LINK_COUNTERS, sizeof *e->counters);
    e->polled = calloc(sites + 1, sizeof *e->polled);
    return e->sites && e->links && e->link_of && e->phases && e->counters && e->polled;
}

static void fill_sites(struct emulator *e, const char *sites)
{
    for (int i = 0; i < e->site_count; i++, sites += SITE_BYTES) {
        int64_t tun;
        memcpy(&tun, sites, 8);
        memcpy(e->sites[i].address, sites + 8, 16);
        e->sites[i].tun = (int)tun;
        e->sites[i].open = true;
        e->sites[i].last_target = -1;
    }
    for (int i = 0; i < e->site_count * e->site_count; i++)
        e->link_of[i] = -1;
}

/* Returns what is wrong, or NULL. */
static const char *fill_links(struct emulator *e, const char *links, Py_ssize_t phase_count, uint64_t seed)
{
    struct phase *phases = e->phases;
    for (int i = 0; i < e->link_count; i++) {
        int64_t f[LINK_FIELDS]; /* source, target, phases, records, bytes */
        struct link *l = &e->links[i];
        memcpy(f, links + i * (int)sizeof f, sizeof f);
        if (f[0] < 0 || f[1] < 0 || f[0] >= e->site_count || f[1] >= e->site_count)
            return "a link to no site";
        if (f[2] <= 0 || f[2] > phase_count || !phases_make_sense(phases, (Py_ssize_t)f[2]))
            return "the phases make no sense";
        if (f[3] <= 0 || f[3] > 1 << 30 || f[4] <= 0)
            return "the memory asked for makes no sense";
        l->source = (int)f[0];
        l->target = (int)f[1];
        l->counters = e->counters + COUNTERS + HISTOGRAM + i * LINK_COUNTERS;
        direction_start(&l->direction, &e->tables, phases, (int)f[2], seed, (uint64_t)i);
        e->link_of[l->source * e->site_count + l->target] = i;
        phases += f[2];
        phase_count -= f[2];
        if (!link_open(l, (uint32_t)f[3], (uint64_t)f[4]))
            return "no memory for the packets on their way";
    }
    return phase_count ? "phases that belong to no link" : 0;
}

static PyObject *create(PyObject *self, PyObject *args)
{
    (void)self;
    const char *tables, *sites, *links, *phases;
    Py_ssize_t table_bytes, site_bytes, link_bytes, phase_bytes;
    unsigned long long seed;
    if (!PyArg_ParseTuple(args, "Ky#y#y#y#", &seed, &tables, &table_bytes, &sites, &site_bytes, &links,
                          &link_bytes, &phases, &phase_bytes))
        return 0;
    Py_ssize_t link_size = LINK_FIELDS * 8, phase_size = sizeof(struct phase);
    if (table_bytes != sizeof(struct tables) || site_bytes % SITE_BYTES || link_bytes % link_size ||
        phase_bytes % phase_size || site_bytes > 4096 * SITE_BYTES || link_bytes > 65536 * link_size)
        return wrong("create: the packed tables, sites, links or phases have the wrong size");
    struct emulator *e = calloc(1, sizeof *e);
    if (!e)
        return PyErr_NoMemory();
    e->site_count = (int)(site_bytes / SITE_BYTES);
    e->link_count = (int)(link_bytes / link_size);
    e->joins_udp = true;
    if (!allocate_all(e, (size_t)phase_bytes)) {
        destroy(e);
        return PyErr_NoMemory();
    }
    memcpy(&e->tables, tables, sizeof e->tables);
    memcpy(e->phases, phases, (size_t)phase_bytes);
    fill_sites(e, sites);
    const char *fault = fill_links(e, links, phase_bytes / phase_size, seed);
    if (fault) {
        destroy(e);
        return wrong(fault);
    }
    PyObject *capsule = PyCapsule_New(e, NAME, destroy_capsule);
    if (!capsule)
        destroy(e);
    return capsule;
}

static bool interrupted(void *context)
{
    PyThreadState **state = context;
    PyEval_RestoreThread(*state);
    bool raised = PyErr_CheckSignals() != 0;
    *state = PyEval_SaveThread();
    return raised;
}

static PyObject *run(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *capsule;
    int stop;
    if (!PyArg_ParseTuple(args, "Oi", &capsule, &stop))
        return 0;
    struct emulator *e = PyCapsule_GetPointer(capsule, NAME);
    if (!e)
        return 0;
    if (e->running)
        return wrong("run: an emulator runs once");
    e->running = true;
    PyThreadState *state = PyEval_SaveThread();
    int error = loop_run(e, stop, interrupted, &state);
    PyEval_RestoreThread(state);
    if (PyErr_Occurred())
        return 0;
    if (error) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_INCREF(Py_None);
    return Py_None;
}

static PyObject *counters(PyObject *self, PyObject *capsule)
{
    (void)self;
    struct emulator *e = PyCapsule_GetPointer(capsule, NAME);
    if (!e)
        return 0;
    Py_ssize_t count = COUNTERS + HISTOGRAM + (Py_ssize_t)e->link_count * LINK_COUNTERS;
    PyObject *result = PyBytes_FromStringAndSize(0, count * 8);
    if (!result)
        return 0;
    char *out = PyBytes_AsString(result);
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t value = __atomic_load_n(&e->counters[i], __ATOMIC_RELAXED);
        memcpy(out + i * 8, &value, 8);
    }
    return result;
}

static PyMethodDef methods[] = {
    {"fates", fates, METH_VARARGS, "fates(tables, phases, seed, link, arrivals) -> packed fates"},
    {"create", create, METH_VARARGS, "create(seed, tables, sites, links, phases) -> emulator"},
    {"run", run, METH_VARARGS, "run(emulator, stop): until the descriptor `stop` is readable"},
    {"counters", counters, METH_O, "counters(emulator) -> packed counters"},
    {0, 0, 0, 0},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_emulator",
                                        "The lab's packet emulator; used through atoll.lab.emulator.", -1,
                                        methods, 0, 0, 0, 0};

PyMODINIT_FUNC PyInit__emulator(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (!module)
        return 0;
    /* So that emulator.py can check that both speak of the same fields. */
    if (PyModule_AddIntConstant(module, "COUNTERS", COUNTERS) ||
        PyModule_AddIntConstant(module, "HISTOGRAM", HISTOGRAM) ||
        PyModule_AddIntConstant(module, "LINK_COUNTERS", LINK_COUNTERS) ||
        PyModule_AddIntConstant(module, "PHASE_FIELDS", PHASE_FIELDS)) {
        Py_DECREF(module);
        return 0;
    }
    return module;
}

/* Products of matrices over GF(256), polynomial 0x11D: the bytes of forward error correction. */
#ifndef ATOLL_GF_H
#define ATOLL_GF_H

#include <stddef.h>
#include <stdint.h>

/* A row's bytes lie side by side; rows are `stride` bytes apart. */
struct matrix {
    uint8_t *bytes;
    size_t rows, columns;
    ptrdiff_t stride;
};

/* output (m, L) = coefficients (m, k) times inputs (k, L). The shapes fit, and output shares no memory with
 * the others: the caller has seen to that. */
typedef void product(const struct matrix *coefficients, const struct matrix *inputs,
                     const struct matrix *output);

struct kernel {
    const char *name;
    product *multiply;
};

enum { MOST_KERNELS = 3 };

/* Makes the tables, once. Returns how many kernels run on this processor; fastest first. */
int gf_start(struct kernel kernels[MOST_KERNELS]);

#endif

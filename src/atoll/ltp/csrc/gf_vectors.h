/* The product by vectors: a byte's product is looked up by its two halves, a vector of bytes at once (Plank,
 * Greenan, Miller: Screaming Fast Galois Field Arithmetic Using Intel SIMD Instructions, FAST 2013). gf.c
 * includes this once for each kind of vector, which it describes by the macros that are undefined below. */

/* Two vectors of columns at `at`, of `together` rows of output from row `first` on. */
__attribute__((always_inline, target(TARGET))) static inline void
NAME(columns)(int together, const struct matrix *coefficients, const struct matrix *inputs,
              const struct matrix *output, size_t first, size_t at)
{
    const VECTOR half = ALL(0x0F);
    VECTOR left[TOGETHER], right[TOGETHER];
    const uint8_t *factors[TOGETHER];
#pragma GCC unroll 4
    for (int m = 0; m < together; m++) {
        left[m] = right[m] = ALL(0);
        factors[m] = row(coefficients, first + (size_t)m);
    }
    for (size_t k = 0; k < inputs->rows; k++) {
        const uint8_t *bytes = row(inputs, k) + at;
        VECTOR a = LOAD(bytes), b = LOAD(bytes + WIDTH);
        VECTOR low_a = AND(a, half), high_a = AND(HIGHER(a), half);
        VECTOR low_b = AND(b, half), high_b = AND(HIGHER(b), half);
#pragma GCC unroll 4
        for (int m = 0; m < together; m++) {
            const uint8_t *tables = nibbles[factors[m][k]];
            VECTOR low = TABLE(tables), high = TABLE(tables + 16);
            left[m] = XOR(left[m], XOR(LOOK_UP(low, low_a), LOOK_UP(high, high_a)));
            right[m] = XOR(right[m], XOR(LOOK_UP(low, low_b), LOOK_UP(high, high_b)));
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < together; m++) {
        uint8_t *sums = row(output, first + (size_t)m) + at;
        STORE(sums, left[m]);
        STORE(sums + WIDTH, right[m]);
    }
}

/* All columns; the last step reaches back over some that the one before it has done. */
__attribute__((always_inline, target(TARGET))) static inline void
NAME(rows)(int together, const struct matrix *coefficients, const struct matrix *inputs,
           const struct matrix *output, size_t first)
{
    size_t at = 0, last = inputs->columns - 2 * WIDTH;
    for (; at < last; at += 2 * WIDTH)
        NAME(columns)(together, coefficients, inputs, output, first, at);
    NAME(columns)(together, coefficients, inputs, output, first, last);
}

__attribute__((target(TARGET))) static void NAME(multiply)(const struct matrix *coefficients,
                                                           const struct matrix *inputs,
                                                           const struct matrix *output)
{
    if (inputs->columns < 2 * WIDTH) {
        multiply_from(0, coefficients, inputs, output);
        return;
    }
    size_t m = 0;
    for (; m + TOGETHER <= output->rows; m += TOGETHER)
        NAME(rows)(TOGETHER, coefficients, inputs, output, m);
    switch (output->rows - m) {
    case 3:
        NAME(rows)(3, coefficients, inputs, output, m);
        break;
    case 2:
        NAME(rows)(2, coefficients, inputs, output, m);
        break;
    case 1:
        NAME(rows)(1, coefficients, inputs, output, m);
        break;
    }
}

#undef NAME
#undef TARGET
#undef VECTOR
#undef WIDTH
#undef LOAD
#undef STORE
#undef TABLE
#undef LOOK_UP
#undef XOR
#undef AND
#undef HIGHER
#undef ALL

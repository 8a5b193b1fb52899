#include "gf.h"

#include <string.h>

enum { POLYNOMIAL = 0x11D, TOGETHER = 4 /* rows of output: what the registers hold */ };

static uint8_t products[256][256];
static uint8_t nibbles[256][32]; /* products with 0x00 .. 0x0F, then with 0x00, 0x10 .. 0xF0 */

static uint8_t *row(const struct matrix *m, size_t number)
{
    return m->bytes + (ptrdiff_t)number * m->stride;
}

/* The columns from `from` on. */
static void multiply_from(size_t from, const struct matrix *coefficients, const struct matrix *inputs,
                          const struct matrix *output)
{
    size_t columns = inputs->columns;
    for (size_t m = 0; m < output->rows && from < columns; m++) {
        const uint8_t *factors = row(coefficients, m);
        uint8_t *sums = row(output, m);
        memset(sums + from, 0, columns - from);
        for (size_t k = 0; k < inputs->rows; k++) {
            const uint8_t *table = products[factors[k]], *bytes = row(inputs, k);
            for (size_t i = from; i < columns; i++)
                sums[i] ^= table[bytes[i]];
        }
    }
}

static void multiply_plain(const struct matrix *coefficients, const struct matrix *inputs,
                           const struct matrix *output)
{
    multiply_from(0, coefficients, inputs, output);
}

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>

#define NAME(part) part##_ssse3
#define TARGET "ssse3"
#define VECTOR __m128i
#define WIDTH 16
#define LOAD(at) _mm_loadu_si128((const __m128i *)(at))
#define STORE(at, v) _mm_storeu_si128((__m128i *)(at), v)
#define TABLE(at) LOAD(at)
#define LOOK_UP(table, v) _mm_shuffle_epi8(table, v)
#define XOR(a, b) _mm_xor_si128(a, b)
#define AND(a, b) _mm_and_si128(a, b)
#define HIGHER(v) _mm_srli_epi64(v, 4)
#define ALL(byte) _mm_set1_epi8(byte)
#include "gf_vectors.h"

#define NAME(part) part##_avx2
#define TARGET "avx2"
#define VECTOR __m256i
#define WIDTH 32
#define LOAD(at) _mm256_loadu_si256((const __m256i *)(at))
#define STORE(at, v) _mm256_storeu_si256((__m256i *)(at), v)
#define TABLE(at) _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(at)))
#define LOOK_UP(table, v) _mm256_shuffle_epi8(table, v)
#define XOR(a, b) _mm256_xor_si256(a, b)
#define AND(a, b) _mm256_and_si256(a, b)
#define HIGHER(v) _mm256_srli_epi64(v, 4)
#define ALL(byte) _mm256_set1_epi8(byte)
#include "gf_vectors.h"
#endif

static void make_tables(void)
{
    for (int a = 0; a < 256; a++) {
        for (int b = 0; b < 256; b++) {
            int sum = 0, doubled = a;
            for (int bits = b; bits; bits >>= 1) {
                sum ^= bits & 1 ? doubled : 0;
                doubled = doubled << 1 ^ (doubled & 0x80 ? POLYNOMIAL : 0);
            }
            products[a][b] = (uint8_t)sum;
        }
        for (int b = 0; b < 16; b++) {
            nibbles[a][b] = products[a][b];
            nibbles[a][16 + b] = products[a][b << 4];
        }
    }
}

int gf_start(struct kernel kernels[MOST_KERNELS])
{
    int count = 0;
    make_tables();
#if defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        kernels[count++] = (struct kernel){"avx2", multiply_avx2};
    if (__builtin_cpu_supports("ssse3"))
        kernels[count++] = (struct kernel){"ssse3", multiply_ssse3};
#endif
    kernels[count++] = (struct kernel){"plain", multiply_plain};
    return count;
}

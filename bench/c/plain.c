/* RoPE and attention as one writes them in C for the compiler to vectorise: restrict pointers, inner loops of fixed
 * length over contiguous memory, blocks that fit the caches, an online softmax. No intrinsics. It is the yardstick of
 * what a compiler alone gives, so it must stay straightforward, but not naive.
 *
 * Compiled once per instruction set with -O3 -ffast-math (sums may be reordered; nothing here is NaN or infinite).
 * dim is a multiple of 16 and at most MAX_DIM. */
#include <stddef.h>
#include <string.h>

#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define FN(name) PASTE(rotile_plain_##name, ISA)

enum {
    ROWS = 4,      /* query rows of a register tile: product() names each */
    COLS = 16,     /* columns of a register tile */
    BLOCK = 64,    /* query rows, and keys, of a cache block */
    MAX_DIM = 256,
    MAX_GROUP = 16 /* query heads per key head, in decode */
};

/* Half-style rotation of x [token, head, dim], contiguous, into y with the strides given, in elements. */
void FN(rope)(const float *restrict x, float *restrict y, const float *restrict cosines, const float *restrict sines,
              size_t tokens, size_t heads, size_t dim, size_t y_token, size_t y_head)
{
    size_t half = dim / 2;
    for (size_t t = 0; t < tokens; t++) {
        const float *restrict c = cosines + t * half;
        const float *restrict s = sines + t * half;
        for (size_t h = 0; h < heads; h++) {
            const float *restrict from = x + (t * heads + h) * dim;
            float *restrict to = y + t * y_token + h * y_head;
            for (size_t i = 0; i < half; i++) {
                float low = from[i], high = from[i + half];
                to[i] = low * c[i] - high * s[i];
                to[i + half] = high * c[i] + low * s[i];
            }
        }
    }
}

/* Copies x [token, head, dim], contiguous, into y with the strides given. */
void FN(store)(const float *restrict x, float *restrict y, size_t tokens, size_t heads, size_t dim, size_t y_token,
               size_t y_head)
{
    for (size_t t = 0; t < tokens; t++)
        for (size_t h = 0; h < heads; h++)
            memcpy(y + t * y_token + h * y_head, x + (t * heads + h) * dim, dim * sizeof(float));
}

/* e^x for x <= 0, relative error about 1e-7. */
static inline float exponential(float x)
{
    x = x < -87.0f ? -126.0f : x * 1.44269504f;
    int n = (int)(x - 0.5f); /* x <= 0: rounds to nearest */
    float f = x - (float)n;
    float p = 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    union {
        int i;
        float f;
    } power = {(n + 127) * (1 << 23)};
    return p * power.f;
}

/* acc[r][j] += sum over i < n of a[r][i] * b[i][j]. ROWS arrays by name: one array of two dimensions GCC keeps in memory, at a
 * sixth of the speed. */
static inline void product(float acc[ROWS][COLS], const float *restrict a, size_t a_row, const float *restrict b,
                           size_t b_row, size_t n)
{
    float s0[COLS], s1[COLS], s2[COLS], s3[COLS];
    for (int j = 0; j < COLS; j++) {
        s0[j] = acc[0][j];
        s1[j] = acc[1][j];
        s2[j] = acc[2][j];
        s3[j] = acc[3][j];
    }
    for (size_t i = 0; i < n; i++) {
        const float *restrict row = b + i * b_row;
        float a0 = a[i], a1 = a[a_row + i], a2 = a[2 * a_row + i], a3 = a[3 * a_row + i];
        for (int j = 0; j < COLS; j++) {
            s0[j] += a0 * row[j];
            s1[j] += a1 * row[j];
            s2[j] += a2 * row[j];
            s3[j] += a3 * row[j];
        }
    }
    for (int j = 0; j < COLS; j++) {
        acc[0][j] = s0[j];
        acc[1][j] = s1[j];
        acc[2][j] = s2[j];
        acc[3][j] = s3[j];
    }
}

/* Scores of one row to weights; returns the factor for what was accumulated before. */
static inline float soften(float *restrict s, size_t n, float *restrict max, float *restrict sum)
{
    float top = *max;
    for (size_t j = 0; j < n; j++)
        top = s[j] > top ? s[j] : top;
    float factor = exponential(*max - top), total = 0.0f;
    for (size_t j = 0; j < n; j++) {
        s[j] = exponential(s[j] - top);
        total += s[j];
    }
    *max = top;
    *sum = *sum * factor + total;
    return factor;
}

/* Causal attention over contiguous [token, head, dim]. work: tokens rounded up to BLOCK, times dim floats. */
void FN(prefill)(const float *restrict q, const float *restrict k, const float *restrict v, float *restrict out,
                 float *restrict work, size_t tokens, size_t heads_q, size_t heads_kv, size_t dim, float scale)
{
    static const float far = -1e30f;
    size_t q_row = heads_q * dim, kv_row = heads_kv * dim, group = heads_q / heads_kv;
    float rows[BLOCK * MAX_DIM], acc[BLOCK * MAX_DIM], s[ROWS * BLOCK], max[BLOCK], sum[BLOCK];
    for (size_t kv = 0; kv < heads_kv; kv++) {
        /* Keys transposed in blocks, so that the product's inner loop is contiguous; once for the whole group. */
        for (size_t k0 = 0; k0 < tokens; k0 += BLOCK) {
            size_t keys = tokens - k0 < BLOCK ? tokens - k0 : BLOCK;
            float *restrict to = work + k0 * dim;
            for (size_t i = 0; i < dim; i++)
                for (size_t j = 0; j < BLOCK; j++)
                    to[i * BLOCK + j] = j < keys ? k[(k0 + j) * kv_row + kv * dim + i] : 0.0f;
        }
        for (size_t h = kv * group; h < (kv + 1) * group; h++) {
            for (size_t q0 = 0; q0 < tokens; q0 += BLOCK) {
                size_t count = tokens - q0 < BLOCK ? tokens - q0 : BLOCK;
                size_t whole = (count + ROWS - 1) / ROWS * ROWS;
                for (size_t r = 0; r < whole; r++) {
                    for (size_t i = 0; i < dim; i++)
                        rows[r * dim + i] = r < count ? q[(q0 + r) * q_row + h * dim + i] * scale : 0.0f;
                    max[r] = far;
                    sum[r] = 0.0f;
                }
                memset(acc, 0, whole * dim * sizeof(float));
                for (size_t k0 = 0; k0 <= q0; k0 += BLOCK) {
                    size_t keys = tokens - k0 < BLOCK ? tokens - k0 : BLOCK;
                    const float *restrict kt = work + k0 * dim;
                    const float *restrict values = v + k0 * kv_row + kv * dim;
                    for (size_t r0 = 0; r0 < whole; r0 += ROWS) {
                        for (size_t j = 0; j < BLOCK; j += COLS) {
                            float tile[ROWS][COLS] = {{0}};
                            product(tile, rows + r0 * dim, dim, kt + j, BLOCK, dim);
                            for (int r = 0; r < ROWS; r++)
                                memcpy(s + r * BLOCK + j, tile[r], sizeof tile[r]);
                        }
                        for (size_t r = 0; r < ROWS; r++) {
                            if (k0 + BLOCK > q0 + r0 + r + 1 || keys < BLOCK)
                                for (size_t j = 0; j < BLOCK; j++)
                                    s[r * BLOCK + j] =
                                        k0 + j <= q0 + r0 + r && j < keys ? s[r * BLOCK + j] : far;
                            float factor = soften(s + r * BLOCK, BLOCK, &max[r0 + r], &sum[r0 + r]);
                            for (size_t i = 0; i < dim; i++)
                                acc[(r0 + r) * dim + i] *= factor;
                        }
                        for (size_t i = 0; i < dim; i += COLS) {
                            float tile[ROWS][COLS];
                            for (int r = 0; r < ROWS; r++)
                                memcpy(tile[r], acc + (r0 + r) * dim + i, sizeof tile[r]);
                            product(tile, s, BLOCK, values + i, kv_row, keys);
                            for (int r = 0; r < ROWS; r++)
                                memcpy(acc + (r0 + r) * dim + i, tile[r], sizeof tile[r]);
                        }
                    }
                }
                for (size_t r = 0; r < count; r++)
                    for (size_t i = 0; i < dim; i++)
                        out[(q0 + r) * q_row + h * dim + i] = acc[r * dim + i] / sum[r];
            }
        }
    }
}

/* One query token over a cache [head, token, dim]; every key is read once for the whole group. */
void FN(decode)(const float *restrict q, const float *restrict k, const float *restrict v, float *restrict out,
                size_t tokens, size_t heads_q, size_t heads_kv, size_t dim, float scale)
{
    size_t group = heads_q / heads_kv;
    float rows[MAX_GROUP * MAX_DIM], acc[MAX_GROUP * MAX_DIM], s[MAX_GROUP * BLOCK], max[MAX_GROUP], sum[MAX_GROUP];
    for (size_t kv = 0; kv < heads_kv; kv++) {
        for (size_t i = 0; i < group * dim; i++) {
            rows[i] = q[kv * group * dim + i] * scale;
            acc[i] = 0.0f;
        }
        for (size_t g = 0; g < group; g++) {
            max[g] = -1e30f;
            sum[g] = 0.0f;
        }
        for (size_t k0 = 0; k0 < tokens; k0 += BLOCK) {
            size_t keys = tokens - k0 < BLOCK ? tokens - k0 : BLOCK;
            const float *restrict key = k + (kv * tokens + k0) * dim;
            const float *restrict value = v + (kv * tokens + k0) * dim;
            for (size_t j = 0; j < keys; j++)
                for (size_t g = 0; g < group; g++) {
                    float dot = 0.0f;
                    for (size_t i = 0; i < dim; i++)
                        dot += rows[g * dim + i] * key[j * dim + i];
                    s[g * BLOCK + j] = dot;
                }
            for (size_t g = 0; g < group; g++) {
                float factor = soften(s + g * BLOCK, keys, &max[g], &sum[g]);
                for (size_t i = 0; i < dim; i++)
                    acc[g * dim + i] *= factor;
            }
            size_t g = 0;
            for (; g + ROWS <= group; g += ROWS)
                for (size_t i = 0; i < dim; i += COLS) {
                    float tile[ROWS][COLS];
                    for (int r = 0; r < ROWS; r++)
                        memcpy(tile[r], acc + (g + r) * dim + i, sizeof tile[r]);
                    product(tile, s + g * BLOCK, BLOCK, value + i, dim, keys);
                    for (int r = 0; r < ROWS; r++)
                        memcpy(acc + (g + r) * dim + i, tile[r], sizeof tile[r]);
                }
            for (; g < group; g++)
                for (size_t j = 0; j < keys; j++)
                    for (size_t i = 0; i < dim; i++)
                        acc[g * dim + i] += s[g * BLOCK + j] * value[j * dim + i];
        }
        for (size_t g = 0; g < group; g++)
            for (size_t i = 0; i < dim; i++)
                out[(kv * group + g) * dim + i] = acc[g * dim + i] / sum[g];
    }
}

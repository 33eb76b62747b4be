// A layer of an engine whose keys and values are scalar codes of 4 bits, and product codes: bases from a sample,
// a prompt, decode steps, rejected drafts, a cache that is saved and read. Compared with exact attention.

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "kvc.h"

enum { HEADS = 2, GROUP = 3, DIM = 64, PROMPT = 600, STEPS = 20, TOKENS = PROMPT + STEPS };

#define CHECK(call)                                                             \
    do {                                                                        \
        int code_ = (call);                                                     \
        if (code_ != KVC_OK) {                                                  \
            char text_[200];                                                    \
            kvc_last_error(text_, sizeof text_);                                \
            fprintf(stderr, "%s: error %d: %s\n", #call, code_, text_);         \
            exit(1);                                                            \
        }                                                                       \
    } while (0)

static float noise(void) {
    static unsigned state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / 8388608.0f - 1.0f;
}

// Rows (tokens, heads, DIM) whose components differ in scale and mean, as those of a model do.
static float *tensor(int heads) {
    float *rows = malloc(sizeof(float) * TOKENS * heads * DIM);
    for (int i = 0; i < TOKENS * heads * DIM; i++) rows[i] = noise() * powf(0.97f, i % DIM) + (i % DIM == 5 ? 2.0f : 0.0f);
    return rows;
}

// RoPE of every row, in place: components i and i + DIM / 2 are a pair.
static void rope(float *rows, int heads, const float *frequencies) {
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < heads; h++)
            for (int i = 0; i < DIM / 2; i++) {
                float *x = rows + (t * heads + h) * DIM + i, *y = x + DIM / 2;
                float c = cosf(t * frequencies[i]), s = sinf(t * frequencies[i]), a = *x, b = *y;
                *x = c * a - s * b, *y = s * a + c * b;
            }
}

static kvc_rows view(const float *rows, int tokens, int components) {
    return (kvc_rows){rows, (size_t)tokens * components, tokens, components, components, KVC_F32};
}

// Relative error of `out` (HEADS, GROUP, DIM), the attention of the last of `n` tokens.
static double error(const float *out, const float *q, const float *k, const float *v, int n) {
    static double weights[TOKENS];
    double difference = 0, norm = 0;
    for (int head = 0; head < HEADS * GROUP; head++) {
        const float *query = q + ((size_t)(n - 1) * HEADS * GROUP + head) * DIM;
        double sum = 0;
        for (int t = 0; t < n; t++) {
            double score = 0;
            for (int i = 0; i < DIM; i++) score += query[i] * k[(t * HEADS + head / GROUP) * DIM + i];
            sum += weights[t] = exp(score / sqrt(DIM));
        }
        for (int i = 0; i < DIM; i++) {
            double exact = 0;
            for (int t = 0; t < n; t++) exact += weights[t] / sum * v[(t * HEADS + head / GROUP) * DIM + i];
            difference += pow(out[head * DIM + i] - exact, 2), norm += exact * exact;
        }
    }
    return sqrt(difference / norm);
}

// A prompt and decode steps. Returns the error of the last step.
static double decode(kvc_cache *cache, const float *q, const float *k, const float *v) {
    kvc_workspace *workspace;
    CHECK(kvc_workspace_new(&workspace)); // one for all layers, per thread
    kvc_rows keys = view(k, PROMPT, HEADS * DIM), values = view(v, PROMPT, HEADS * DIM);
    CHECK(kvc_cache_append(cache, &keys, &values));
    kvc_attention attention = {1.0f / sqrtf(DIM), 0.0f, 0};
    float out[HEADS * GROUP * DIM];
    for (int t = PROMPT; t < TOKENS; t++) {
        kvc_rows key = view(k + t * HEADS * DIM, 1, HEADS * DIM), value = view(v + t * HEADS * DIM, 1, HEADS * DIM);
        kvc_rows query = view(q + (size_t)t * HEADS * GROUP * DIM, 1, HEADS * GROUP * DIM);
        CHECK(kvc_cache_append(cache, &key, &value));
        CHECK(kvc_cache_append(cache, &key, &value)); // a draft of another model,
        CHECK(kvc_cache_truncate(cache, t + 1));      // which is rejected
        CHECK(kvc_cache_attend(cache, workspace, &attention, &query, out, HEADS * GROUP * DIM));
    }
    kvc_workspace_free(workspace);
    return error(out, q, k, v, TOKENS);
}

int main(void) {
    float frequencies[DIM / 2], *q = tensor(HEADS * GROUP), *k = tensor(HEADS), *v = tensor(HEADS);
    for (int i = 0; i < DIM / 2; i++) frequencies[i] = powf(1e4f, -2.0f * i / DIM);
    rope(q, HEADS * GROUP, frequencies), rope(k, HEADS, frequencies);
    printf("libkvc %s\n", kvc_version());

    // Scalar codes: bases once per model, from a sample after its first tokens.
    int skip = 4, n = 400;
    kvc_samples samples = {
        .keys = view(k + skip * HEADS * DIM, n, HEADS * DIM),
        .queries = view(q + skip * HEADS * GROUP * DIM, n, HEADS * GROUP * DIM),
        .values = view(v + skip * HEADS * DIM, n, HEADS * DIM),
        .frequencies = frequencies,
        .frequencies_len = DIM / 2,
        .rotated = 1,
        .first_position = skip,
    };
    kvc_bits bits = {.keys = 4, .values = 4, .mean_error = 0};
    kvc_window window = {.sinks = 4, .recent = 64, .batch = 32};
    kvc_bases *bases;
    kvc_heads *heads;
    kvc_cache *cache;
    CHECK(kvc_bases_fit(&samples, HEADS, 64, &bases));
    CHECK(kvc_heads_new(bases, frequencies, DIM / 2, &bits, &heads));
    kvc_bases_free(bases);
    CHECK(kvc_cache_sq(heads, KVC_F32, &window, &cache));
    double scalar = decode(cache, q, k, v);

    // A cache is saved and read; it continues bit for bit.
    size_t bytes, size;
    kvc_cache *restored;
    CHECK(kvc_cache_size(cache, &size));
    if (kvc_cache_save(cache, NULL, 0, &bytes) != KVC_TOO_SHORT) return 1;
    unsigned char *saved = malloc(bytes);
    CHECK(kvc_cache_save(cache, saved, bytes, &bytes));
    CHECK(kvc_cache_load_sq(heads, saved, bytes, &restored));
    saved[bytes / 2] ^= 1;
    kvc_cache *damaged;
    int code = kvc_cache_load_sq(heads, saved, bytes, &damaged);
    printf("scalar codes: error %.4f, %zu bytes of %d; a damaged copy is error %d\n", scalar, size,
           2 * TOKENS * HEADS * DIM * 4, code);
    if (code != KVC_BAD_CHECKSUM || damaged != NULL || !(scalar < 0.05)) return 1;
    free(saved);
    kvc_cache_free(restored);
    kvc_cache_free(cache);
    kvc_heads_free(heads);

    // Product codes: codebooks from the prompt, a byte for two components.
    kvc_training training = {.iterations = 10, .max_rows = 0, .seed = 1};
    kvc_rows keys = view(k, PROMPT, HEADS * DIM), values = view(v, PROMPT, HEADS * DIM);
    kvc_books *books;
    CHECK(kvc_books_train(&keys, &values, HEADS, DIM / 2, 8, DIM / 2, 8, &training, &books));
    CHECK(kvc_cache_pq(books, KVC_F32, &window, &cache));
    kvc_books_free(books); // the cache keeps them
    double product = decode(cache, q, k, v);
    printf("product codes: error %.4f\n", product);
    if (!(product < 0.05)) return 1;

    // Misuse is a code and a text.
    char text[100];
    keys.components = DIM;
    code = kvc_cache_append(cache, &keys, &values);
    kvc_last_error(text, sizeof text);
    printf("rows of another length: error %d, %s\n", code, text);
    if (code != KVC_LENGTH || kvc_cache_append(cache, NULL, &values) != KVC_NULL) return 1;
    kvc_cache_free(cache);
    free(q), free(k), free(v);
    return 0;
}

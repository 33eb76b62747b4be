// KV-cache compression: product and scalar codes of a layer's keys and values, rotations, a bitstream, a store.
//
// Generated from src/*.rs by `make header`.
//
// Results. A function returns KVC_OK or the code of an error, and then writes no output but NULL to a pointer to
// a new handle; kvc_last_error has the text. Codes below 100 are the same in the whole family, 101-199 are those
// of rows and attention, 201-299 of codes, 301-399 of rotations, 401-499 of the bitstream, 501-599 of the store,
// 601-699 of scalar codes with bases (the tables are in the documentation of the Rust crates kv-attend, codec-core
// and kv-store), 901-999 those of this interface. No function unwinds or aborts.
//
// Pointers. Those that a function documents are not NULL, unless their length is 0 or a comment says so; they are
// aligned as their type is, and hold as many elements as the length next to them says. NULL and misaligned
// pointers are errors; what lies behind a pointer cannot be checked. Buffers of one call do not overlap. Nothing
// that a caller passes is kept: rows, tokens and bytes may be freed after the call.
//
// Handles. A handle is made by the function whose last argument points to it and freed by the _free function of
// its type, which takes NULL, too. What a handle was made from may be freed before it: they share memory.
//
// Threads. The library starts none, except two for each store. A handle may move between threads. Calls with
// `const` handles may run at the same time; a call with a handle that is not `const` needs it alone. A cache
// is read by kvc_cache_attend and changed by appends and truncation. A workspace belongs to one call at a time:
// make one per thread. To divide the heads of a layer among threads, make a cache per head.
//
// Elements. Rows are of float, IEEE half or bfloat16 (KVC_F32, KVC_F16, KVC_BF16), in the byte order of the
// machine. Outputs are float. Saved bytes are those of the Rust crates, little-endian on every machine.


#ifndef KVC_H
#define KVC_H

#include <stddef.h>
#include <stdint.h>

// Success.
#define KVC_OK 0

// A size that must be positive is zero.
#define KVC_ZERO 1

// A buffer has not the length that the shapes require.
#define KVC_LENGTH 2

// A buffer is too short.
#define KVC_TOO_SHORT 3

// A buffer does not consist of whole rows.
#define KVC_PARTIAL_ROW 4

// A size, or a product of sizes, is too large.
#define KVC_TOO_LARGE 5

// A number is NaN or infinite.
#define KVC_NOT_FINITE 7

// Saved bytes are of another type.
#define KVC_BAD_MAGIC 8

// Saved bytes have an unknown version.
#define KVC_VERSION 9

// Saved bytes end too early.
#define KVC_TRUNCATED 10

// Bytes follow the saved ones.
#define KVC_TRAILING_BYTES 11

// A field of saved bytes or an argument has an invalid value, or a cache is of other books or heads.
#define KVC_BAD_FIELD 12

// Saved bytes are damaged.
#define KVC_BAD_CHECKSUM 13

// Rows have another element type than the cache.
#define KVC_ELEMENT_TYPE 105

// A frame is of another model than the profile.
#define KVC_WRONG_MODEL 412

// A pointer is NULL.
#define KVC_NULL 901

// A pointer is not aligned as its type requires.
#define KVC_MISALIGNED 902

// A text is not UTF-8.
#define KVC_TEXT 903

// A constant is none of those of its kind.
#define KVC_CONSTANT 904

// A defect of this library: it panicked. Handles that the call could change are to be freed.
#define KVC_PANIC 999

// The least error of all scores at every rank (KQ-SVD): the rotation to cut ranks with.
#define KVC_SCORE_OPTIMAL 0

// The right singular vectors of stacked queries and keys (ZACK).
#define KVC_STACKED 1

// The principal directions of the rows alone; there are no queries.
#define KVC_PRINCIPAL 2

// The query-metric KLT of rows about their mean: the rotation to quantize in.
#define KVC_QUERY_METRIC 3

// The basis (dim, dim): multiplies keys or values.
#define KVC_BASIS 0

// The dual basis (dim, dim): multiplies queries, and reconstructs rows.
#define KVC_DUAL 1

// The singular values (dim,), descending.
#define KVC_SIGMA 2

// Elements are `float`.
#define KVC_F32 0

// Elements are IEEE half precision.
#define KVC_F16 1

// Elements are bfloat16.
#define KVC_BF16 2

// The bases of all KV heads of a layer: fitted once per model, for any number of bits.
typedef struct kvc_bases kvc_bases;

// The codebooks of the keys and values of all KV heads of a layer, shared by the caches of all sequences.
typedef struct kvc_books kvc_books;

// The keys and values of all KV heads of a layer of one sequence: the first and the most recent tokens as exact
// rows, all others as codes. The position of a token is its index.
typedef struct kvc_cache kvc_cache;

// A codebook of one head's keys or values.
typedef struct kvc_codebook kvc_codebook;

// The heads of a layer with scalar codes at some number of bits, shared by the caches of all sequences.
typedef struct kvc_heads kvc_heads;

// The first columns of a basis.
typedef struct kvc_map kvc_map;

// The probability models and steps of a model's keys and values, at one or several levels.
typedef struct kvc_profile kvc_profile;

// A rotation of the keys or values of one head.
typedef struct kvc_rotation kvc_rotation;

// Caches of one model in a store. All calls block; they may run at the same time, and in several processes.
typedef struct kvc_store kvc_store;

// Scratch memory of attention, which grows to what a call needs. One per thread serves all layers and steps.
typedef struct kvc_workspace kvc_workspace;

// The tokens of a sequence that stay exact: the first `sinks` and at least the last `recent`. All others are
// coded, `batch` at a time.
typedef struct {
  // First tokens that are never coded; 4 is usual.
  size_t sinks;
  // Least number of most recent exact tokens; 64 is usual.
  size_t recent;
  // Tokens leave the window in multiples of this, and of the block of scalar codes; 0 counts as 1.
  size_t batch;
} kvc_window;

// Rows of `components` elements each, `stride` elements apart: all heads of each token, or one head in a tensor
// of any layout, without a copy.
typedef struct {
  // The first element of the first row.
  const void *data;
  // Elements that may be read from `data` on: at least (rows - 1) * stride + components.
  size_t len;
  // Number of rows.
  size_t rows;
  // Elements of a row.
  size_t components;
  // Elements from the start of one row to the start of the next.
  size_t stride;
  // KVC_F32, KVC_F16 or KVC_BF16.
  uint32_t element;
} kvc_rows;

// How scores become weights.
typedef struct {
  // Multiplies scores, usually 1 / sqrt(head_dim).
  float scale;
  // Scores become softcap * tanh(score / softcap); 0 for none.
  float softcap;
  // A query sees at most this number of last tokens; 0 for all.
  size_t window;
} kvc_attention;

// How codebooks are trained. The same rows and settings give the same bytes.
typedef struct {
  // Most iterations; 25 is usual. 0 counts as 1.
  size_t iterations;
  // Most rows, drawn at random; 0 for all.
  size_t max_rows;
  // The seed of random choices.
  uint64_t seed;
} kvc_training;

// The model of a profile.
typedef struct {
  // The engine's identifier of the model, such as a hash of its weights.
  uint64_t model_id;
  // Number of layers.
  size_t layers;
  // KV heads of a layer.
  size_t heads;
  // Components of a head.
  size_t head_dim;
  // Not 0 if keys are stored after RoPE.
  uint32_t keys_rotated;
} kvc_model;

// Keys and values of one layer to read, in a layout that a kvc_place names.
typedef struct {
  // The keys.
  const void *keys;
  // Elements of `keys`.
  size_t keys_len;
  // The values.
  const void *values;
  // Elements of `values`.
  size_t values_len;
} kvc_layer;

// The layout of rows (tokens, heads, head_dim): strides in elements, with or without pages.
typedef struct {
  // Stride of tokens, within a page if there are pages: heads * head_dim if tokens come first.
  size_t token_stride;
  // Stride of heads: head_dim if tokens come first.
  size_t head_stride;
  // The position of the first token in these rows.
  size_t first_token;
  // Page numbers in the order of the tokens; NULL if there are no pages.
  const uint32_t *pages;
  // Number of pages.
  size_t pages_len;
  // Tokens of a page.
  size_t page_tokens;
  // Stride of pages.
  size_t page_stride;
} kvc_place;

// Keys and values of one layer to write.
typedef struct {
  // The keys.
  void *keys;
  // Elements of `keys`.
  size_t keys_len;
  // The values.
  void *values;
  // Elements of `values`.
  size_t values_len;
} kvc_layer_mut;

// The header of a frame.
typedef struct {
  // The model.
  kvc_model model;
  // The level of the profile.
  uint32_t level;
  // Position of the first token.
  uint64_t first_token;
  // Number of tokens.
  size_t tokens;
} kvc_frame;

// Bytes of one saved object.
typedef struct {
  // The first byte.
  const uint8_t *data;
  // Number of bytes.
  size_t len;
} kvc_bytes;

// Rows of a layer to fit bases to: a few thousand tokens of any text, less the first few.
typedef struct {
  // (n, heads * dim).
  kvc_rows keys;
  // (m, heads * group * dim): the query heads in order.
  kvc_rows queries;
  // (any, heads * dim of the values).
  kvc_rows values;
  // Radians per position of each pair of components i and i + dim / 2: (dim / 2,). Zeros for a model without
  // RoPE. A model that rotates neighbours (2 i, 2 i + 1) is used with its components reordered.
  const float *frequencies;
  // dim / 2.
  size_t frequencies_len;
  // Not 0 if keys and queries are after RoPE, as engines cache them; the first row is then at
  // `first_position`.
  uint32_t rotated;
  // The position of the first row.
  size_t first_position;
} kvc_samples;

// Bits of scalar codes.
typedef struct {
  // Mean bits per component of a key, in eighths: 0.125 to 8.
  float keys;
  // Bits per component of a value: 1 to 8.
  uint32_t values;
  // Not 0 if blocks keep the mean error of their values, 16 bits a component: worth it up to 2 bits.
  uint32_t mean_error;
} kvc_bits;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the library, such as "0.2.0". The string lives as long as the program.
const char *kvc_version(void);

// An empty cache with product codes. Its exact rows, and those to append, have the given element type.
int32_t kvc_cache_pq(const kvc_books *books,
                     uint32_t element_type,
                     const kvc_window *window,
                     kvc_cache **cache);

// An empty cache with scalar codes.
int32_t kvc_cache_sq(const kvc_heads *heads,
                     uint32_t element_type,
                     const kvc_window *window,
                     kvc_cache **cache);

// Reads a saved cache with product codes; `books` are those that it was saved under.
int32_t kvc_cache_load_pq(const kvc_books *books,
                          const uint8_t *data,
                          size_t len,
                          kvc_cache **cache);

// Reads a saved cache with scalar codes; `heads` are those that it was saved under.
int32_t kvc_cache_load_sq(const kvc_heads *heads,
                          const uint8_t *data,
                          size_t len,
                          kvc_cache **cache);

// A copy, which shares the books or heads: a sequence that branches off.
int32_t kvc_cache_clone(const kvc_cache *cache, kvc_cache **copy);

// Frees a cache; NULL is allowed.
void kvc_cache_free(kvc_cache *cache);

// Saves a cache to a buffer, without its books or heads. `written` becomes its bytes, also with KVC_TOO_SHORT.
int32_t kvc_cache_save(const kvc_cache *cache,
                       uint8_t *buffer,
                       size_t len,
                       size_t *written);

// Number of tokens.
int32_t kvc_cache_len(const kvc_cache *cache, size_t *len);

// Bytes of all tokens, without the books or heads.
int32_t kvc_cache_size(const kvc_cache *cache, size_t *bytes);

// Appends tokens, and codes those that leave the window: keys after RoPE (n, heads * dim) and values
// (n, heads * dim of the values), tokens first. After an error the cache is as before.
int32_t kvc_cache_append(kvc_cache *cache,
                         const kvc_rows *keys,
                         const kvc_rows *values);

// kvc_cache_append of rows with heads first: (heads * n, dim).
int32_t kvc_cache_append_heads(kvc_cache *cache, const kvc_rows *keys, const kvc_rows *values);

// Keeps the first `len` tokens, to drop rejected drafts or to share a prefix. Coded tokens stay coded; the
// window refills from the next token on.
int32_t kvc_cache_truncate(kvc_cache *cache,
                           size_t len);

// Attention of all query heads over all tokens. `queries` (n, heads * group * dim) after RoPE, of any element
// type, are those of the last n tokens, which have been appended; query i sees the tokens up to its own. `out`
// (n, heads, group, dim of the values) has `out_len` floats.
int32_t kvc_cache_attend(const kvc_cache *cache,
                         kvc_workspace *workspace,
                         const kvc_attention *attention,
                         const kvc_rows *queries,
                         float *out,
                         size_t out_len);

// An empty workspace.
int32_t kvc_workspace_new(kvc_workspace **workspace);

// Frees a workspace; NULL is allowed.
void kvc_workspace_free(kvc_workspace *workspace);

// Trains a codebook of `m` subspaces and `nbits` (1 to 12) bits per code on rows of one head; `m` divides their
// components. A code has m * nbits bits.
int32_t kvc_codebook_train(const kvc_rows *sample,
                           size_t m,
                           uint32_t nbits,
                           const kvc_training *options,
                           kvc_codebook **codebook);

// The codebook of Gaussians, which needs no training: for rows in a Hadamard basis divided by their norms, with
// subspaces of 1, 2, 4, 8 or 16 components and 4 to 8 bits.
int32_t kvc_codebook_gaussian(size_t dim,
                              size_t m,
                              uint32_t nbits,
                              kvc_codebook **codebook);

// Frees a codebook; NULL is allowed.
void kvc_codebook_free(kvc_codebook *codebook);

// Saves a codebook to a buffer. `written` becomes its bytes, also with KVC_TOO_SHORT.
int32_t kvc_codebook_save(const kvc_codebook *codebook,
                          uint8_t *buffer,
                          size_t len,
                          size_t *written);

// Reads a saved codebook.
int32_t kvc_codebook_load(const uint8_t *data, size_t len, kvc_codebook **codebook);

// Bytes of the codes of `n` vectors: they are packed in blocks of 64.
int32_t kvc_codebook_codes_len(const kvc_codebook *codebook, size_t n, size_t *len);

// Encodes vectors (n, dim) to `codes`, kvc_codebook_codes_len bytes.
int32_t kvc_codebook_encode(const kvc_codebook *codebook,
                            const kvc_rows *vectors,
                            uint8_t *codes,
                            size_t len);

// Decodes `n` vectors (n, dim) to `out`, whose length in floats is `out_len`.
int32_t kvc_codebook_decode(const kvc_codebook *codebook,
                            const uint8_t *codes,
                            size_t len,
                            size_t n,
                            float *out,
                            size_t out_len);

// The `k` of `n` coded vectors with the largest inner products with queries (group, dim), scaled as for
// attention: the query heads of a group share their selection. Writes indices in ascending order to `indices`,
// whose length is at least min(k, n), and their number to `found`.
int32_t kvc_codebook_search(const kvc_codebook *codebook,
                            const uint8_t *codes,
                            size_t len,
                            size_t n,
                            const kvc_rows *queries,
                            size_t k,
                            uint32_t *indices,
                            size_t indices_len,
                            size_t *found);

// Fits a profile to sample rows of all layers, `tokens` tokens in the layout of `place`: a few thousand, similar
// to later contexts. Level i has steps of `steps[i]` standard deviations of each channel, such as 0.1, 0.25
// and 0.5; there are 1 to 256 levels.
int32_t kvc_profile_fit(const kvc_model *model,
                        const float *steps,
                        size_t levels,
                        size_t tokens,
                        uint32_t element_type,
                        const kvc_layer *sample,
                        size_t n_layers,
                        const kvc_place *place,
                        kvc_profile **profile);

// Frees a profile; NULL is allowed.
void kvc_profile_free(kvc_profile *profile);

// Saves a profile to a buffer. `written` becomes its bytes, also with KVC_TOO_SHORT.
int32_t kvc_profile_save(const kvc_profile *profile, uint8_t *buffer, size_t len, size_t *written);

// Reads a saved profile.
int32_t kvc_profile_load(const uint8_t *data, size_t len, kvc_profile **profile);

// Number of levels.
int32_t kvc_profile_levels(const kvc_profile *profile, size_t *levels);

// The most bytes of a frame of `tokens` tokens.
int32_t kvc_profile_max_frame_len(const kvc_profile *profile, size_t tokens, size_t *len);

// Encodes `tokens` tokens at a level to `frame`, a buffer of at least kvc_profile_max_frame_len bytes; `written`
// becomes the bytes of the frame. `first_token` is the position of the first token in its context; `place` says
// where its row is.
int32_t kvc_profile_encode(const kvc_profile *profile,
                           uint32_t level,
                           uint64_t first_token,
                           size_t tokens,
                           uint32_t element_type,
                           const kvc_layer *rows,
                           size_t n_layers,
                           const kvc_place *place,
                           uint8_t *frame,
                           size_t frame_len,
                           size_t *written);

// Decodes one layer of a frame to its place in a cache, of any element type. `place` says where the row of the
// frame's first token is.
int32_t kvc_profile_decode(const kvc_profile *profile,
                           const uint8_t *frame,
                           size_t frame_len,
                           size_t layer,
                           uint32_t element_type,
                           const kvc_place *place,
                           const kvc_layer_mut *rows);

// Reads and checks the header of a frame.
int32_t kvc_frame_info(const uint8_t *frame, size_t frame_len, kvc_frame *info);

// Copies the text of the last error of this thread to `text`, with a final NUL, cut to `len` bytes. Returns the
// bytes that the whole text needs, its NUL included; 1 if no call has failed. Later calls that succeed do not
// change the text.
size_t kvc_last_error(char *text,
                      size_t len);

// Trains the codebooks of a layer on rows (n, heads * dim) of its keys after RoPE and of its values, such as
// those of a prompt, with `m` subspaces and `nbits` bits per code for each.
int32_t kvc_books_train(const kvc_rows *keys,
                        const kvc_rows *values,
                        size_t heads,
                        size_t key_m,
                        uint32_t key_nbits,
                        size_t value_m,
                        uint32_t value_nbits,
                        const kvc_training *options,
                        kvc_books **books);

// Frees codebooks; NULL is allowed.
void kvc_books_free(kvc_books *books);

// Number of KV heads.
int32_t kvc_books_heads(const kvc_books *books, size_t *heads);

// Saves the codebooks of one head to a buffer. `written` becomes their bytes, also with KVC_TOO_SHORT.
int32_t kvc_books_save(const kvc_books *books,
                       size_t head,
                       uint8_t *buffer,
                       size_t len,
                       size_t *written);

// Reads the saved codebooks of `n` heads.
int32_t kvc_books_load(const kvc_bytes *heads, size_t n, kvc_books **books);

// Fits a rotation to stored rows (n, dim), keys with the queries of their group or values with the rows of W_O,
// which are rows (m, dim), too. `queries` is NULL for KVC_PRINCIPAL. dim is at most 1024.
int32_t kvc_rotation_fit(uint32_t kind,
                         const kvc_rows *stored,
                         const kvc_rows *queries,
                         kvc_rotation **rotation);

// Frees a rotation; NULL is allowed.
void kvc_rotation_free(kvc_rotation *rotation);

// Copies KVC_BASIS, KVC_DUAL or KVC_SIGMA to `out`, `len` numbers, which must be all.
int32_t kvc_rotation_copy(const kvc_rotation *rotation, uint32_t part, double *out, size_t len);

// The least rank that drops components with at most a share `removal`, 0 to 1, of the sum of the singular values.
int32_t kvc_rotation_rank(const kvc_rotation *rotation,
                          double removal,
                          size_t *rank);

// The first `rank` columns of KVC_BASIS or KVC_DUAL, for the decode path.
int32_t kvc_rotation_map(const kvc_rotation *rotation, uint32_t part, size_t rank, kvc_map **map);

// Frees a map; NULL is allowed.
void kvc_map_free(kvc_map *map);

// Projects rows (n, dim) to `out` (n, rank), whose length in floats is `out_len`.
int32_t kvc_map_project(const kvc_map *map, const kvc_rows *from, float *out, size_t out_len);

// Reconstructs rows (n, rank), `len` floats, to `out` (n, dim) with the map of the dual basis.
int32_t kvc_map_reconstruct(const kvc_map *map,
                            const float *from,
                            size_t len,
                            float *out,
                            size_t out_len);

// Fits the bases of a layer of `heads` KV heads. Caches code keys in blocks of `block` tokens, 32 to 256 in steps
// of 32; 64 is usual.
int32_t kvc_bases_fit(const kvc_samples *samples,
                      size_t heads,
                      size_t block,
                      kvc_bases **bases);

// Frees bases; NULL is allowed.
void kvc_bases_free(kvc_bases *bases);

// Saves the basis of one head to a buffer. `written` becomes its bytes, also with KVC_TOO_SHORT.
int32_t kvc_bases_save(const kvc_bases *bases,
                       size_t head,
                       uint8_t *buffer,
                       size_t len,
                       size_t *written);

// Reads the saved bases of `n` heads.
int32_t kvc_bases_load(const kvc_bytes *heads, size_t n, kvc_bases **bases);

// The heads of a layer at some number of bits. The frequencies are those of kvc_samples.
int32_t kvc_heads_new(const kvc_bases *bases,
                      const float *frequencies,
                      size_t frequencies_len,
                      const kvc_bits *bits,
                      kvc_heads **heads);

// Frees heads; NULL is allowed.
void kvc_heads_free(kvc_heads *heads);

// Saves one head to a buffer. `written` becomes its bytes, also with KVC_TOO_SHORT.
int32_t kvc_heads_save(const kvc_heads *heads,
                       size_t head,
                       uint8_t *buffer,
                       size_t len,
                       size_t *written);

// Reads `n` saved heads.
int32_t kvc_heads_load(const kvc_bytes *saved, size_t n, kvc_heads **heads);

// Opens a store: a folder (which need not exist), "memory:///". `name` and its revision identify the weights:
// caches under another name, profile or grid are never found. Contexts are stored in chunks of `chunk` tokens,
// and a last one of a multiple of `tail`, which divides `chunk`; 1500 and 100 are usual.
int32_t kvc_store_open(const char *url,
                       const char *name,
                       const kvc_profile *profile,
                       size_t chunk,
                       size_t tail,
                       kvc_store **store);

// Closes a store; NULL is allowed.
void kvc_store_free(kvc_store *store);

// Stores the chunks of a context that are not there yet, at every level: `n` tokens, whose rows are in the layout
// of `place`. `stored` becomes the number of tokens that a prompt with this beginning will find.
int32_t kvc_store_put(const kvc_store *store,
                      const uint32_t *tokens,
                      size_t n,
                      uint32_t element_type,
                      const kvc_layer *rows,
                      size_t n_layers,
                      const kvc_place *place,
                      size_t *stored);

// The number of tokens of the longest stored prefix of a prompt.
int32_t kvc_store_find(const kvc_store *store, const uint32_t *tokens, size_t n, size_t *prefix);

// Loads the longest stored prefix of a prompt at a level, 0 being the first of the profile, to rows in the layout
// of `place`, and writes its number of tokens to `loaded`. Every byte has been compared with its digest before it
// is decoded. After an error, rows of the prefix may have been written.
int32_t kvc_store_get(const kvc_store *store,
                      const uint32_t *tokens,
                      size_t n,
                      size_t level,
                      uint32_t element_type,
                      const kvc_layer_mut *rows,
                      size_t n_layers,
                      const kvc_place *place,
                      size_t *loaded);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* KVC_H */
